"""What compression keeps between steps, as tensors by name, for a checkpoint."""

import json
import logging
from collections.abc import Callable

import torch

from topo_ar.compression import checkpoint
from topo_ar.compression.powersgd import PowerSGD
from topo_ar.errors import ExecutionError
from topo_ar.execution.node_group import NodeGroup
from topo_ar.execution.rail_group import RailGroup
from topo_ar.integrations.compressed import CompressedReduction
from topo_ar.planning.codecs import NONE, Codec

logger = logging.getLogger("topo_ar")

State = dict[str, torch.Tensor]

_RESIDUAL = "residual/"
_CODEC = "codec/"


def saved_state(compression: CompressedReduction | None, exact: bool) -> State:
    """Return the state; collective. Empty where nothing is ever compressed.

    It has the residual of every parameter that may be compressed, also before the first step, so
    that what reads checkpoints into a state that is there finds a place for each.
    """
    if compression is None or compression.ended():
        return {}
    made: list[State] = []
    compression.settle()

    def work(node: NodeGroup, rail: RailGroup) -> None:
        made.append(_gathered(compression, exact, node, rail))

    return made[0] if _done(compression, work, -1) else {}


def _done(
    compression: CompressedReduction, work: Callable[[NodeGroup, RailGroup], None], mark: int
) -> bool:
    """Let the ranks do `work`; False where that came to nothing, as compression has ended."""
    try:
        compression.communicator.run(torch.empty(0), work, mark).wait()
    except ExecutionError:
        if compression.communicator.error is not None or not compression.ended():
            raise
        return False
    return True


def _gathered(
    compression: CompressedReduction, exact: bool, node: NodeGroup, rail: RailGroup
) -> State:
    nodes = (rail.size,) if exact else ()
    residuals: State = {}
    codecs: State = {}
    for codec, shapes in _by_codec(compression).items():
        for name, shape in shapes.items():
            residuals[_RESIDUAL + name] = torch.zeros(*nodes, *shape)
        stream = compression.stream_of(codec)
        if stream and isinstance(stream.feedback.compressor, PowerSGD):
            first = stream.feedback.compressor.first_state(shapes)
            codecs |= {f"{_CODEC}{codec}/{key}": value for key, value in first.items()}
    streams = [stream for stream in compression.streams.values() if not stream.off]
    for stream in streams:
        stream.feedback.store.rescale(compression.scale)
        for key, value in checkpoint.state_dict(stream.feedback, rail, node, exact=exact).items():
            if key.startswith(_RESIDUAL):
                residuals[key] = value
            elif key.startswith(_CODEC):
                codecs[f"{_CODEC}{stream.asked}/{key.removeprefix(_CODEC)}"] = value
    in_use = json.dumps([[str(stream.asked), str(stream.codec)] for stream in streams])
    return {
        "schema": torch.tensor(checkpoint.SCHEMA),
        "step": torch.tensor(compression.next_step),
        "loss_scale": torch.tensor(compression.scale, dtype=torch.float64),
        "world_size": torch.tensor(rail.size * node.size),
        "nodes": torch.tensor(rail.size),
        "exact": torch.tensor(exact),
        "config": torch.tensor(list(in_use.encode()), dtype=torch.uint8),
        **dict(sorted(residuals.items())),
        **dict(sorted(codecs.items())),
    }


def load_state(compression: CompressedReduction | None, state: State) -> None:
    """Take over a state; every rank loads the same one.

    Residuals go with their parameters, whatever codec lost them; where ``auto`` has not decided yet
    they wait until it has.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if compression is None or compression.ended():
        if state:
            logger.warning("nothing is compressed here, so what was not sent yet is dropped")
        return
    checkpoint.require_state(state)
    compression.go_on(int(state["step"]))
    if compression.auto is not None and compression.auto.undecided:
        compression.auto.decided = lambda: _take_over(compression, state)
    else:
        _take_over(compression, state)


def _take_over(compression: CompressedReduction, state: State) -> None:
    by_codec = _by_codec(compression)
    known = {_RESIDUAL + name for shapes in by_codec.values() for name in shapes}
    dropped = [key for key in state if key.startswith(_RESIDUAL) and key not in known]
    if dropped and compression.communicator.rank == 0:
        names = ", ".join(key.removeprefix(_RESIDUAL) for key in dropped[:3])
        logger.warning(
            "what was not sent yet of %d parameters that are exact now is dropped, such as %s",
            len(dropped),
            names,
        )

    def work(node: NodeGroup, rail: RailGroup) -> None:
        for codec, shapes in by_codec.items():
            stream = compression.stream_of(codec)
            if stream is not None:
                part = _part(state, codec, shapes)
                checkpoint.load_state_dict(stream.feedback, part, rail, node)

    _done(compression, work, -2)


def _part(state: State, codec: Codec, shapes: dict[str, tuple[int, ...]]) -> State:
    """Return what of a state belongs to one codec, as `checkpoint` knows it."""
    prefix = f"{_CODEC}{codec}/"
    part = {
        key: value
        for key, value in state.items()
        if not key.startswith((_RESIDUAL, _CODEC)) or key.removeprefix(_RESIDUAL) in shapes
    }
    part |= {
        _CODEC + key.removeprefix(prefix): value
        for key, value in state.items()
        if key.startswith(prefix)
    }
    in_use = dict(json.loads(bytes(state["config"].tolist())))
    text = in_use.get(str(codec), "")
    part["config"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return part


def _by_codec(compression: CompressedReduction) -> dict[Codec, dict[str, tuple[int, ...]]]:
    """Return names and shapes of the parameters of each codec that was asked for."""
    found: dict[Codec, dict[str, tuple[int, ...]]] = {}
    for name, shape in compression.parameters.items():
        codec = compression.choose(name)
        if codec != NONE:
            found.setdefault(codec, {})[name] = shape
    return found
