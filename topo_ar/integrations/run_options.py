"""What ``topo-ar run`` is asked for, on its way to the ranks."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.integrations.options import HookOptions

if TYPE_CHECKING:
    from topo_ar.integrations.compression_choice import CompressionSettings

RUN_ENV = "TOPO_AR_RUN"


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `attach` for every DDP, and where rank 0 writes what became of them.

    `report` is a file, or empty. With `observe_steps` nothing is attached: as many steps are looked
    at, advice is written to `report`, and the script ends, unless it is to be kept running. Equal
    on all ranks, as `attach` wants its options.
    """

    plan: str = "auto"
    compression: str = "none"
    policy: str = "exact"
    reproducible: bool = False
    zero_copy: bool = False
    check_replicas_every: int = 0
    timeout_s: float = 600.0
    report: str = ""
    observe_steps: int = 0
    keep_running: bool = False

    @property
    def compression_settings(self) -> "CompressionSettings":
        """Those of `attach`, checked.

        Raises
        ------
        ConfigError
            If one cannot be used.
        """
        from topo_ar.integrations.compression_choice import CompressionSettings

        return CompressionSettings(compression=self.compression, policy=self.policy)

    @property
    def hook_options(self) -> HookOptions:
        """Those of `attach` beside plan and compression, checked.

        Raises
        ------
        ConfigError
            If one cannot be used.
        """
        return HookOptions(zero_copy=self.zero_copy, check_replicas_every=self.check_replicas_every)

    def to_environment(self) -> dict[str, str]:
        """Return the variable that carries them."""
        return {RUN_ENV: msgspec.json.encode(self).decode()}


def options_from(environment: Mapping[str, str] = os.environ) -> RunOptions:
    """Return the options that `environment` carries; all defaults where it has none.

    Raises
    ------
    ConfigError
        If somebody else has set the variable.
    """
    try:
        return msgspec.json.decode(environment.get(RUN_ENV, "{}"), type=RunOptions)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{RUN_ENV} is not what topo-ar run sets: {error}; unset it") from None
