import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.figure_checks import assert_readable, boxes, lines, said, script
from tests.foreign import all_foreign, foreign
from topo_ar import figures
from topo_ar.errors import ConfigError, TopologyError
from topo_ar.figures.cluster import arrange
from topo_ar.figures.parts import Parts
from topo_ar.telemetry.metrics import busbw
from topo_ar.telemetry.records import RecordWriter
from topo_ar.telemetry.trace import Span, write_trace
from topo_ar.topology.presets import PRESETS, preset
from topo_ar.topology.readers import read

ROOT = Path(__file__).parents[1]
DESCRIPTIONS = all_foreign()


def bench_row(candidate, nbytes, seconds, **changes):
    samples = [seconds * (1 + 0.01 * step) for step in range(-2, 3)]
    return {
        "collective": "all_reduce",
        "candidate": candidate,
        "dtype": "float32",
        "nbytes": nbytes,
        "world_size": 8,
        "hosts": 2,
        "seconds": samples,
        "median_seconds": seconds,
        "wrong": 0,
        "wire_limit_seconds": nbytes / 119.5e6,
        "predicted_seconds": seconds * 1.1,
        "fraction": nbytes / 119.5e6 / seconds,
        "marks": [],
        "manifest": {"schema": 1, "emulation": "namespaces"},
    } | changes


ROWS = [
    bench_row("gloo", 4096, 0.017, marks=["burst"], fraction=None),
    bench_row("plan", 4096, 0.0001, marks=["burst"], fraction=None),
    bench_row("gloo", 25_000_000, 0.37),
    bench_row("plan", 25_000_000, 0.21),
]
TRAININGS = [
    {
        "record": "training",
        "candidate": name,
        "world_size": 8,
        "seconds": [step, 1.1 * step, 0.9 * step],
        "exposed_seconds": exposed,
        "losses": losses,
    }
    for name, step, exposed, losses in (
        ("hook", 0.14, 0.04, [2.0, 1.5, 1.25]),
        ("plain", 0.21, 0.11, [2.0, 1.5, 1.0]),
    )
]
SPANS = [
    Span("copy in 0", 0, "intra_reduce_scatter", 5.0, 5.25, {"chunk": 0}),
    Span("wire 0", 0, "inter_exchange wire 0", 5.25, 6.0, {"chunk": 0}),
    Span("wire 1", 0, "inter_exchange wire 1", 5.5, 6.25, {"chunk": 1}),
    Span("add 0", 0, "inter_exchange", 6.0, 6.25, {"chunk": 0}),
    Span("copy out 0", 1, "intra_all_gather", 6.25, 7.0, {"chunk": 0}),
]


def test_bandwidth_shows_medians_limit_and_share():
    figure = figures.busbw_over_size(ROWS)
    left, share = figure.axes
    curves = {c.get_label(): c.lines[0].get_xydata().tolist() for c in left.containers}
    assert curves["plan"] == [
        [4096, pytest.approx(busbw(4096, 0.0001, 8) / 1e9)],
        [25_000_000, pytest.approx(25e6 / 0.21 * 1.75 / 1e9)],
    ]
    assert lines(left)["wire limit"][1] == [pytest.approx(0.1195 * 1.75)] * 2
    shares = [line for line in share.get_lines() if list(line.get_xdata()) == [25_000_000]]
    heights = {round(float(line.get_ydata()[0]), 4) for line in shares}
    assert heights == {round(25 / 119.5 / 0.37, 4), round(25 / 119.5 / 0.21, 4)}
    assert "8 ranks on 2 hosts, float32" in said(figure)
    assert "Median of 5 samples; bars: 5th to 95th percentile." in said(figure)
    assert "Hollow: marked burst" in said(figure)
    assert "emulated on one machine" in said(figure)
    assert_readable(figure)


def test_marked_points_are_hollow():
    left = figures.busbw_over_size(ROWS).axes[0]
    faces = {
        (line.get_xdata()[0], line.get_markerfacecolor())
        for line in left.get_lines()
        if len(line.get_xdata()) == 1
    }
    assert {size for size, face in faces if face == "white"} == {4096}
    assert {size for size, face in faces if face != "white"} == {25_000_000}


def test_wrong_rows_are_left_out_and_rows_of_a_size_pooled():
    rows = [*ROWS, bench_row("plan", 25_000_000, 0.19), bench_row("plan", 1 << 20, 9.0, wrong=3)]
    figure = figures.busbw_over_size(rows)
    curve = next(c for c in figure.axes[0].containers if c.get_label() == "plan")
    assert curve.lines[0].get_xdata().tolist() == [4096, 25_000_000]
    assert curve.lines[0].get_ydata()[1] == pytest.approx(busbw(25_000_000, 0.2, 8) / 1e9, rel=0.01)
    assert "1 rows with wrong results left out" in said(figure)
    assert "Median of 5-10 samples" in said(figure)


def test_loopback_is_labelled_and_one_size_one_rank_is_drawn():
    row = bench_row(
        "plan", 1, 1e-5, world_size=1, hosts=1, fraction=None, wire_limit_seconds=0.0
    ) | {"manifest": {"emulation": "loopback"}}
    figure = figures.busbw_over_size([row])
    assert "say nothing about a network" in said(figure)
    assert "no row has a share" in said(figure)
    assert_readable(figure)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are none that fit"),
        ([ROWS[0], ROWS[1] | {"world_size": 4}], "one world_size, and the file has 4, 8"),
        ([{"candidate": "plan"}], "lacks it"),
    ],
)
def test_rows_of_no_or_several_set_ups_are_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        figures.busbw_over_size(rows)


def wired(row, ranks=((0, 1, 2, 3), (4, 5, 6, 7)), nics=((125e6,), (125e6,))):
    links = {"ranks": ranks, "nics": nics}
    return row | {"hosts": len(ranks), "manifest": row["manifest"] | {"links": links}}


def test_share_of_the_wire_limit_by_size_and_by_set_up():
    uneven = wired(ROWS[3], ((0, 2), (1,)), ((125e6,), (62.5e6,)))
    one_host = bench_row("plan", 4096, 1e-4, hosts=1)
    wrong = bench_row("plan", 4096, 1e-4, wrong=3)
    figure = figures.wire_share([*map(wired, ROWS), uneven, one_host, wrong])
    left, beside = figure.axes
    assert left.get_title(loc="left") == "2x4, 1 Gbit/s"
    curves = {tuple(line.get_ydata()) for line in left.get_lines() if len(line.get_xdata()) == 2}
    own = (4096 / 119.5e6 / 0.0001, 25e6 / 119.5e6 / 0.21)
    assert any(curve == pytest.approx(own) for curve in curves)
    labels = [label.get_text() for label in beside.get_yticklabels()]
    assert [label.split("\n")[0] for label in labels] == [
        "2x4, 1 Gbit/s",
        "2+1 dealt out, 1 / 0.5 Gbit/s",
    ]
    assert "1 rows with wrong results left out" in said(figure)
    assert "1 rows of one host, where no wire is used, left out" in said(figure)
    assert "Hollow: a token bucket" in said(figure)
    assert_readable(figure)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([bench_row("plan", 4096, 1e-4, hosts=1)], "of several hosts, and there are none"),
        (ROWS, "does not say what links"),
    ],
)
def test_share_of_the_wire_limit_needs_a_wire_that_is_known(rows, message):
    with pytest.raises(ConfigError, match=message):
        figures.wire_share(rows)


def test_prediction_counts_what_is_within_the_band():
    rows = [*ROWS, bench_row("plan", 1 << 20, 0.009, predicted_seconds=0.0045)]
    figure = figures.predicted_measured([*rows, ROWS[0] | {"predicted_seconds": None}])
    assert "4 of 5 within 15%" in said(figure)
    assert "Worst: plan at 1 MiB, 4.5 ms predicted and 9 ms measured (-50.0%)." in said(figure)
    assert "1 rows without a prediction left out." in said(figure)
    assert lines(figure.axes[0])["plan"] == (
        [pytest.approx(x) for x in (0.00011, 0.231, 0.0045)],
        [0.0001, 0.21, 0.009],
    )
    assert_readable(figure)
    with pytest.raises(ConfigError, match="predicted_seconds"):
        figures.predicted_measured([])


def test_step_time_splits_the_step():
    figure = figures.step_time([*TRAININGS, {"record": "oracles", "passed": True}])
    (axes,) = figure.axes
    widths = [round(bar.get_width(), 6) for bar in axes.patches]
    assert widths == [100.0, 110.0, 100.0, 40.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plain", "hook"]
    assert "140 ms, 40 ms exposed" in said(figure)
    assert "Median of 3 steps" in said(figure)
    assert_readable(figure)


def test_overlap_of_nothing_leaves_a_gap_with_a_note():
    row = TRAININGS[0] | {"exposed_seconds": 0.0, "overlap_efficiency": None, "world_size": 1}
    figure = figures.step_time([row])
    assert "140 ms, no communication" in said(figure)
    hidden = figures.step_time([TRAININGS[0] | {"overlap_efficiency": 0.625}])
    assert "40 ms exposed (62% hidden)" in said(hidden)


def test_parity_compares_with_plain():
    figure = figures.training_parity(TRAININGS)
    loss, distance = figure.axes
    assert lines(loss)["plain"][1] == [2.0, 1.5, 1.0]
    (line,) = distance.get_lines()
    assert line.get_ydata()[2] == 0.25
    assert "hook: 2 of 3 losses equal to the last bit." in said(figure)
    assert_readable(figure)
    equal = figures.training_parity([TRAININGS[1], TRAININGS[1] | {"candidate": "hook"}])
    assert "no loss differs" in said(equal)
    with pytest.raises(ConfigError, match="training parity"):
        figures.training_parity([])


def test_timeline_puts_lanes_of_a_passage_into_one_row():
    figure = figures.bucket_timeline(SPANS)
    (axes,) = figure.axes
    bars = sorted(
        (round(bar.get_x()), round(bar.get_width()), round(bar.get_y(), 2), bar.get_facecolor())
        for bar in axes.patches
    )
    assert [bar[:2] for bar in bars] == [(0, 250), (250, 750), (500, 750), (1000, 250), (1250, 750)]
    wires = bars[1:3]
    assert wires[0][2] != wires[1][2]
    assert wires[0][2] == bars[3][2], "a row is used again when it is free"
    assert len({bar[3] for bar in bars}) == 3
    assert "2 s from the first begin to the last end" in said(figure)
    assert_readable(figure)
    assert "1 more ranks" in said(figures.bucket_timeline(SPANS, ranks=[1]))
    with pytest.raises(ConfigError, match=r"ranks \[7\]; the trace has ranks \[0, 1\]"):
        figures.bucket_timeline(SPANS, ranks=[7])


def drawn(topology):
    return figures.topology_graph(msgspec.to_builtins(topology))


@pytest.mark.parametrize(
    ("name", "nodes", "nic"),
    [
        ("cpu-host", 1, None),
        ("cpu-host", 2, None),
        ("cpu-host", 4, [125e6, 1.25e9]),
        ("dgx-h100", 2, None),
        ("dgx-a100", 1, None),
        ("dgx-a100", 16, None),
    ],
)
def test_presets_are_drawn_readably(name, nodes, nic):
    figure = drawn(preset(name, nodes=nodes, nic=nic))
    assert_readable(figure)
    words = said(figure)
    assert f"{nodes} node" in words
    assert ("16 x this node" in words) == (nodes > 4)
    drawn_ranks = {line for line in words.splitlines() if line.startswith("rank ")}
    per_node = 4 if name == "cpu-host" else 8
    assert len(drawn_ranks) == per_node * (1 if nodes > 4 else nodes)


def test_links_are_labelled_with_rate_and_source():
    words = said(drawn(preset("cpu-host", nodes=2)))
    assert "2 x ethernet 125 MB/s (preset), effective 119.6 MB/s (preset)" in words
    assert "8 x shm 25.6 GB/s (preset), effective 4 GB/s (preset)" in words
    assert "2 x pcie, rate not known" in words
    assert words.count("nic0\n125 MB/s") == 2


def test_racks_with_uplinks_are_drawn():
    topology = json.loads(msgspec.json.encode(preset("cpu-host", nodes=4)))
    topology["devices"] += [{"id": f"leaf{i}", "kind": "switch"} for i in range(2)]
    for link in topology["links"]:
        if link["b"] == "fabric":
            link["b"] = f"leaf{int(link['a'][4]) // 2}"
    uplink = {"value": 250e6, "source": "file", "note": ""}
    topology["links"] += [
        {"a": f"leaf{i}", "b": "fabric", "kind": "ethernet", "nominal": uplink} for i in range(2)
    ]
    figure = figures.topology_graph(topology)
    assert "leaf0, uplink 250 MB/s" in said(figure)
    assert "fabric" in said(figure)
    assert_readable(figure)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_drawn_readably(name):
    assert_readable(drawn(preset(name)))


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_topologies_from_files_are_drawn_readably(name):
    try:
        topology = read(foreign(name))
    except TopologyError:
        pytest.skip(f"{name} is one that must be refused")
    if any(device.node for device in topology.devices):
        assert_readable(drawn(topology))


def node_boxes(topology):
    """The boxes of the only drawn node, by the first line of their text."""
    [node] = arrange(Parts(msgspec.to_builtins(topology))).nodes
    return node, {box.text.split("\n")[0]: box for box in node.boxes}


def test_a_node_is_drawn_in_its_structure():
    node, boxes = node_boxes(preset("dgx-h100"))
    kinds = [box.kind for box in node.boxes]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "gpu": 8,
        "nic": 8,
        "cpu": 2,
        "pcie_switch": 8,
        "nvswitch": 1,
    }
    assert boxes["NVSwitch"].y > boxes["gpu0"].y > boxes["PCIe"].y > boxes["cpu0"].y
    assert boxes["cpu0"].y > boxes["mlx5_0"].y
    assert boxes["gpu3"].x == boxes["mlx5_5"].x
    assert boxes["gpu3"].x < boxes["gpu4"].x


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "frontier", "mi300x"])
def test_no_line_to_a_nic_runs_through_a_cpu(name):
    node, _ = node_boxes(preset(name))
    cpus = [box for box in node.boxes if box.kind == "cpu"]
    nics = [box for box in node.boxes if box.kind == "nic"]
    assert cpus
    for line in node.lines:
        (x, top), (end, low) = line.points[0], line.points[-1]
        if x == end and any(nic.x == x and low < top and low - nic.y < 0.4 for nic in nics):
            for cpu in cpus:
                passes = low < cpu.y - 0.3 and top > cpu.y + 0.3
                assert not (passes and abs(cpu.x - x) < cpu.width / 2)


def test_links_between_gpus_are_as_thick_as_their_rate():
    topology = read(foreign("nccl-xml/rccl-16gcd-mi250x-8nic.xml"))
    node, _ = node_boxes(topology)
    assert sorted(arc.rate for arc in node.arcs) == [50e9] * 16 + [100e9] * 4 + [200e9] * 8
    widths = {
        round(patch.get_linewidth(), 3)
        for axes in drawn(topology).axes
        for patch in axes.patches
        if type(patch).__name__ == "PathPatch"
    }
    assert len(widths) == 3


def test_a_fabric_is_folded_to_its_tiers():
    figure = drawn(read(foreign("ibnetdiscover/quantum2-dgx-582ca.txt")))
    words = said(figure)
    assert "31 leaf switches, 4 rails; down 27.1 TB/s, up 26.6 TB/s, 1.02 to 1" in words
    assert "9 spine switches" in words
    assert "532 links, 26.6 TB/s" in words
    assert "109 x this node" in words
    assert_readable(figure)


def test_rails_and_oversubscription_are_told():
    figure = drawn(preset("dgx-h100", nodes=64, fabric="rail-optimised", nodes_per_leaf=32))
    assert "16 leaf switches, 8 rails; down 25.6 TB/s, up 25.6 TB/s" in said(figure)
    assert_readable(figure)
    figure = drawn(
        preset("cpu-host", nodes=16, fabric="leaf-spine", nodes_per_leaf=2, oversubscription=2)
    )
    assert "8 leaf switches; down 2 GB/s, up 1 GB/s, 2 to 1" in said(figure)
    assert_readable(figure)
    figure = drawn(preset("cpu-host", nodes=4, fabric="leaf-spine", nodes_per_leaf=2))
    assert "leaf0, uplink 250 MB/s" in said(figure)
    assert_readable(figure)


@pytest.mark.parametrize("name", ["dgx-h100", "aws-p5", "mi250x-16gcd", "perlmutter", "cpu-host"])
def test_words_fit_their_boxes(name):
    figure = drawn(preset(name, nodes=2))
    found = boxes(figure)
    shapes = [
        patch.get_window_extent()
        for axes in figure.axes
        for patch in axes.patches
        if type(patch).__name__ == "FancyBboxPatch"
    ]
    for text, box in found:
        centre = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        around = [shape for shape in shapes if shape.contains(*centre)]
        if around:
            smallest = min(around, key=lambda shape: shape.width * shape.height)
            assert box.width <= smallest.width + 1, text
            assert box.height <= smallest.height + 1, text


def test_a_thousand_nodes_and_one_odd_one():
    topology = preset("dgx-a100", nodes=1000)
    gone = "node17/nic3"
    topology = msgspec.structs.replace(
        topology,
        devices=tuple(device for device in topology.devices if device.id != gone),
        links=tuple(link for link in topology.links if gone not in (link.a, link.b)),
    )
    figure = drawn(topology)
    words = said(figure)
    assert "999 x this node" in words
    assert "node17" in words.splitlines()
    assert "1000 nodes, 8000 ranks" in words
    width, height = figure.get_size_inches()
    assert width < 20
    assert height < 10
    assert_readable(figure)


def test_many_equal_cpus_and_nics_are_folded():
    words = said(drawn(preset("gb200-nvl72")))
    assert "36 CPUs that carry the same; 6 drawn" in words
    assert "2 NICs at\n50 GB/s" in words


def test_what_is_no_topology_is_refused():
    with pytest.raises(ConfigError, match="not a topology in JSON"):
        figures.topology_graph({"name": "x"})
    with pytest.raises(ConfigError, match="no node to draw"):
        figures.topology_graph({"name": "x", "devices": [], "links": []})


def test_published_peaks_are_held_against_both_bounds():
    def time(system, num_nodes, nbytes, seconds):
        bounds = {"null_ring_seconds": 0.9, "bound_seconds": 0.6}
        row = {"kind": "time", "system": system, "num_nodes": num_nodes, "nbytes": nbytes}
        return {**row, "measured_seconds": seconds, **bounds}

    rows = [time("a", 1, 8, 2.0), time("b", 3, 8, 1.0), time("b", 3, 4, 9.0), {"kind": "manifest"}]
    (axes,) = figures.published_share(rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b (3 nodes)", "a (1 node)"]
    widths = [round(bar.get_width()) for bars in axes.containers for bar in bars]
    assert widths == [90, 45, 60, 30]
    with pytest.raises(ConfigError, match="none are here"):
        figures.published_share([{"kind": "manifest"}])


def test_saved_files_are_the_same_each_time_and_hold_no_date(tmp_path):
    first = figures.save(figures.bucket_timeline(SPANS), tmp_path / "a" / "one.png")
    second = figures.save(figures.bucket_timeline(SPANS), tmp_path / "b" / "two")
    assert [path.suffix for path in first] == [".png", ".svg", ".pdf"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert b"dc:date" not in first[1].read_bytes()
    assert b"matplotlib" not in first[0].read_bytes()[:1000].lower()
    with pytest.raises(ConfigError, match="cannot write a figure"):
        figures.save(figures.bucket_timeline(SPANS), first[0] / "below-a-file.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'topo-ar\[plots\]'"):
        figures.busbw_over_size(ROWS)


def test_importing_figures_loads_no_matplotlib():
    code = "import sys, topo_ar.figures; assert not {'matplotlib', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("busbw.py", "rows"),
        ("predicted.py", "rows"),
        ("step_time.py", "trainings"),
        ("parity.py", "trainings"),
        ("timeline.py", "trace"),
        ("topology.py", "topology"),
    ],
)
def test_plot_scripts(tmp_path, name, kind):
    path = tmp_path / "input"
    if kind in ("rows", "trainings"):
        with RecordWriter(path) as writer:
            for row in ROWS if kind == "rows" else TRAININGS:
                writer.write(row)
    elif kind == "trace":
        write_trace(SPANS, path)
    else:
        path.write_text(json.dumps(msgspec.to_builtins(preset("cpu-host", nodes=2))))
    done = script(name, path, "-o", tmp_path / "figure.png")
    assert done.returncode == 0, done.stderr
    suffixes = ("png", "svg", "pdf")
    assert done.stdout.split() == [str(tmp_path / f"figure.{suffix}") for suffix in suffixes]
    assert (tmp_path / "figure.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["busbw.py", "topology.py", "timeline.py"])
def test_plot_scripts_say_what_is_wrong_in_one_line(tmp_path, name):
    bad = tmp_path / "bad"
    bad.write_text("{\n")
    for file in (bad, tmp_path / "none"):
        done = script(name, file, "-o", tmp_path / "figure.png")
        assert done.returncode == 2
        assert done.stderr.startswith(f"{name}: error: ")
        assert len(done.stderr.splitlines()) == 1
