"""What NVML says of the machine, recorded for tests, and what the package makes of it."""

import json
import subprocess
import sys
from pathlib import Path

from experiments.gpu.context import Context, Figures, LeftOutError, require
from topo_ar.topology.nvml_answers import read_answers


def nvml(context: Context, folder: Path) -> Figures:
    """Record NVML's answers, and describe the machine from them and from the recording alike."""
    folder.mkdir(parents=True, exist_ok=True)
    recording, probed = folder / "nvml.json", folder / "topology.json"
    _topo_ar("probe", "--record-nvml", str(recording), "-o", str(probed))
    answers = read_answers(recording)
    if answers.absent is not None and not context.on_cuda:
        raise LeftOutError("this machine has no NVML; the recording says so")
    require(answers.absent is None, f"NVML could not be asked: {answers.absent}")
    again = json.loads(_topo_ar("probe", "--nvml", str(recording), "--json"))
    require(again == json.loads(probed.read_text()), "the recording describes another machine")
    shown = _topo_ar("show", str(probed))
    (folder / "topology.txt").write_text(shown)
    gpus = [device for device in again["devices"] if device["kind"] == "gpu"]
    require(bool(gpus), "NVML answers, but there is no GPU in the topology")
    return {
        "GPUs": f"{len(gpus)} x {gpus[0]['attributes'].get('name')}",
        "links": float(len(again["links"])),
        "notes": float(len(again["notes"])),
    }


def _topo_ar(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "topo_ar", *arguments], capture_output=True, text=True, timeout=60
    )
    require(done.returncode == 0, f"topo-ar {arguments[0]} ended with {done.stderr.strip()}")
    return done.stdout
