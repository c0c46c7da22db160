"""Facts that all ranks must agree on before they go on; the odd ranks are named in a table.

In debug mode every collective is compared before it begins. Each rank also leaves its last call in
the store of the process group, where the others look when somebody does not come.
"""

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from topo_ar.errors import ExecutionError
from topo_ar.execution.fingerprint import fingerprint
from topo_ar.execution.gather import Channel
from topo_ar.execution.torch_private import default_store

DEBUG_ENV = "TOPO_AR_DEBUG"
STAGE = "agreement"
_PACKAGE = str(Path(__file__).parents[1])
_WIDEST_CELL = 60

Facts = Mapping[str, str]


def debug_wanted() -> bool:
    """Tell whether the environment asks for debug mode."""
    return os.environ.get(DEBUG_ENV, "").lower() not in {"", "0", "false", "no", "off"}


class DisagreementError(ExecutionError):
    """Ranks do not agree, or one did not come to say; the same on all ranks that came."""


class Agreement:
    """Compares facts between the ranks of a channel.

    Parameters
    ----------
    channel : Channel
        The ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0
        self._store = default_store(f"{channel.name}/calls")

    def require_equal(self, facts: Facts) -> None:
        """Compare `facts` with those of all ranks. Collective.

        Parameters
        ----------
        facts : dict of str to str
            Name and value, in the order in which to show them.

        Raises
        ------
        DisagreementError
            On every rank, if the facts differ; it shows those that do, and names the ranks that
            are not as most are. Also if a rank has not come within the channel's deadline.
        RuntimeError
            If a rank is gone.
        """
        self._number += 1
        data = msgspec.json.encode((self._number, facts))
        self._store.set(str(self._channel.rank), data.decode())
        try:
            digests = [words[0] for words in self._channel.all_gather_words([fingerprint(data)])]
        except ExecutionError as error:
            self._require_present(error)
            raise RuntimeError(str(error)) from None
        if len(set(digests)) == 1:
            return
        everyone = [_decoded(text) for text in self._channel.all_gather(data)]
        odd = odd_ranks(digests)
        raise DisagreementError(
            f"ranks do not call the same (call {self._number}; {name_ranks(odd)} differ from the "
            "others); all ranks must call with equal arguments in equal order:\n"
            + _table([facts for _, facts in everyone]),
            ranks=odd,
            stage=STAGE,
        )

    def _require_present(self, error: ExecutionError) -> None:
        """Say who has not come, if the store can tell."""
        last: list[tuple[int, dict[str, str]]] = []
        with suppress(RuntimeError):  # the store went with its owner
            for rank in range(self._channel.world_size):
                key = str(rank)
                last.append(_decoded(self._store.get(key)) if self._store.check([key]) else (0, {}))
        absent = [rank for rank, (number, _) in enumerate(last) if number < self._number]
        if absent:
            raise DisagreementError(
                f"{name_ranks(absent)} did not come to call {self._number}; last calls:\n"
                + _table([{"call": str(number), **facts} for number, facts in last]),
                ranks=absent,
                stage=STAGE,
            ) from error


def call_facts(tensor: torch.Tensor, op: object, name: str) -> dict[str, str]:
    """Return what ranks must have in common when they reduce `tensor` by `op`.

    `name` stands for the caller; the function outside of this package when empty.
    """
    facts = {"operation": str(op).rpartition(".")[2], **tensor_facts(tensor)}
    return {**facts, "caller": name or _caller()}


def tensor_facts(tensor: torch.Tensor) -> dict[str, str]:
    """Return what tensors must have in common to be reduced with each other."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": str(list(tensor.shape)),
        "layout": str(tensor.layout).removeprefix("torch."),
        "device": tensor.device.type,
    }


def odd_ranks(values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of most; all, where no value has most."""
    counts = {value: values.count(value) for value in values}
    most = max(counts.values())
    usual = [value for value, count in counts.items() if count == most]
    return tuple(rank for rank, value in enumerate(values) if len(usual) > 1 or value != usual[0])


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"


def _decoded(data: bytes) -> tuple[int, dict[str, str]]:
    return msgspec.json.decode(data, type=tuple[int, dict[str, str]])


def _table(facts: Sequence[Facts]) -> str:
    """Return the facts that differ, one line for all ranks that have the same."""
    names = list(dict.fromkeys(name for each in facts for name in each))
    names = [name for name in names if len({each.get(name) for each in facts}) > 1]
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, each in enumerate(facts):
        groups.setdefault(tuple(each.get(name, "-") for name in names), []).append(rank)
    columns = [_shortened(column) for column in zip(*groups, strict=True)]
    rows = [
        ("", *names),
        *zip(map(name_ranks, groups.values()), *columns, strict=True),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _shortened(cells: Sequence[str]) -> list[str]:
    """Cut long cells to where they begin to differ."""
    if max(map(len, cells)) <= _WIDEST_CELL:
        return list(cells)
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*cells, strict=False))
    begin = max(0, sum(1 for _ in same) - _WIDEST_CELL // 2)
    end = begin + _WIDEST_CELL
    return [
        ("..." if begin else "") + cell[begin:end] + ("..." if end < len(cell) else "")
        for cell in cells
    ]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
