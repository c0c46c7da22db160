"""Options of a hook that all ranks must be given alike."""

from dataclasses import asdict, dataclass

from topo_ar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HookOptions:
    """What `attach` is asked for beside plan and compression; see there."""

    zero_copy: bool = False
    grad_norm: bool = False
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        every = self.check_replicas_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(
                f"check_replicas_every={every!r} is not a number of steps; 0 is for never"
            )

    def facts(self) -> dict[str, str]:
        """Return name and value of each option."""
        return {name: str(value) for name, value in asdict(self).items()}
