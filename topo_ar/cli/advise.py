"""``topo-ar advise``: looks at an unchanged training for some steps and says what would help it.

With ``--json`` the result is an `Advice` as one object: ``step_seconds``, ``exposed_seconds``,
``waiting_seconds``, ``verdict`` and ``suggestions``, each with ``kind``, ``gain``, ``low``,
``high``, ``why``, ``line`` and ``value``.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.errors import ConfigError, ExecutionError

if TYPE_CHECKING:
    from topo_ar.planning.job_advice import Advice

_INTERRUPTED = 130
_STOP_S = 10.0


def advise(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="What starts the training, with its ranks."),
    ],
    steps: Annotated[int, typer.Option(min=5, help="Steps to look at, after five.")] = 30,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Let the training go on afterwards.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for which a collective may stand still.")
    ] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to a file, too.")
    ] = None,
) -> None:
    """Run a training, unchanged, for some steps and say what would make it faster.

    Its DistributedDataParallel goes on as it is; a passive hook notes when buckets are ready, how
    long communication is exposed and which rank comes last; then the links are probed. The script
    is ended there: what it saves at its end is not saved. Suggestions come in order of their
    predicted gain, each with an interval and the line to paste. Rank 0 has to see this directory,
    and the ranks have to inherit the environment. Trainings on CPUs only, so far.

    Exits with 0 when there is advice, also "change nothing", and with 1 when the command ended
    before.

    Example: topo-ar advise -- torchrun --nproc-per-node 4 train.py --epochs 3
    """
    from topo_ar.integrations.injection import environment
    from topo_ar.integrations.run_options import RunOptions

    handle, name = tempfile.mkstemp(prefix=".topo-ar-advice-", suffix=".json", dir=".")
    os.close(handle)
    told = Path(name).absolute()
    options = RunOptions(
        observe_steps=steps, keep_running=keep_running, timeout_s=timeout, report=str(told)
    )
    try:
        code = _run(command, {**os.environ, **environment(options, os.environ)})
        advice = _read(told, code)
        if json_file is not None:
            json_file.write_bytes(told.read_bytes())
    finally:
        told.unlink(missing_ok=True)
    _print(advice)


def _run(command: list[str], variables: dict[str, str]) -> int:
    """Run the command to its end and return its exit code; Ctrl-C ends it first."""
    try:
        process = subprocess.Popen(command, env=variables, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
    try:
        return process.wait()
    except BaseException:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue
            break
        raise


def _read(told: Path, code: int) -> "Advice":
    import msgspec

    from topo_ar.planning.job_advice import Advice

    text = told.read_bytes()
    if not text:
        raise ExecutionError(
            f"the command ended with {code} before enough steps were seen; a "
            "DistributedDataParallel without a hook of its own has to train for them, see --steps"
        )
    return msgspec.json.decode(text, type=Advice)


def _print(advice: "Advice") -> None:
    from topo_ar.units import format_seconds

    nodes = f"{advice.num_nodes} node{'s' if advice.num_nodes > 1 else ''}"
    print(
        f"{advice.steps} steps of {advice.world_size} ranks on {nodes}: "
        f"{format_seconds(advice.step_seconds)} a step, {format_seconds(advice.exposed_seconds)} "
        f"of communication exposed, {format_seconds(advice.waiting_seconds)} of waiting for the "
        f"last rank\n{advice.verdict}"
    )
    for number, each in enumerate(advice.suggestions, 1):
        print(
            f"\n{number}. {each.kind.replace('_', ' ')}: {each.gain:.2f} times as fast "
            f"({each.low:.2f} - {each.high:.2f})\n   {each.why}\n   {each.line}"
        )
    for caution in advice.cautions:
        print(f"\nGains are those of ranks with a core each. Here, {caution}")
    sys.stdout.flush()
