"""What the doctor finds on hosts, in the use of a DDP, and between ranks; each with its remedy."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from topo_ar.integrations.model_checks import differing_versions
from topo_ar.topology import host_findings as host


def _interfaces(root, **mbit):
    for name, speed in mbit.items():
        directory = root / "class" / "net" / name
        directory.mkdir(parents=True)
        (directory / "operstate").write_text("up\n" if speed else "down\n")
        (directory / "speed").write_text(f"{speed or -1}\n")
        (directory / "device").mkdir()
    return root


@pytest.mark.parametrize(
    ("used", "about", "said"),
    [
        (["eth0"], "wrong interface", "TOPO_AR_SOCKET_IFNAME=ib0"),
        (["docker0"], "wrong interface", "the interface between the nodes"),
        (["ib0"], "one NIC used", "TOPO_AR_SOCKET_IFNAME=ib0,ib1"),
        (["ib0", "ib1"], "", ""),
        (["lo"], "", ""),
        ([], "", ""),
    ],
)
def test_interfaces_of_a_host(tmp_path, used, about, said) -> None:
    sys_tree = _interfaces(tmp_path, eth0=1000, ib0=200_000, ib1=200_000, ib2=0)
    found = host.interface_findings(used, sys_tree)
    assert {each.about for each in found} == ({about} if about else set())
    if about:
        assert said in found[0].remedy


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "quota", "remedy"),
    [
        (4, 8, 16, None, "OMP_NUM_THREADS=4"),
        (4, 4, 16, None, ""),
        (4, 4, 16, "800000 100000", "OMP_NUM_THREADS=2"),
        (4, 4, 16, "max 100000", ""),
        (4, 1, 2, None, "start fewer ranks"),
    ],
)
def test_cores_that_ranks_share(tmp_path, ranks, threads, cores, quota, remedy) -> None:
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(quota)
    found = host.core_findings(ranks, threads, cores, file)
    assert [remedy in each.remedy for each in found] == [True] * bool(remedy)


def test_small_shared_memory(tmp_path, monkeypatch) -> None:
    def size(nbytes):
        status = SimpleNamespace(f_frsize=4096, f_blocks=nbytes // 4096)
        monkeypatch.setattr(os, "statvfs", lambda path: status)
        return host.shared_memory_findings()

    [finding] = size(64 << 20)
    assert "64 MiB" in finding.text
    assert "--shm-size" in finding.remedy
    assert size(8 << 30) == []
    monkeypatch.undo()
    assert "cannot be used" in host.shared_memory_findings(tmp_path / "none")[0].text


def _machine(root, virtual, sockets, distances, cpus):
    (root / "cpuinfo").write_text(
        "".join(f"physical id : {i}\n" for i in range(sockets))
        + f"flags : fpu sse{' hypervisor' if virtual else ''}\n"
    )
    for i, distance in enumerate(distances):
        node = root / "devices" / "system" / "node" / f"node{i}"
        node.mkdir(parents=True)
        (node / "distance").write_text(distance)
        (node / "cpulist").write_text(cpus[i])
    return host.numa_findings(root, root)


@pytest.mark.parametrize(
    ("virtual", "sockets", "distances", "cpus", "said"),
    [
        (True, 2, ["10"], ["0-7"], "2 sockets shows 1 NUMA node"),
        (True, 2, ["10 10", "10 10"], ["0-3", "4-7"], "all equally far"),
        (True, 2, ["10 21", "21 10"], ["0-7", ""], "without cores: node1"),
        (True, 2, ["10 21", "21 10"], ["0-3", "4-7"], ""),
        (True, 1, ["10"], ["0-3"], ""),
        (False, 2, ["10"], ["0-7"], ""),
    ],
)
def test_numa_of_virtual_machines(tmp_path, virtual, sockets, distances, cpus, said) -> None:
    found = _machine(tmp_path, virtual, sockets, distances, cpus)
    assert [said in each.text for each in found] == [True] * bool(said)


def test_versions_that_differ_name_the_odd_ranks() -> None:
    rows = [{"torch": "2.13.0", "numpy": "2.3"} for _ in range(4)]
    assert differing_versions(rows) == []
    rows[2] = {"torch": "2.12.0", "numpy": "2.3"}
    [finding] = differing_versions(rows)
    assert "torch: 2.13.0 on most, rank 2: 2.12.0" in finding.text
    assert "install torch 2.13.0" in finding.remedy


def _used(rank, world_size, how):
    ddp = DistributedDataParallel(nn.Linear(8, 8), static_graph=how == "static graph")
    handle = topo_ar.attach(ddp, plan="flat", timeout_s=10.0)
    x = torch.ones(1, 8)
    if how == "static graph":
        with ddp.no_sync():
            ddp(x)
    called = {
        "as DDP": ddp,
        "module": ddp.module,
        "compiled module": torch.compile(ddp.module, backend="eager"),
        "accumulation": ddp,
        "static graph": lambda x: x.requires_grad_(),
    }[how]
    for _ in range(4):
        if how == "accumulation":
            with ddp.no_sync():
                for _ in range(4):
                    ddp(x).sum().backward()
        called(x).sum().backward()
    found = {finding.about: finding.remedy for finding in handle.doctor()}
    handle.close()
    return found


@pytest.mark.parametrize(
    ("how", "about"),
    [
        ("as DDP", ""),
        ("accumulation", ""),
        ("module", "hook not called"),
        ("compiled module", "hook not called"),
        ("static graph", "static_graph"),
    ],
)
def test_how_a_ddp_is_used(ranks, how, about) -> None:
    for found in ranks.run(_used, 2, how, deadline_s=40.0):
        wrong = {"hook not called", "static_graph", "versions"} & set(found)
        assert wrong == ({about} if about else set())
        assert not about or found[about]


def test_started_on_every_rank_it_compares_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "topo_ar", "doctor", "--json"],
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
                **{"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "4096", "GROUP_RANK": "0"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (job.communicate(timeout=60)[0] for job in jobs)
    assert second == ""
    found = {each["check"]: each for each in json.loads(first)}
    assert found["versions"]["text"] == "the same on all 2 ranks"
    assert "2 ranks of 4096 threads" in found["oversubscribed cores"]["text"]
    assert found["oversubscribed cores"]["remedy"]
