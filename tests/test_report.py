"""``topo-ar report``: one page that needs nothing else, and a table to paste."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.figure_checks import ROOT
from topo_ar.cli.report_page import markdown_table, page
from topo_ar.cli.report_results import read
from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import RecordWriter

RESULTS = ROOT / "experiments" / "results"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# Appended to the page: clicks headings, looks at figures, leaves what it saw in the title.
PROBE = """
<script>
const errors = [];
window.addEventListener("error", (event) => errors.push(event.message));
window.addEventListener("load", () => {
  const table = [...document.querySelectorAll("table.sortable")].find(
    (one) => one.tHead.rows[0].cells[1].textContent === "size");
  const heading = table.tHead.rows[0].cells[1];
  const values = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.value));
  heading.click(); const up = values();
  heading.click(); const down = values();
  document.title = JSON.stringify({
    figures: [...document.images].map((image) => image.naturalWidth), up, down, errors });
});
</script>
"""


class Outside(HTMLParser):
    """Collects what a page refers to, and what is on it."""

    def __init__(self):
        super().__init__()
        self.links, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "topo_ar", "report", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def committed():
    return read(RESULTS)


def test_the_page_refers_to_nothing_outside_it(committed):
    text = page(committed)
    parser = Outside()
    parser.feed(text)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in parser.links)
    assert parser.ids == [picture.name for picture in committed.pictures]
    assert {"busbw", "wire_share", "published", "topology"} <= set(parser.ids)
    assert committed.not_drawn == []
    assert "url(" not in text
    assert "<h2>Plans</h2>" in text


def test_timings_stand_beside_gloo_of_the_same_run(tmp_path):
    samples = {"gloo": [2.0, 2.0, 2.0], "plan": [1.0, 1.0, 1.0]}
    with RecordWriter(tmp_path / "a.jsonl") as writer:
        for name, seconds in samples.items():
            writer.write(
                {
                    "candidate": name,
                    "nbytes": 1 << 20,
                    "seconds": seconds,
                    "median_seconds": seconds[0],
                    "busbw": 1.0,
                    "world_size": 8,
                    "hosts": 2,
                    "wrong": 0,
                }
            )
    lines = markdown_table(read(tmp_path)).splitlines()
    assert lines[2] == "| a | 1 MiB | gloo | 8 | 2 | 2 s | 3 |  | 0 |"
    assert lines[3] == "| a | 1 MiB | plan | 8 | 2 | 1 s | 3 | 2.00 (2.00 - 2.00) | 0 |"


def test_what_cannot_be_drawn_is_named_and_the_rest_is_there(tmp_path):
    (tmp_path / "published.jsonl").write_text('{"kind": "peak", "text": "<b>&"}\n')
    done = run(tmp_path, "-o", tmp_path / "page.html")
    assert done.returncode == 0
    assert (
        "left out: published: the figure of published peaks needs records of kind time"
        in done.stderr
    )
    text = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;&amp;" in text
    assert "<b>" not in text


@pytest.mark.parametrize(
    ("make", "message"), [(False, "is not a folder"), (True, "holds no records")]
)
def test_bad_folders_are_named(tmp_path, make, message):
    folder = tmp_path / "results"
    if make:
        folder.mkdir()
        with pytest.raises(ConfigError, match=message):
            read(folder)
    done = run(folder)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome to open the page with")
def test_a_browser_shows_all_figures_and_sorts(tmp_path, committed):
    path = tmp_path / "page.html"
    path.write_text(page(committed).replace("<script>", PROBE + "<script>", 1))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    options.append(f"--user-data-dir={tmp_path / 'profile'}")
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=50
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    seen = json.loads(title[1])
    assert seen["errors"] == []
    assert len(seen["figures"]) == len(committed.pictures)
    assert min(seen["figures"]) > 100
    assert seen["up"] == sorted(seen["up"])
    assert seen["down"] == sorted(seen["up"], reverse=True)
    assert len(set(seen["up"])) > 3


def test_every_figure_of_a_folder_in_one_command(tmp_path):
    for name in ("published.jsonl", "topology.json"):
        shutil.copy(RESULTS / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "plots/all.py", tmp_path, "-o", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "busbw: no allreduce_size.jsonl" in done.stdout
    names = {path.name for path in Path(tmp_path / "out").iterdir()}
    kinds = ("png", "svg", "pdf")
    assert names == {f"{name}.{kind}" for name in ("published", "topology") for kind in kinds}
