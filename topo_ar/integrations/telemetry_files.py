"""The files that rank 0 writes of a running job; a full disk ends them, never the training."""

import logging
from typing import Any

from topo_ar.errors import ConfigError
from topo_ar.integrations.telemetry_options import Telemetry
from topo_ar.telemetry.job_windows import JobStart, RecordFile, Window
from topo_ar.telemetry.open_metrics import write_open_metrics

logger = logging.getLogger("topo_ar")

# More ranks than this make a chart nobody reads.
_MOST_CURVES = 16


class TelemetryFiles:
    """Writes windows to what `options` name.

    Parameters
    ----------
    options : Telemetry
        Where.
    start : JobStart
        The first line of the records.

    Raises
    ------
    ConfigError
        If something cannot be written, or TensorBoard is asked for and not installed.
    """

    def __init__(self, options: Telemetry, start: JobStart) -> None:
        self._board = _tensorboard(options) if options.tensorboard else None
        self._records = RecordFile(options.records_path, start, options.max_nbytes)
        self._metrics = options.metrics_path
        self._broken = False

    def write(self, window: Window) -> None:
        """Write a window everywhere; where that fails, say so and write no more."""
        if self._broken:
            return
        try:
            self._records.write(window)
            if self._metrics is not None:
                write_open_metrics(window, self._metrics)
            if self._board is not None:
                for name, value in _scalars(window).items():
                    self._board.add_scalar(f"topo_ar/{name}", value, window.last_step)
        except OSError as error:
            self._broken = True
            logger.warning("telemetry ends: %s", error)

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self._board is not None:
            self._board.close()


def _tensorboard(options: Telemetry) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "Telemetry(tensorboard=True) needs TensorBoard: pip install tensorboard"
        ) from None
    return SummaryWriter(str(options.directory))


def _scalars(window: Window) -> dict[str, float]:
    found = {
        "step_seconds": window.step_seconds,
        "exposed_share": window.exposed_share,
        "bytes/inside_node": window.nbytes_inside,
        "bytes/between_nodes": window.nbytes_between,
        "fallbacks": window.fallbacks,
        "own_share": window.own_share,
    }
    for name in ("compute_seconds", "wait_seconds", "last_share"):
        for rank, value in enumerate(getattr(window.ranks, name)[:_MOST_CURVES]):
            found[f"{name}/rank {rank}"] = value
    for bucket in window.buckets:
        found[f"transfer_seconds/bucket {bucket.index}"] = bucket.transfer_seconds
        if bucket.predicted_seconds is not None:
            found[f"predicted_seconds/bucket {bucket.index}"] = bucket.predicted_seconds
    return found
