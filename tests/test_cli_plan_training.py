"""``topo-ar plan`` for a training step."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from topo_ar.cli.main import app
from topo_ar.errors import ConfigError
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.telemetry.bucket_trace import BucketCall, BucketTrace, StepTrace


def _run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_a_models_step_for_a_person():
    result = _run(
        "cpu-host", "--nodes", 2, "--model", "resnet50", "--policy", "int8",
        "--backward-seconds", 0.5, "--optimizer", "momentum",
    )  # fmt: skip
    assert result.exit_code == 0
    text = result.stdout
    assert "Training step on 8 ranks of 2 nodes: 25,557,032 parameters, 102.2 MB" in text
    assert "torch's default of 25 MiB" in text
    assert "int8" in text
    assert "pays below" in text
    assert "The floor rho* is 0.0448" in " ".join(text.split())
    assert "optimizer (momentum)" in text
    assert "Activations, the framework and NCCL's buffers are not counted." in text
    assert max(map(len, text.splitlines())) <= 180


def test_json_holds_the_plan_and_the_memory(tmp_path):
    path = tmp_path / "step.json"
    result = _run(
        "dgx-a100", "--nodes", 2, "--params", "7B", "--device-memory", "80GB", "--json", "-o", path
    )
    assert result.exit_code == 0
    assert result.stdout == path.read_text()
    document = json.loads(result.stdout)
    assert set(document) == {"training", "memory"}
    made = TrainingPlan.from_json(json.dumps(document["training"]))
    assert made.num_parameters == 7_000_000_000
    assert {"algorithm", "chunks", "codec"} <= set(document["training"]["buckets"][0])
    assert any("1024 x 1024 matrices are assumed" in note for note in made.notes)
    memory = document["memory"]
    assert memory["fits"] is False
    assert memory["nbytes"] == sum(
        memory[part]
        for part in (
            "parameters",
            "gradients",
            "optimizer",
            "buckets",
            "staging",
            "residuals",
        )
    )
    assert memory["hsdp"]["shard_size"] == 2


def test_a_replica_that_does_not_fit_is_sharded_inside_the_node():
    result = _run("dgx-a100", "--nodes", 2, "--params", "7B", "--device-memory", "80GB")
    assert "A replica does NOT fit a device of 80 GB." in result.stdout
    assert "HSDP: shard over 2 ranks inside each node, 8 replicas" in result.stdout


def test_a_file_of_parameters(tmp_path):
    path = tmp_path / "model.txt"
    path.write_text("a,1000x1000\nb,1000\n")
    result = _run("dgx-a100", "--nodes", 2, "--model", path, "--dtype", "bfloat16")
    assert "1,001,000 parameters, 2.002 MB of gradients" in result.stdout
    assert "Backward is assumed to take as long" in " ".join(result.stdout.split())


def test_a_bucket_trace(tmp_path):
    path = tmp_path / "trace.json"
    calls = [
        BucketCall(i, 1_000_000, "float32", (f"p{i}",), 0.1 * (i + 1), shapes=((1000, 1000),))
        for i in range(3)
    ]
    BucketTrace(8, (StepTrace(3, calls),)).write(path)
    result = _run("cpu-host", "--nodes", 2, "--trace", path, "--json")
    training = json.loads(result.stdout)["training"]
    assert training["backward_seconds"] == pytest.approx(0.3)
    assert training["num_parameters"] == 3_000_000
    assert "medians of 1 step of a trace" in training["backward_source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give buffer sizes with --size, or a training step with --model"),
        (["--dtype", "float32"], "give the model once"),
        (["--model", "gpt2", "--params", "3M"], "give the model once"),
        (["--model", "gpt2", "-s", "3M"], "leave out --size"),
        (["--model", "gpt2", "--family", "flat_ring"], "leave out --size, --family"),
        (["--model", "gpt9"], "'gpt9' is not a known model and not a file"),
        (["--params", "none"], "'none' is not a number of parameters"),
        (["--params", "3M", "--optimizer", "lion"], "'lion' is not an optimizer"),
        (["--params", "3M", "--dtype", "int8"], "'int8' is not a dtype"),
        (["--params", "3M", "--policy", "lossy"], "needs a relative error above 0"),
        (["--params", "3M", "--device-memory", "big"], "'big' is not a size"),
        (["--params", "3M", "--backward-seconds", "-1"], "cannot take -1.0 s"),
        (["--trace", "missing.json"], "cannot read missing.json"),
        (["--trace", "missing.json", "--dtype", "float32"], "leave --dtype"),
    ],
)
def test_unusable_options_are_explained(arguments, message):
    result = _run("cpu-host", "--nodes", 2, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_a_training_step_is_planned_without_torch():
    code = (
        "import sys; from topo_ar.cli.main import main; "
        "sys.argv = ['topo-ar', 'plan', 'cpu-host', '--nodes', '2', '--model', 'resnet18']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'scipy', 'networkx'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_codec_costs_measured_here_replace_the_assumed_ones():
    threads = torch.get_num_threads()
    result = _run(
        "cpu-host", "--nodes", 2, "--params", "1M", "--policy", "int8", "--measure-codecs", "--json"
    )
    assert result.exit_code == 0
    made = json.loads(result.stdout)["training"]
    assert made["notes"][0] == "Codec costs are measured on one core of this machine."
    assert made["codecs"][0]["slope"] > 0
    assert torch.get_num_threads() == threads


def test_nothing_to_measure_is_said():
    result = _run("cpu-host", "--nodes", 2, "--params", "1M", "--measure-codecs")
    assert isinstance(result.exception, ConfigError)
    assert "--policy" in str(result.exception)
