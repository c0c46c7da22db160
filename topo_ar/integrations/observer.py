"""What a hook tells those who watch its steps."""

from collections.abc import Sequence

import torch

from topo_ar.integrations.bucket import Bucket


class Observer:
    """Watches the steps of a hook; the same calls in the same order on all ranks."""

    def begin(self, step: int) -> None:
        """Take note that a step is about to begin, counted from 0; nothing is in flight."""

    def called(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Take note of a bucket that is about to be reduced."""

    def done(self, reduced: torch.Tensor) -> None:
        """Take note of a bucket that is reduced, as a rule on the communication thread."""


class Observers(Observer):
    """Tells all of several.

    Attributes
    ----------
    members : list of Observer
        In the order in which they are told.
    """

    def __init__(self, members: Sequence[Observer] = ()) -> None:
        self.members = list(members)
        self._step = -1

    def called(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Pass a call on, after the beginning of a step where it is the first one.

        The numbers of buckets restart in each synchronised backward, and in its shadow for ranks
        that have run out of batches: nothing else does on all ranks.
        """
        if bucket.index() == 0:
            self._step += 1
            for member in self.members:
                member.begin(self._step)
        for member in self.members:
            member.called(bucket, tensor)

    def done(self, reduced: torch.Tensor) -> None:
        """Pass a result on."""
        for member in self.members:
            member.done(reduced)
