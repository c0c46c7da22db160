"""The experiment on averaging between nodes: that it trains what it says and counts it."""

import importlib

import pytest

from experiments.training_runs import RunSettings
from tests.test_ddp import HOSTS, _on_hosts

script = importlib.import_module("experiments.15_averaging")


def _trains(rank, size):
    _on_hosts(rank, HOSTS)
    settings = RunSettings(workload="vision", epochs=1, steps=16, timeout_s=20.0)
    return [
        (each["candidate"], each["nbytes_between"], each["quality"])
        for each in script.train(settings)
    ]


@pytest.mark.slow
def test_every_method_trains_and_sends_its_share(ranks) -> None:
    found = ranks.run(_trains, 4, deadline_s=50.0)
    assert all(each == found[0] for each in found)
    (hook, exact, _), *others = found[0]
    assert hook == script.HOOK
    for name, nbytes, quality in others:
        method = script.METHODS[name]
        assert 0 <= quality <= 1
        if method.compression == "none" and not method.delay:
            assert nbytes == exact // method.sync_every
        else:
            assert nbytes <= exact // method.sync_every
