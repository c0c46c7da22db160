"""What codecs cost the ranks of a job, measured on all of them at once."""

from collections.abc import Sequence

import msgspec

from topo_ar.compression.calibration import measure_costs
from topo_ar.errors import ExecutionError
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.compression_choice import AUTO, CompressionSettings
from topo_ar.planning.codec_costs import CPU_COSTS, CodecCost, CodecCosts
from topo_ar.planning.codecs import Codec, parse_codec
from topo_ar.planning.policy import parse_policy


def costs_here(communicator: Communicator, settings: CompressionSettings) -> CodecCosts:
    """Return what the codecs that may be used cost the slowest rank; the same on all. Collective.

    It takes some 50 ms a codec, 0.6 s for all of them, and as much more as ranks have to share
    cores.

    Raises
    ------
    ExecutionError
        If a rank cannot be heard.
    """
    codecs = _candidates(settings)
    if not codecs:
        return CPU_COSTS
    communicator.gather(b"")  # all begin together
    mine = msgspec.json.encode(measure_costs(codecs, len(communicator.nodes)))
    try:
        heard = [
            msgspec.json.decode(each, type=dict[str, CodecCost])
            for each in communicator.gather(mine)
        ]
    except msgspec.DecodeError as error:
        raise ExecutionError(f"what a rank says of codecs' costs is unreadable: {error}") from None
    return CPU_COSTS.with_measured(heard, "measured at start-up on the slowest rank")


def _candidates(settings: CompressionSettings) -> Sequence[Codec]:
    if settings.compression == AUTO:
        return parse_policy(settings.policy, settings.optimizer).allowed
    return [codec for codec in map(parse_codec, settings.codecs) if codec.lossy]
