"""Options of a hook that all ranks must be given alike."""

from dataclasses import dataclass

from topo_ar.errors import ConfigError
from topo_ar.integrations.telemetry_options import Telemetry
from topo_ar.telemetry.targets import Targets


@dataclass(frozen=True, slots=True)
class HookOptions:
    """What `attach` is asked for beside plan and compression; see there."""

    zero_copy: bool = False
    grad_norm: bool = False
    check_replicas_every: int = 0
    telemetry: Telemetry | None = None
    targets: Targets | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        every = self.check_replicas_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(
                f"check_replicas_every={every!r} is not a number of steps; 0 is for never"
            )
        if self.targets and (self.telemetry is None or self.telemetry.directory is None):
            raise ConfigError(
                "targets need telemetry=DIRECTORY: incidents are written there, and steps watched"
            )

    def facts(self) -> dict[str, str]:
        """Return name and value of each option, but not where files are."""
        return {
            "zero_copy": str(self.zero_copy),
            "grad_norm": str(self.grad_norm),
            "check_replicas_every": str(self.check_replicas_every),
            "telemetry": f"every {self.telemetry.window_s} s" if self.telemetry else "none",
            "targets": str(self.targets),
        }
