"""``topo-ar explain``: what a plan file says, for a person."""

from pathlib import Path
from typing import Annotated

import typer

from topo_ar.errors import ConfigError, PlanError
from topo_ar.planning.plan import Plan


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan from `topo-ar plan -o`.")],
) -> None:
    """Explain a plan: choice, prediction, bound, candidates and the reason.

    Example: topo-ar explain plan.json
    """
    from topo_ar.planning.explain import explain as explain_plan

    try:
        found = Plan.from_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    print(explain_plan(found))
