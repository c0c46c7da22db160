"""A job of nodes and local ranks in one process, whose groups count what they send."""

from experiments.simulated_ranks import RankGroup, SimulatedJob


class SimulatedGroup(RankGroup):
    """One member's view of a group; every operation is a meeting of all members."""

    sent_nbytes = 0

    def all_reduce(self, tensor):
        self.sent_nbytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        return super().all_reduce(tensor)

    def all_gather(self, tensor):
        self.sent_nbytes += (self.size - 1) * tensor.nbytes
        return super().all_gather(tensor)

    def all_to_all(self, parts):
        self.sent_nbytes += sum(p.nbytes for i, p in enumerate(parts) if i != self.index)
        return super().all_to_all(parts)


def run_job(num_nodes, num_local, work):
    """Run ``work(node_index, local_index, rail, node)`` on every rank; return results by rank."""
    with SimulatedJob(num_nodes, num_local, SimulatedGroup) as job:
        return job.run(work)
