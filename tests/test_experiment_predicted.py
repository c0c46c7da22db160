"""The simulator against what emulated hosts measured: the committed records, fitted and scored."""

import importlib
from pathlib import Path

import pytest

from topo_ar.errors import ConfigError
from topo_ar.planning.bounds import all_reduce_bound
from topo_ar.simulation.collective import Simulated
from topo_ar.simulation.templates import LinkUse
from topo_ar.telemetry.records import read_records
from topo_ar.topology.graph import to_networkx

experiment = importlib.import_module("experiments.08_predicted_measured")
RESULTS = Path(__file__).parent.parent / "experiments" / "results"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("predicted")
    code = experiment.run(RESULTS, out)
    found = read_records(out / "predicted_measured.jsonl")
    assert code == int(not all(row["passed"] for row in found if "target" in row))
    return found


def test_runs_that_were_not_fitted_are_predicted_within_the_targets(records):
    targets = {row["target"]: row for row in records if "target" in row}
    assert len(targets) == 3
    for row in targets.values():
        assert row["passed"], row
    assert targets["median error from 1 MiB"]["num_rows"] >= 28


def test_nothing_that_was_fitted_is_scored_and_nothing_is_dropped(records):
    rows = [row for row in records if "target" not in row]
    read = list(experiment.read(RESULTS))
    assert len(rows) == len(read) >= 50
    assert {row["run"] for row in rows if row["calibrated"]} == set(experiment.CALIBRATED_ON)
    judged = [r for r in rows if r["in_scope"] and not r["calibrated"]]
    targets = [row for row in records if "target" in row]
    assert targets[0]["num_rows"] + targets[2]["num_rows"] == len(judged)
    for row in rows:
        assert row["low_seconds"] <= row["median_seconds"] <= row["high_seconds"]
        assert row["error"] == pytest.approx(row["predicted_seconds"] / row["median_seconds"] - 1)


def test_predictions_are_above_the_bound_of_the_hosts():
    host = experiment.Host()
    for name, row in experiment.read(RESULTS):
        if name not in ("uneven", "slow-nic", "alternating"):
            continue
        topology = experiment.topology_of(row, host)
        graph = to_networkx(topology)
        for _, _, edge in graph.edges(data=True):
            edge["bandwidth"] = round(edge.get("bandwidth", 1e12))
        bound = all_reduce_bound(graph, list(topology.ranks))
        assert experiment.predict(row, host) >= row["nbytes"] / float(bound.algbw)


def simulated(seconds, nbytes, busy):
    wire = LinkUse("nic", "ethernet", 2, True, nbytes, busy)
    inside = LinkUse("shm", "shm", 8, False, nbytes, 1.0)
    return Simulated(seconds, (), (inside, wire), (), ())


@pytest.mark.parametrize(
    ("nbytes", "needed", "expected"),
    [
        (65_536, 0.5, 0.5),  # all of it is saved up while nothing is sent
        (4_096, 0.1, 0.9),  # no more is saved than is sent
        (1_000_000, 0.8, 0.9),  # of 1 MB, 125 kB are
        (25_000_000, 1.0, 1.0),  # nothing is: the wire never rests
    ],
)
def test_a_bucket_saves_up_its_burst_while_nothing_is_sent(nbytes, needed, expected):
    links_of = {"burst": 125_000 * 1514 / 1448, "mtu": 1500}
    found = simulated(1.0, nbytes, needed)
    assert experiment.with_credit(found, links_of) == pytest.approx(expected)


def test_without_a_wire_there_is_no_credit():
    found = Simulated(1.0, (), (), (), ())
    assert experiment.with_credit(found, {"burst": 131072, "mtu": 1500}) == 1.0


def test_folders_without_what_is_needed_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no rows"):
        experiment.run(tmp_path, tmp_path)
    (tmp_path / "wire_largest.jsonl").write_bytes((RESULTS / "wire_largest.jsonl").read_bytes())
    with pytest.raises(ConfigError, match="lacks the runs large and one-node"):
        experiment.run(tmp_path, tmp_path)
