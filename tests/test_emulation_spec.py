import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.emulation.layout import lay_out
from topo_ar.emulation.links import default_burst, payload_fraction, rate_text
from topo_ar.emulation.spec import ClusterSpec, NodeSpec, parse_grid, parse_spec, read_spec
from topo_ar.emulation.steps import build_steps, shell_script
from topo_ar.errors import ConfigError

SPECS = Path(__file__).parent / "data" / "specs"
NODE = '[[node]]\nranks = 2\nnics = ["1gbit"]\n'


def test_a_spec_in_si_units():
    spec = read_spec(SPECS / "two_racks.toml")
    assert spec == ClusterSpec(
        nodes=(
            NodeSpec((0, 1), (125e6,), "left"),
            NodeSpec((2, 3), (125e6,), "left"),
            NodeSpec((4, 5, 6, 7), (125e6, 62.5e6), "right"),
        ),
        uplinks={"left": 250e6, "right": 25e6},
        mtu=9000,
        burst=262144,
    )
    assert spec.world_size == 8


def test_ranks_dealt_out_like_cards():
    spec = read_spec(SPECS / "round_robin.toml")
    assert [node.ranks for node in spec.nodes] == [(0, 2), (1, 3)]
    assert spec.latency == 0.00025
    layout = lay_out(spec)
    assert [layout.host_of(rank).name for rank in range(4)] == ["host0", "host1", "host0", "host1"]


@given(st.integers(1, 250), st.integers(1, 64))
def test_a_grid_holds_each_rank_once(nodes, ranks):
    spec = ClusterSpec.uniform(nodes, ranks, ["1gbit", "2.5gbit"])
    assert [rank for node in spec.nodes for rank in node.ranks] == list(range(nodes * ranks))
    assert parse_grid(f"{nodes}x{ranks}") == (nodes, ranks)
    names = {
        name
        for host in lay_out(spec).hosts
        for nic in host.nics
        for name in (nic.port, nic.address)
    }
    assert len(names) == 4 * nodes
    assert max(map(len, names)) <= 15


@pytest.mark.parametrize("text", ["", "2", "0x4", "2x0", "2x4x1", "ax4", "-1x4", "2.5x4"])
def test_no_grid(text):
    with pytest.raises(ConfigError, match="is not a grid"):
        parse_grid(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "missing required field `node`"),
        ("node = []", "length >= 1 - at `$.node`"),
        ("[[node", "f.toml: "),
        ('[[node]]\nranks = 0\nnics = ["1gbit"]', ">= 1 - at `$.node[0].ranks`"),
        ("[[node]]\nranks = 1\nnics = []", "length >= 1 - at `$.node[0].nics`"),
        ('[[node]]\nranks = 1\nnics = ["1gbit"]\ncount = 0', "$.node[0].count"),
        ('[[node]]\nranks = 1\nnics = "1gbit"', "$.node[0].nics"),
        ('[[node]]\nranks = 1\nnics = ["1gbps"]', "node[0]: nics: '1gbps' is not a link rate"),
        ('[[node]]\nranks = 1\nnics = ["0gbit"]', "node[0]: nics: '0gbit' is not a link rate"),
        (NODE + "rank = 3", "unknown field `rank`"),
        ("speed = 1\n" + NODE, "unknown field `speed`"),
        ('latency = "5"\n' + NODE, "latency: '5' is not a duration"),
        ('burst = "1500"\n' + NODE, "burst: 1500 bytes are less than a frame"),
        ("mtu = 9\n" + NODE, "$.mtu"),
        ('congestion_control = "; rm"\n' + NODE, "$.congestion_control"),
        (NODE + 'rack = "a b"', "node[0]: rack: 'a b'"),
        (NODE + '[rack.r9]\nuplink = "1gbit"', "rack.r9: no node is in it; nodes are in rack0"),
        (
            NODE + 'rack = "r1"\n' + NODE + 'rack = "r2"\n[rack.r1]\nuplink = "1gbit"',
            "rack 'r2' is unknown; the file has r1",
        ),
        (NODE + '[rack]\nuplink = "fast"', "rack.rack0: uplink: 'fast' is not a link rate"),
        (NODE + '[rack]\nspeed = "1gbit"', "rack: unknown field 'speed'"),
        (NODE + '[rack.rack0]\nspeed = "1gbit"', "unknown field `speed`"),
        (NODE + "rank_ids = [0]", "node[0]: rank_ids: lists 1 ranks"),
        (NODE + "rank_ids = [0, 2]", "rank_ids: the nodes hold ranks [0, 2]; each of 0 to 1"),
        (NODE + "rank_ids = [0, 0]", "rank_ids: the nodes hold ranks [0, 0]"),
        (NODE + "rank_ids = [0, 1]\ncount = 2", "node[0]: rank_ids:"),
        (NODE + "rank_ids = [0, 1]\n" + NODE, "either every node lists its ranks or none"),
        (NODE + "count = 200\n" + NODE + "count = 200", "400 nodes; at most 250"),
    ],
)
def test_bad_specs_are_named(text, complaint):
    with pytest.raises(ConfigError) as caught:
        parse_spec(text, origin="f.toml")
    assert str(caught.value).startswith("f.toml: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_spec_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"nosuch\.toml' cannot be read: No such file"):
        read_spec(tmp_path / "nosuch.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_spec(tmp_path / "binary.toml")


def test_figures_of_a_link():
    assert payload_fraction(1500) == pytest.approx(0.9564, abs=1e-4)
    assert payload_fraction(9000) == pytest.approx(0.9927, abs=1e-4)
    assert [rate_text(rate) for rate in (125e6, 312.5e6, 25e6, 1.0)] == [
        *("1gbit", "2500mbit", "200mbit", "8bit")
    ]
    assert default_burst(125e6) == 131072
    assert default_burst(1.25e9) == 262144


@pytest.mark.parametrize("name", ["two_racks", "round_robin"])
@pytest.mark.parametrize("rootless", [False, True])
def test_the_dry_run_is_a_shell_script(name, rootless):
    spec = read_spec(SPECS / f"{name}.toml")
    script = shell_script(build_steps(spec, lay_out(spec)), rootless)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.count("--preserve-credentials") == (script.count("nsenter") if rootless else 0)


def test_the_dry_run_of_two_racks_word_for_word():
    spec = read_spec(SPECS / "two_racks.toml")
    script = shell_script(build_steps(spec, lay_out(spec)), rootless=True)
    assert script == (SPECS / "two_racks.sh").read_text()


def test_the_relay_takes_the_place_of_the_bridges():
    spec = read_spec(SPECS / "round_robin.toml")
    script = shell_script(build_steps(spec, lay_out(spec)), rootless=False)
    assert "bridge" not in script
    assert "relay.py 0.00025 host0-eth0,host1-eth0" in script
