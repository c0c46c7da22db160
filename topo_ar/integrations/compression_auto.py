"""What ``compression="auto"`` comes to: the planner's answer on rank 0, given to all ranks."""

from collections.abc import Callable

import msgspec

from topo_ar.errors import ExecutionError, TopoError
from topo_ar.execution.communicator import Communicator
from topo_ar.integrations.compressed import Decision
from topo_ar.planning.codecs import NONE
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.telemetry.bucket_trace import BucketTrace


def decide(
    communicator: Communicator, trace: BucketTrace, plan: Callable[[], TrainingPlan]
) -> Decision:
    """Return the codec of each parameter; collective, while nothing is in flight.

    Measured times differ from rank to rank, so rank 0 asks the planner and all others hear it.

    Parameters
    ----------
    communicator : Communicator
        Over the ranks that decide.
    trace : BucketTrace
        The last steps, whose last one is whole.
    plan : callable
        Plans for that trace, with the buckets as they are.

    Raises
    ------
    ExecutionError
        If rank 0 cannot be heard.
    """
    answer = b""
    if communicator.rank == 0:
        try:
            answer = msgspec.json.encode(_decision(trace, plan()))
        except TopoError as error:
            answer = msgspec.json.encode(Decision({}, f"nothing is compressed: {error}"))
    said = communicator.gather(answer)[0]
    try:
        return msgspec.json.decode(said, type=Decision)
    except msgspec.DecodeError as error:
        raise ExecutionError(
            f"what rank 0 says of compression is unreadable: {error}", ranks=(0,)
        ) from None


def _decision(trace: BucketTrace, plan: TrainingPlan) -> Decision:
    calls = trace.steps[-1].buckets
    codecs = {
        name: bucket.codec
        for call, bucket in zip(calls, plan.buckets, strict=False)
        for name in call.parameters
        if bucket.codec != str(NONE)
    }
    return Decision(codecs, plan.reason)
