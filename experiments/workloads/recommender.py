"""The recommender: neural collaborative filtering on MovieLens-100K, interactions kept by node.

The ratings are those of the package `recbole` (F. M. Harper and J. A. Konstan, "The MovieLens
Datasets", 2015); their terms forbid passing them on, so that they are only read where they are
installed. Where it is absent, generated tastes. X. He et al., "Neural Collaborative Filtering"
(2017), section 4.1: each user's last interaction is held out and ranked among 99 items that the
user has not seen; HR@10 is how often it comes among the first ten. A user is known by an embedding
and by the item before, as in S. Rendle et al., "Factorizing Personalized Markov Chains" (2010).
Users are divided over the nodes, and the ranks of a node train on its users alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from experiments.workloads.packaged import packaged_file
from experiments.workloads.workload import (
    Baseline,
    Optimizers,
    Place,
    Workload,
    generator_of,
)

_NUM_CANDIDATES = 100
_TOP = 10


class Filtering(nn.Module):
    """Products of embeddings beside a perceptron over others; 282,000 parameters, most sparse.

    The item before has embeddings of its own; one more stands for none.
    """

    def __init__(self, num_users: int, num_items: int, width: int = 32) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, 2 * width, sparse=True)
        self.items = nn.Embedding(num_items, 2 * width, sparse=True)
        self.before = nn.Embedding(num_items + 1, 2 * width, sparse=True)
        for embedding in (self.users, self.items, self.before):
            nn.init.normal_(embedding.weight, std=0.05)
        self.perceptron = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.output = nn.Linear(2 * width, 1)

    def forward(
        self, users: torch.Tensor, before: torch.Tensor, items: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return how well `items` suit `users`, and the mean square of both embeddings.

        `users` and the items `before` are (batch, 1), `items` (batch, number).
        """
        user, item = self.users(users) + self.before(before), self.items(items)
        (left, deep), (right, other) = user.chunk(2, -1), item.chunk(2, -1)
        deep = self.perceptron(torch.cat([deep.expand_as(other), other], -1))
        fit = self.output(torch.cat([left * right, deep], -1)).squeeze(-1)
        return fit, user.square().mean() + item.square().mean()


class Recommender(Workload):
    """Eight items that were not chosen beside each that was; gradients of embeddings are sparse."""

    name = "recommender"
    metric = "HR@10"
    target = 0.60
    global_batch = 4096
    epochs = 6
    rate = 2e-2
    sparse = True
    num_negatives = 8
    pull = 0.02  # weight of the embeddings' mean square

    @property
    def num_examples(self) -> int:
        """Interactions to train on."""
        return len(self.data["users"])

    @property
    def baseline(self) -> Baseline:
        """HR@10 of the items' popularity in training."""
        counts = torch.bincount(self.data["items"], minlength=int(self.data["num_items"])).float()
        hits = hits_of(counts[self.data["candidates"]])
        return Baseline("popularity", float(hits.mean()))

    def module(self) -> nn.Module:
        """Return a new model."""
        return Filtering(int(self.data["num_users"]), int(self.data["num_items"]))

    def optimizers(self, module: nn.Module) -> Optimizers:
        """Return Adam's form for sparse gradients, and Adam for the rest."""
        assert isinstance(module, Filtering)
        sparse = [module.users.weight, module.items.weight, module.before.weight]
        rest = [*module.perceptron.parameters(), *module.output.parameters()]
        return [torch.optim.SparseAdam(sparse, self.rate), torch.optim.Adam(rest, self.rate)]

    def indices(self, epoch: int, step: int, seed: int, place: Place) -> torch.Tensor:
        """Return interactions of the users of the rank's node alone."""
        mine = shard(self.data["users"], place.node, place.num_nodes)
        order = mine[torch.randperm(len(mine), generator=generator_of(epoch, 0, seed, place.node))]
        share = self.global_batch // place.world_size
        first = (step * place.local_size + place.local_rank) * share
        # A small node's shard begins again.
        return torch.roll(order, -first)[:share]

    def loss(
        self, model: nn.Module, indices: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the binary cross-entropy of chosen items and others drawn anew."""
        users, before, chosen = (
            self.data[name][indices, None] for name in ("users", "before", "items")
        )
        others = torch.randint(
            int(self.data["num_items"]), (len(indices), self.num_negatives), generator=generator
        )
        items = torch.cat([chosen, others], 1)
        fit, square = model(users, before, items)
        right = torch.zeros_like(fit)
        right[:, 0] = 1
        total: torch.Tensor = self.pull * square
        return total + functional.binary_cross_entropy_with_logits(fit, right)

    def score(self, module: nn.Module, part: slice) -> tuple[torch.Tensor, int]:
        """Return for how many users the held-out item comes among the first ten."""
        candidates = self.data["candidates"][part]
        users, before = (
            self.data[name][part, None] for name in ("held_out_users", "held_out_before")
        )
        hits = hits_of(module(users, before, candidates)[0])
        return hits.sum(), len(hits)


def hits_of(fit: torch.Tensor) -> torch.Tensor:
    """Return 1 for each row whose first value is among the ten largest, else 0.

    Of equal values half count as larger.
    """
    first, others = fit[:, :1], fit[:, 1:]
    place = (others > first).sum(1) + (others == first).sum(1) / 2
    return (place < _TOP).double()


def shard(users: torch.Tensor, node: int, num_nodes: int) -> torch.Tensor:
    """Return which interactions a node keeps: those of every `num_nodes`-th user."""
    return (users % num_nodes == node).nonzero().squeeze(1)


def read_recommender() -> tuple[dict[str, torch.Tensor], str, bool]:
    """Return interactions to train on and candidates to rank; where from; are they made up?"""
    path = packaged_file("recbole", "dataset_example", "ml-100k", "ml-100k.inter")
    if path is None:
        users, items, times = _generated()
        source = "generated tastes"
    else:
        table = np.loadtxt(path, skiprows=1, dtype=np.int64)
        users, items, times = table[:, 0] - 1, table[:, 1] - 1, table[:, 3]
        source = "MovieLens-100K of the package recbole"
    return held_out(users, items, times), source, path is None


def held_out(
    users: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    items: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    times: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> dict[str, torch.Tensor]:
    """Return what to train on, and each user's last item before 99 that the user has not seen."""
    order = np.lexsort((items, times, users))
    user, item = torch.from_numpy(users[order]), torch.from_numpy(items[order])
    num_users, num_items = int(user.max()) + 1, int(item.max()) + 1
    last = torch.cat([user[1:] != user[:-1], torch.tensor([True])])
    # After a user's last interaction comes another's first, which nothing came before.
    before = torch.where(last, num_items, item).roll(1)
    seen = torch.zeros(num_users, num_items, dtype=torch.bool)
    seen[user, item] = True
    generator = torch.Generator().manual_seed(7)
    unseen = torch.multinomial(
        (~seen[user[last]]).float(), _NUM_CANDIDATES - 1, generator=generator
    )
    return {
        "users": user[~last],
        "items": item[~last],
        "before": before[~last],
        "held_out_users": user[last],
        "held_out_before": before[last],
        "candidates": torch.cat([item[last][:, None], unseen], 1),
        "num_users": torch.tensor(num_users),
        "num_items": torch.tensor(num_items),
    }


def _generated() -> Sequence["np.ndarray[tuple[int], np.dtype[np.int64]]"]:
    """Return 60 interactions of each of 600 users, who choose by hidden tastes."""
    rng = np.random.default_rng(0)
    tastes, traits = rng.normal(size=(600, 8)), rng.normal(size=(1000, 8))
    fit = tastes @ traits.T + rng.gumbel(size=(600, 1000))
    items = np.argsort(-fit, axis=1)[:, :60]
    users = np.repeat(np.arange(600), 60)
    times = rng.permuted(np.tile(np.arange(60), (600, 1)), axis=1)
    return users, items.ravel().astype(np.int64), times.ravel().astype(np.int64)
