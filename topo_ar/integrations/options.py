"""Options of a hook that all ranks must be given alike."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class HookOptions:
    """What `attach` is asked for beside plan and compression; see there."""

    zero_copy: bool = False
    grad_norm: bool = False

    def facts(self) -> dict[str, str]:
        """Return name and value of each option."""
        return {name: str(value) for name, value in asdict(self).items()}
