import importlib
import json
import os

import msgspec
import pytest
import torch

import topo_ar
from experiments.parity import run
from experiments.training import Settings
from experiments.workloads.resnet import NUM_CLASSES, ResNet, gratings, shuffled_batches
from tests.jobs import blocks
from topo_ar.emulation.check import report
from topo_ar.emulation.loopback import LoopbackCluster
from topo_ar.errors import ConfigError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.transports.segment import HOST_ID_ENV
from topo_ar.telemetry.bucket_trace import BucketTrace
from topo_ar.telemetry.records import read_records

script = importlib.import_module("experiments.02_ddp_parity")
TINY = Settings(epochs=2, num_images=16, batch=2, width=8, bucket_cap_mb=0.02, double_steps=2)
LEARNING = {"learns_hook", "learns_plain"}  # takes longer than a test may
PIPE_BUF = 4096


def _model(seed: int) -> ResNet:
    torch.manual_seed(seed)
    return ResNet()


def test_the_model_is_small_and_follows_from_the_seed() -> None:
    assert 0.3e6 < sum(p.numel() for p in ResNet().parameters()) < 1e6
    images = gratings(4, seed=0).images
    assert _model(0)(images).shape == (4, NUM_CLASSES)
    assert torch.equal(_model(0)(images), _model(0)(images))
    assert not torch.equal(_model(0)(images), _model(1)(images))


def test_images_follow_from_the_seed_and_classes_are_balanced() -> None:
    one, same, other = gratings(80, seed=3), gratings(80, seed=3), gratings(80, seed=4)
    assert torch.equal(one.images, same.images)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.images, other.images)
    assert one.images.shape == (80, 3, 16, 16)
    assert torch.bincount(one.labels).tolist() == [80 // NUM_CLASSES] * NUM_CLASSES


def test_an_images_stripes_run_as_its_label_says() -> None:
    """The strongest wave of the noisy image is the one that the label stands for."""
    images = gratings(64, seed=0)
    spectrum = torch.fft.rfft2(images.images.sum(1)).abs()
    for label, strength in zip(images.labels.tolist(), spectrum, strict=True):
        row, column = divmod(int(strength.argmax()), strength.shape[1])
        row = row - 16 if row > 8 else row
        cycles = (row**2 + column**2) ** 0.5
        assert (cycles > 3) == (label // 4 == 1)
        upright, level = column == 0, row == 0
        assert {0: level, 1: row > 0 < column, 2: upright, 3: row < 0 < column}[label % 4]


def test_an_epoch_takes_every_image_once_and_leaves_out_the_rest() -> None:
    batches = shuffled_batches(70, 16, seed=1)
    taken = torch.cat(batches).tolist()
    assert [len(batch) for batch in batches] == [16] * 4
    assert len(set(taken)) == 64
    assert set(taken) < set(range(70))
    assert torch.equal(torch.cat(batches), torch.cat(shuffled_batches(70, 16, seed=1)))
    assert not torch.equal(torch.cat(batches), torch.cat(shuffled_batches(70, 16, seed=2)))


def _parity(rank: int, world_size: int, settings: Settings, factor: float):
    """Run the experiment; on rank 0 the hook's input is multiplied by `factor`."""
    os.environ[HOST_ID_ENV] = str(blocks(2, world_size // 2)[rank])
    topology = topo_ar.preset("cpu-host", nodes=2, ranks_per_node=world_size // 2)
    right = Communicator.all_reduce

    def wrong(self, tensor, *arguments, **options):
        return right(self, tensor.mul_(factor if rank == 0 else 1.0), *arguments, **options)

    events: list[tuple[str, dict]] = []
    Communicator.all_reduce = wrong
    try:
        oracles = run(settings, topology, lambda *event: events.append(event))
    finally:
        Communicator.all_reduce = right
        del os.environ[HOST_ID_ENV]
    return {oracle.name: oracle.passed for oracle in oracles}, events


def test_the_hook_trains_as_plain_ddp_does(ranks, tmp_path) -> None:
    results = ranks.run(_parity, 4, TINY, 1.0)
    for passed, _ in results:
        assert all(holds for name, holds in passed.items() if name not in LEARNING)
    _check_files(results[0][1], tmp_path)


def _check_files(events: list[tuple[str, dict]], out) -> None:
    """What rank 0 announced makes the records and the bucket trace."""
    collected = script.Results()
    for event in events:
        assert len(script.MARK + json.dumps(event)) < PIPE_BUF
        collected.event(*event)
    config = script.Config(nodes=2, ranks=2, epochs=TINY.epochs, out=out)
    links = report(LoopbackCluster(config.spec), measure=False)
    script._write(config, collected, links)
    hook, plain, oracles = read_records(out / "ddp_parity.jsonl")
    num_steps = TINY.epochs * TINY.num_images // (4 * TINY.batch)
    for row, name in ((hook, "hook"), (plain, "plain")):
        assert row["candidate"] == name
        assert row["manifest"]["emulation"] == "loopback"
        assert len(row["seconds"]) == len(row["compute_seconds"]) == len(row["losses"]) == num_steps
        assert min(row["seconds"]) > 0
        gap = row["median_seconds"] - row["median_compute_seconds"]
        assert row["exposed_seconds"] == max(0.0, gap)
        assert [result["epoch"] for result in row["held_out"]] == [0, 1, 2]
    assert hook["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert oracles["passed"] is False
    assert {o["name"] for o in oracles["oracles"] if not o["passed"]} == LEARNING
    written = (out / "ddp_parity.buckets.json").read_bytes()
    (step,) = msgspec.json.decode(written, type=BucketTrace).steps
    assert step.step == num_steps - 1
    assert len(step.buckets) > 1
    assert sum(bucket.numel for bucket in step.buckets) == sum(
        p.numel() for p in ResNet(TINY.width).parameters()
    )


def test_a_hook_that_is_slightly_wrong_fails_the_oracles(ranks) -> None:
    """Negative control: one rank's gradients are a ten-thousandth too large."""
    for passed, _ in ranks.run(_parity, 4, TINY, 1 + 1e-4):
        assert not passed["rank_order"]
        assert not passed["double_precision"]
        assert not passed["integer_gradients"]
        assert passed["states_hook"]


def test_unusable_settings_are_explained(monkeypatch, capsys) -> None:
    with pytest.raises(ConfigError, match="1x1 ranks have nothing to reduce"):
        script.Config(nodes=1, ranks=1)
    for flags, message in (
        (["--epochs", "0"], "trains nothing"),
        (["--nodes", "0"], "nothing to reduce"),
        (["--nic", "fast"], "fast"),
    ):
        monkeypatch.setattr("sys.argv", ["02_ddp_parity.py", *flags])
        assert script.main() == 2
        assert message in capsys.readouterr().err
