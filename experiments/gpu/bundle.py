"""Packs what a borrowed GPU machine needs to run `gpu_checks`: the code, and wheels it lacks.

Command: make gpu-bundle
Minutes: 1, and a package index.

Makes gpu-bundle/ and gpu-bundle.tar with `source/`, `wheels/` and `run`. There must be Python of
the version below on x86-64, with torch and the packages of `THERE`; nothing is installed there.
"""

import argparse
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from topo_ar.errors import ConfigError, TopoError

ROOT = Path(__file__).parents[2]
PYTHON_VERSION = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
THERE = frozenset({"torch", "numpy", "networkx", "scipy", "rich", "typer", "pytest"})
MOST_NBYTES = 64 << 20

_PIP_OPTIONS = (
    *("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"),
    *("--implementation", "cp", "--python-version", PYTHON_VERSION),
)

_RUN = """\
#!/bin/sh
# Runs the checks with what lies here; PYTHON is the interpreter that has torch.
set -e
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ ! -d "$here/site" ]; then
  for wheel in "$here"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$here/site.part"; done
  mv "$here/site.part" "$here/site"
fi
export PYTHONPATH="$here/site:$here/source${PYTHONPATH:+:$PYTHONPATH}" TOPO_AR_COMMIT=@COMMIT@
exec "$python" -m experiments.gpu_checks "$@"
"""


def needed(root: Path = ROOT) -> list[str]:
    """Return the packages to carry, in the versions that the tests were run with."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    names = [re.split("[^A-Za-z0-9_.-]", text, maxsplit=1)[0] for text in project["dependencies"]]
    lines = (root / "constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    return [f"{name}=={versions[name]}" for name in names if name not in THERE]


def pack(folder: Path) -> Path:
    """Make the folder and a tar of it, and return the tar.

    Raises
    ------
    ConfigError
        If a wheel cannot be had, or the tar is larger than `MOST_NBYTES`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    _download(needed(), wheels)
    for name in _git("ls-files", "topo_ar", "experiments").splitlines():
        if not name.startswith("experiments/results/"):
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    run = folder / "run"
    changes = "+changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    run.write_text(_RUN.replace("@COMMIT@", _git("rev-parse", "HEAD").strip() + changes))
    run.chmod(run.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    packed = folder.with_name(folder.name + ".tar")
    with tarfile.open(packed, "w") as tar:
        tar.add(folder, folder.name)
    if packed.stat().st_size > MOST_NBYTES:
        raise ConfigError(f"{packed} has more than {MOST_NBYTES >> 20} MiB")
    return packed


def _download(packages: list[str], wheels: Path) -> None:
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            *_PIP_OPTIONS,
            *platforms,
            "--dest",
            wheels,
            *packages,
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ConfigError(f"wheels cannot be had: {done.stderr.strip()}")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-bundle"), help="the folder to make")
    try:
        packed = pack(parser.parse_args().out)
    except TopoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB, with {', '.join(needed())}")
    print(f"there: tar xf {packed.name} && {packed.stem}/run --out gpu-results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
