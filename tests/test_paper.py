"""The paper: its numbers come from the committed records, and every claim holds for them."""

import re
from pathlib import Path

import pytest

from paper import build
from paper.numbers import Number, collect, stamp
from topo_ar.errors import ConfigError

PAPER = Path(build.__file__).parent
RECORDS = PAPER.parent / "experiments" / "results"
# What may stand in the prose as digits: rates, formulas and targets, none of which is a result.
_GIVEN = {"0.1", "11.2", "1.75", "0.5", "0.98", "1.6", "3.11"}


@pytest.fixture(scope="module")
def numbers():
    return collect(RECORDS)


def test_numbers_json_is_what_the_committed_records_give(numbers):
    assert (PAPER / "numbers.json").read_text() == build.numbers_json(numbers)


def test_every_number_that_the_text_prints_is_there(numbers):
    used = build.used_keys()
    assert len(used) > 30
    assert used <= numbers.keys()


def test_no_result_is_typed_by_hand():
    for path in PAPER.rglob("*.typ"):
        prose = re.sub(r'\bn\("[^"]+"\)|`[^`]*`|\$[^$]*\$|//.*', "", path.read_text())
        prose = re.sub(r"^#(set|show|import|let|place|v|text).*", "", prose, flags=re.MULTILINE)
        if path.parent.name == "sections":
            assert set(re.findall(r"\d+\.\d+(?!\d*(?:em|in|pt))", prose)) <= _GIVEN, path.name


def test_the_committed_records_hold_every_claim(numbers):
    claims = build.claims()
    assert len({claim["id"] for claim in claims}) == len(claims)
    assert {claim["tier"] for claim in claims} == {"minutes", "cluster", "simulated"}
    for claim in claims:
        script = re.search(r"(?:experiments[./]|sbatch )(\d\w+)", claim["command"])
        assert script is not None
        assert (PAPER.parent / "experiments" / f"{script[1]}.py").exists()
        # No records of a cluster are there.
        assert (claim["tier"] == "cluster") == ("number" not in claim)
        if "number" in claim:
            assert build.holds(claim, numbers[claim["number"]]), claim["id"]


@pytest.mark.parametrize(
    ("relation", "value", "expected", "result"),
    [
        ("at-least", 1.0, 1, True),
        ("at-least", 0.9, 1, False),
        ("at-most", 1.1, 1, False),
        ("equal", 0.0, 0, True),
        ("equal", 1.0, 0, False),
    ],
)
def test_a_claim_holds_by_its_relation(relation, value, expected, result):
    claim = {"id": "x", "relation": relation, "expected": expected}
    assert build.holds(claim, Number(value, str(value), ())) is result
    with pytest.raises(ConfigError, match="'near', which is not one of"):
        build.holds({**claim, "relation": "near"}, Number(value, "", ()))


def test_missing_records_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BUILD", tmp_path / "build")
    with pytest.raises(ConfigError, match="do not give accuracy-"):
        build.prepare(tmp_path)


def test_the_stamp_is_of_the_records_and_not_of_today():
    first = stamp(RECORDS)
    assert first == stamp(RECORDS)
    assert re.fullmatch(r"[0-9a-f]{12}", first["records"])
    assert "cores" in first["machine"]


def test_the_same_records_make_the_same_paper(tmp_path, monkeypatch):
    pytest.importorskip("typst", reason="the extra paper is not installed")
    build.prepare(RECORDS)
    first = build.compile_pdf(pages=False).read_bytes()
    assert first.startswith(b"%PDF")
    assert build.compile_pdf(pages=False).read_bytes() == first
