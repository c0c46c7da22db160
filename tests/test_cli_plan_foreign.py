"""`topo-ar plan` of other people's files: a plan, or one refusal that says what to add."""

import pytest
from typer.testing import CliRunner

from tests.foreign import all_foreign, foreign
from topo_ar.cli.main import app
from topo_ar.errors import TopologyError


@pytest.mark.parametrize("name", all_foreign())
def test_a_plan_or_one_refusal_that_says_what_to_add(name):
    done = CliRunner().invoke(app, ["plan", str(foreign(name)), "-s", "25MB"])
    if done.exit_code == 0:
        assert "algorithm   " in done.stdout
        assert done.stderr == "" or "does not describe NVLink" in done.stderr
    else:
        assert isinstance(done.exception, TopologyError)
        assert any(word in str(done.exception) for word in ("give the file", "-o job", "-o both"))


def test_a_plan_of_a_hint_file_says_that_it_knows_no_nvlink():
    done = CliRunner().invoke(app, ["plan", str(foreign("nccl-xml/aws-p4d-24xl.xml")), "-s", "1MB"])
    assert "aws-p4d-24xl.xml does not describe NVLink of node0/gpu0" in done.stderr
