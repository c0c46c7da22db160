"""Groups that codecs exchange tensors with: the co-located ranks, and a rank's like on all nodes.

They work on the communication thread while the pipeline has no chunks. Both are a
`topo_ar.compression.protocol.Group`; every wait has the deadline of the loop and looks for failures
as it does.
"""

from collections.abc import Mapping, Sequence

import torch

from topo_ar.errors import ExecutionError
from topo_ar.execution.messages import Attend, Call
from topo_ar.execution.node_group import NodeGroup
from topo_ar.execution.rail_group import RailGroup
from topo_ar.execution.ticket import GroupWork
from topo_ar.execution.transports.shm import Node
from topo_ar.execution.transports.tcp import Flow


class Groups:
    """The two groups of a rank, and the works that are done with them.

    Parameters
    ----------
    node : Node
        The co-located ranks.
    rail : sequence of int
        The ranks in this one's place on all nodes, in the order of the nodes.
    rank : int
        This rank.
    flows : dict
        A flow to each of the others.
    attend : callable
        Does an errand to its end, on the communication thread.
    """

    def __init__(
        self,
        node: Node,
        rail: Sequence[int],
        rank: int,
        flows: Mapping[int, Flow],
        attend: Attend,
    ) -> None:
        self._rank = rank
        # Nodes may do more or less inside, such as for a matrix that one of them answers for.
        self._calls = Call(), Call()
        self.node = NodeGroup(node, attend, self._calls[0])
        self.rail = RailGroup(rail, rank, node, flows, attend, self._calls[1])

    def do(self, work: GroupWork) -> None:
        """Do a work; the pipeline must be idle."""
        for call in self._calls:
            call.fingerprint, call.number = work.fingerprint, 0
        try:
            with torch.no_grad():
                work.work(self.node, self.rail)
        except ExecutionError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise ExecutionError(text, ranks=(self._rank,), stage="compression") from error
        self.node.finish()
