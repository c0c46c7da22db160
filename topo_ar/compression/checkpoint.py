"""Error feedback in a checkpoint: tensors only, of the model's size, for any later job.

Only the sum of the residuals over the nodes matters to what will be sent, so that is what is saved
by default, whole parameters of it (A. Ramesh et al., "Zero-Shot Text-to-Image Generation", 2021,
appendix E). ``exact`` keeps each node's own, n times as much, for a resumed job that goes on bit
for bit. Gradients are means over N ranks after the sum, so N times less of a residual arrives than
in a job of one rank: a job of N' ranks takes over ``N' / N`` of the sum, in equal parts on its
nodes, and what is outstanding stays the same.
"""

import json

import torch

from topo_ar.compression.error_feedback import ErrorFeedback
from topo_ar.compression.protocol import Group
from topo_ar.compression.state import Run, union
from topo_ar.errors import ConfigError

SCHEMA = 1
_RESIDUAL = "residual/"
_CODEC = "codec/"

State = dict[str, torch.Tensor]


def state_dict(feedback: ErrorFeedback, rail: Group, node: Group, *, exact: bool = False) -> State:
    """Return residuals, codec state and counters; a collective of the whole job.

    Saving in the default mode and loading at once makes a running job go on bit for bit as one
    that resumes from the checkpoint.

    Parameters
    ----------
    feedback : ErrorFeedback
        Its step at hand is settled.
    rail, node : Group
        The groups it reduces in, or others of the same ranks that take tensors on the CPU. Ranks
        of a rail have the same layouts.
    exact : bool
        Keep the residuals of each node instead of their sum.

    Returns
    -------
    dict of str to Tensor
        The same on all ranks. ``residual/NAME`` has the parameter's shape, with a first dimension
        of the nodes if `exact`. It can be loaded with ``torch.load(..., weights_only=True)``.
    """
    feedback.settle()
    store = feedback.store
    runs = list(store.runs())
    mine = torch.cat([torch.empty(0), *(run.values.cpu() for run in runs)])
    kept = rail.all_gather(mine) if exact else [rail.all_reduce(mine)]
    header = json.dumps([(run.name, run.shape, run.begin, run.end) for run in runs])
    headers = node.all_gather(_text(header))
    bodies = [node.all_gather(values) for values in kept]
    residuals: State = {}
    for member, text in enumerate(headers):
        at = 0
        for name, shape, begin, end in json.loads(bytes(text.tolist())):
            whole = residuals.setdefault(name, torch.zeros(len(kept), *shape))
            for rows, body in zip(whole.view(len(kept), -1), bodies, strict=True):
                rows[begin:end] += body[member][at : at + end - begin]
            at += end - begin
    return {
        "schema": torch.tensor(SCHEMA),
        "step": torch.tensor(feedback.next_step),
        "loss_scale": torch.tensor(store.scale, dtype=torch.float64),
        "world_size": torch.tensor(rail.size * node.size),
        "nodes": torch.tensor(rail.size),
        "exact": torch.tensor(exact),
        "config": _text(str(feedback.compressor.codec)),
        **{
            _RESIDUAL + name: whole if exact else whole[0]
            for name, whole in sorted(residuals.items())
        },
        **{
            _CODEC + name: value
            for name, value in sorted(union(feedback.compressor.state_dict(), node).items())
        },
    }


def require_state(state: State) -> None:
    """Refuse what no `state_dict` of a known schema is.

    Raises
    ------
    ConfigError
        If it is none.
    """
    schema = int(state["schema"]) if "schema" in state else None
    if schema is None or schema > SCHEMA:
        raise ConfigError(
            f"the state of error feedback has schema {schema}, this version reads up to {SCHEMA}; "
            "give it what topo_ar.compression.checkpoint.state_dict returned"
        )


def load_state_dict(feedback: ErrorFeedback, state: State, rail: Group, node: Group) -> None:
    """Take over a state; every rank of the job loads the same one.

    Each rank of a node takes an equal slice of each parameter. Buckets claim their elements
    through `ErrorFeedback.reshard`, which must be called for each before its first step.

    Parameters
    ----------
    feedback : ErrorFeedback
        A new one, or one whose residuals are replaced. Its codec may be another than the saved
        one: residuals are gradients that are still to come, whatever lost them; the codec's own
        state is taken over only by the same codec.
    state : dict of str to Tensor
        From `state_dict`, of a job of any size.
    rail, node : Group
        The groups of this job; only their sizes and this rank's positions are used.

    Raises
    ------
    ConfigError
        If `state` is not such a state or of a newer schema.
    """
    require_state(state)
    feedback.reset()
    store = feedback.store
    exact = bool(state["exact"])
    world = rail.size * node.size
    same = exact and int(state["nodes"]) == rail.size and int(state["world_size"]) == world
    factor = world / int(state["world_size"]) / rail.size
    for key, saved in state.items():
        if not key.startswith(_RESIDUAL):
            continue
        total = saved.sum(dim=0) if exact else saved
        whole = saved[rail.index] if same else total * factor
        numel = whole.numel()
        begin = numel * node.index // node.size
        end = numel * (node.index + 1) // node.size
        if begin < end:
            values = whole.reshape(-1)[begin:end].clone()
            name = key.removeprefix(_RESIDUAL)
            store.add(Run(name, tuple(whole.shape), begin, end, values))
    store.scale = float(state["loss_scale"])
    feedback.next_step = int(state["step"])
    if bytes(state["config"].tolist()).decode() == str(feedback.compressor.codec):
        feedback.compressor.load_state_dict(
            {k.removeprefix(_CODEC): v for k, v in state.items() if k.startswith(_CODEC)}
        )


def _text(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
