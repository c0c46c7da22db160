"""``topo_ar.mirror``: a function on several ranks, its results, and what becomes of failures."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.hosts import wait_until_gone
from topo_ar.errors import ConfigError, ExecutionError

ROOT = Path(__file__).parents[1]


def _train(scale: float) -> tuple[int, float, bool]:
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 4), scale * (dist.get_rank() + 1))).sum().backward()
    attached = topo_ar.handle_of(model).communicator.world_size == dist.get_world_size()
    sys.stdout.write("trained\n")
    return dist.get_rank(), float(model.module.weight.grad.sum()), attached


def test_results_of_all_ranks_by_number(capfd) -> None:
    assert topo_ar.mirror(_train, 2.0, nproc=2, timeout_s=60.0) == [
        (0, 12.0, True),
        (1, 12.0, True),
    ]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if "trained" in line) == [
        "[rank 0] trained",
        "[rank 1] trained",
    ]


def _one_fails(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raises":
            raise KeyError("no such batch")
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(600)
    dist.barrier()


@pytest.mark.slow
def test_the_rank_that_raised_first_is_named() -> None:
    with pytest.raises(
        ExecutionError, match="rank 1 of 2 raised KeyError: 'no such batch'"
    ) as told:
        topo_ar.mirror(_one_fails, 1, "raises", nproc=2, timeout_s=60.0)
    assert told.value.ranks == (1,)
    assert "in _one_fails" in str(told.value)
    assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.slow
def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(ExecutionError, match="raised|rank 0 with 137") as told:
        topo_ar.mirror(_one_fails, 0, "dies", nproc=2, timeout_s=60.0)
    assert told.value.ranks


@pytest.mark.slow
def test_ranks_that_are_not_through_in_time_are_ended() -> None:
    with pytest.raises(ExecutionError, match=r"ranks \[0, 1\] of 2 were not through after 6 s"):
        topo_ar.mirror(_one_fails, 5, "hangs", nproc=2, timeout_s=6.0)


def test_what_cannot_be_sent_is_refused_before_there_are_ranks() -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        topo_ar.mirror(print, threading.Lock(), nproc=2)
    with pytest.raises(ConfigError, match="options are those of topo_ar.attach"):
        topo_ar.mirror(print, nproc=2, speed=11)


NOTEBOOK = """
import sys, topo_ar
if {hidden}:
    sys.modules["cloudpickle"] = None
offset = 10
def cell(value):
    import torch.distributed as dist
    return offset + value + dist.get_rank()
{guard}
    try:
        print("results", topo_ar.mirror(cell, 5, nproc=2, timeout_s=60.0))
    except topo_ar.ConfigError as error:
        print("refused", error)
"""


def _run(text: str, *, from_file: Path | None) -> str:
    if from_file is not None:
        from_file.write_text(text)
    command = [sys.executable, "-"] if from_file is None else [sys.executable, str(from_file)]
    given = text if from_file is None else None
    token = f"{os.getpid()}-{time.time_ns()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOPO_AR_TEST_TOKEN": token}
    done = subprocess.run(
        command, input=given, env=environment, capture_output=True, text=True, timeout=100
    )
    assert wait_until_gone(token) == []
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_is_defined_in_a_notebook(tmp_path) -> None:
    """Standard input stands for a notebook: its functions belong to no file."""
    pytest.importorskip("cloudpickle")
    text = NOTEBOOK.format(hidden=False, guard="if True:")
    assert "results [15, 16]" in _run(text, from_file=None)
    # By value, a script without a guard works too.
    assert "results [15, 16]" in _run(text, from_file=tmp_path / "script.py")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_without_cloudpickle(tmp_path) -> None:
    text = NOTEBOOK.format(hidden=True, guard='if __name__ == "__main__":')
    assert "refused cell is defined in a notebook or a shell; `pip install" in _run(
        text, from_file=None
    )
    assert "results [15, 16]" in _run(text, from_file=tmp_path / "script.py")
    careless = NOTEBOOK.format(hidden=True, guard="if True:")
    assert 'put the call under `if __name__ == "__main__":`' in _run(
        careless, from_file=tmp_path / "careless.py"
    )
