"""Which requests are due is the same on all ranks, whatever their order; who starts a rank."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.errors import ConfigError
from topo_ar.integrations.horovod.launch import Place, address_of, place_of
from topo_ar.integrations.horovod.negotiation import Negotiation, Signature, batches

SUM = {"kind": "allreduce", "dtype": "float32", "device": "cpu", "op": "Sum"}


def _signature(name: str, numel: int = 3, **options: object) -> Signature:
    return Signature(name=name, shapes=((numel,),), **{**SUM, **options})


@st.composite
def _orders(draw):
    """For each rank the same names in an order of its own, in rounds of its own."""
    size = draw(st.integers(1, 5))
    names = [f"n{number}" for number in range(draw(st.integers(1, 8)))]
    num_rounds = draw(st.integers(1, 4))
    plan = []
    for _ in range(size):
        order = draw(st.permutations(names))
        when = sorted(draw(st.integers(0, num_rounds - 1)) for _ in names)
        plan.append(
            [[n for n, w in zip(order, when, strict=True) if w == at] for at in range(num_rounds)]
        )
    return names, plan, draw(st.booleans())


@given(_orders())
def test_every_name_is_due_once_when_all_have_it_and_alike_on_all_ranks(case) -> None:
    names, plan, repeats = case
    replicas = [Negotiation(len(plan)) for _ in plan]
    for _ in range(2):  # the second time numbers stand for what is known
        seen: list[str] = []
        for at in range(len(plan[0])):
            messages = [
                replica.announce((_signature(n, repeats=repeats) for n in rounds[at]), 7, False)
                for replica, rounds in zip(replicas, plan, strict=True)
            ]
            due = [replica.hear(messages) for replica in replicas]
            assert all(each == due[0] for each in due)
            seen += [each.name for each in due[0]]
            announced = [{n for said in rounds[: at + 1] for n in said} for rounds in plan]
            assert set(seen) == set.intersection(*announced)
            assert not any(each.problem for each in due[0])
        assert sorted(seen) == sorted(names)
        assert replicas[0].completed == 7


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["Sum", "Max"]))), st.integers(1, 99))
def test_batches_take_everything_once_and_keep_to_the_threshold(sizes, threshold) -> None:
    negotiation = Negotiation(1)
    wanted = [_signature(f"n{i}", size, op=op) for i, (size, op) in enumerate(sizes)]
    due = negotiation.hear([negotiation.announce(wanted, 0, False)])
    found = batches(due, threshold, {"float32": 4})
    assert sorted(each.name for batch in found for each in batch) == sorted(w.name for w in wanted)
    for batch in found:
        assert len({each.first.op for each in batch}) == 1
        assert len(batch) == 1 or sum(4 * each.first.numel for each in batch) <= threshold


def _one_round(*asked: Signature | None) -> list:
    replica = Negotiation(len(asked))
    return replica.hear(
        [replica.announce([each] if each else [], 0, each is None) for each in asked]
    )


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ((_signature("a"), _signature("a", 4)), r"\[3\].* on rank 0, .*\[4\].* on rank 1"),
        ((_signature("a"), _signature("a", dtype="int32")), "float32.*int32"),
        ((_signature("a"), _signature("a", op="Max")), "Sum.*Max"),
        ((_signature("a"), _signature("a", factors=(0.5, 1.0))), "0.5"),
        ((_signature("a", kind="allgather", op=""), None), r"allgather 'a' needs all ranks.*\[1\]"),
        ((_signature("a", op="Min"), None), "allreduce with Min"),
    ],
)
def test_what_ranks_do_not_agree_on_is_said_by_name(asked, problem) -> None:
    (due,) = _one_round(*asked)
    assert re.search(problem, due.problem), due.problem


def test_joined_ranks_are_counted_in_and_the_last_is_known() -> None:
    replica = Negotiation(3)
    hear = lambda *joined: replica.hear(  # noqa: E731
        [replica.announce([] if j else [_signature("a")], 0, j) for j in joined]
    )
    (due,) = hear(False, True, False)
    assert sorted(due.signatures) == [0, 2]
    assert replica.last_joined is None
    assert hear(True, True, False)[0].problem == ""
    assert hear(True, True, True) == []
    assert replica.last_joined == 2
    assert hear(False, False, False)[0].problem == ""  # a new round of data


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place(0, 1, 0, 1)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Place(3, 4, 1, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Place(1, 2, 1, 2),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, Place(0, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Place(0, 1, 0, 1)),  # a shell, not a step
        (
            {
                "SLURM_PROCID": "2",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            Place(2, 4, 0, None),
        ),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"}, Place(0, 2, 0)),
    ],
)
def test_launchers_are_understood(environment, place) -> None:
    assert place_of(environment) == place


def test_an_address_is_only_guessed_on_one_host() -> None:
    key = {"PMIX_NAMESPACE": "prte@1"}
    address, port = address_of(key, Place(1, 2, 1, 2))
    assert address == "127.0.0.1"
    assert 10_000 <= int(port) < 30_000
    assert address_of(key, Place(0, 2, 0, 2)) == (address, port)
    assert address_of({"PMIX_NAMESPACE": "prte@2"}, Place(0, 2, 0, 2))[1] != port
    given = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert address_of(given, Place(5, 16, 1, 8)) == ("node1", "29500")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        address_of(key, Place(0, 4, 0, 2))
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        address_of({}, Place(0, 2, 0, 2))
    with pytest.raises(ConfigError, match="RANK='one' is not a number"):
        place_of({"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK=4 is not a rank of WORLD_SIZE=4"):
        place_of({"RANK": "4", "WORLD_SIZE": "4"})
