"""Slurm's topology.conf and topology.yaml: captured files, host lists, and broken input."""

import re
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broken_input import damaged, survives, survives_every_cut
from tests.foreign import all_foreign, foreign
from topo_ar.errors import TopologyError
from topo_ar.topology.model import DeviceKind, from_json, to_json
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.readers import describe, read
from topo_ar.topology.readers.hostlist import expand

FILES = [name for name in all_foreign() if name.startswith("slurm/")]


def load(name):
    return read(foreign(f"slurm/{name}"))


def said(topology, pattern):
    return [note for note in topology.notes if re.search(pattern, note)]


def hosts(topology):
    return [d.node for d in topology.devices if d.kind is DeviceKind.HOST]


def switches(topology):
    return [d.id for d in topology.devices if d.kind is DeviceKind.SWITCH]


def below(topology):
    """What hangs on each switch: switches by their ids, nodes by their names."""
    found = {switch: set() for switch in switches(topology)}
    for link in topology.links:
        if link.a.endswith("/host"):
            found[link.b].add(link.a.removesuffix("/host"))
        else:
            found[link.a].add(link.b)
    return found


def depths(topology, root):
    tree = below(topology)
    depth = {root: 0}
    pending = [root]
    while pending:
        here = pending.pop()
        for child in tree.get(here, ()):
            depth[child] = depth[here] + 1
            pending.append(child)
    return depth


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_sound_and_goes_through_json(name):
    found = describe(foreign(name))
    assert found.format == f"slurm-topology-{name.rsplit('.', 1)[1]}"
    topology = found.topology
    assert from_json(to_json(topology)) == topology
    assert topology.ranks == ()
    assert all(link.nominal is link.effective is None for link in topology.links)
    assert said(topology, "how fast is not in the file")
    assert {d.kind for d in topology.devices} == {DeviceKind.HOST, DeviceKind.SWITCH}


def test_four_levels_and_ten_thousand_nodes():
    path = foreign("slurm/slurm-test1-4level-10000nodes.conf")
    start = time.monotonic()
    topology = read(path)
    to_json(topology)
    assert time.monotonic() - start < 2
    assert (len(switches(topology)), len(hosts(topology))) == (529, 10000)
    tree = below(topology)
    leaves = [switch for switch, under in tree.items() if not under & tree.keys()]
    assert len(leaves) == 500
    depth = depths(topology, "root")
    # root, im, grp, leaf: the fourth level.
    assert {depth[leaf] for leaf in leaves} == {3}
    assert set(depth) == tree.keys() | set(hosts(topology))


def test_three_levels():
    topology = load("slurm-test3-3level-400nodes.conf")
    tree = below(topology)
    assert tree["root"] == {"grp10", "grp11"}
    assert tree["grp11"] == {f"leaf{i}" for i in range(110, 120)}
    assert len(hosts(topology)) == 400
    assert all(len(tree[f"leaf{i}"]) == 20 for i in range(100, 120))


def test_the_manual_pages_tree_and_blocks():
    topology = load("manpage-tree.conf")
    assert below(topology)["s3"] == {"s0", "s1", "s2"}
    assert len(hosts(topology)) == 18
    paths = Paths(topology)
    assert paths.between("dev0/host", "dev17/host").devices == (
        "dev0/host",
        "s0",
        "s3",
        "s2",
        "dev17/host",
    )
    assert paths.between("dev0/host", "dev17/host").path_class is PathClass.NET
    topology = load("manpage-block.conf")
    assert [len(nodes) for nodes in below(topology).values()] == [32] * 4
    assert said(topology, "places jobs in blocks of 30 or 120 nodes")
    assert said(topology, "32 nodes in block1, .*block4, but the smallest block size is 30")
    assert said(topology, "what joins the blocks")


def test_the_manual_pages_yaml():
    topology = load("manpage-topology.yaml")
    assert below(topology) == {"sw_root": {"node01", "node02", "node03", "node04"}}
    assert said(topology, r"topology topo2 \(block\) is left out; topo1 is read")
    assert said(topology, r"topology topo3 \(flat\) is left out")


def test_another_default_of_the_yaml():
    text = foreign("slurm/manpage-topology.yaml").read_text()
    swapped = text.replace("cluster_default: True", "cluster_default: no", 1)
    topology = read(swapped.replace("cluster_default: False", "cluster_default: yes", 1))
    assert list(below(topology)) == ["b1", "b2", "b3", "b4"]
    assert hosts(topology) == [f"node{i:02}" for i in range(1, 17)]
    assert said(topology, "blocks of 4 or 16 nodes")
    assert not said(topology, "smallest block size")
    assert said(read(swapped), "no topology is the cluster's default; topo1, the first, is read")
    flat = (
        swapped[: swapped.index("- topology: topo2")]
        + swapped[swapped.index("- topology: topo3") :]
    )
    with pytest.raises(TopologyError, match="topo3 is flat.*others in the file: topo1"):
        read(flat.replace("cluster_default: False", "cluster_default: true"))


def test_oci_tree():
    topology = load("tree-3level-oci-sim.conf")
    tree = below(topology)
    assert tree["switch.3.1"] == {f"switch.2.{i}" for i in range(1, 7)}
    assert tree["switch.2.6"] == {"switch.1.11", "switch.1.12"}
    assert len(hosts(topology)) == 96
    assert len(tree) == 19


def test_dra_blocks():
    topology = load("block-dra.conf")
    assert [len(nodes) for nodes in below(topology).values()] == [8] * 12
    assert said(topology, "blocks of 8 or 16 or 32 nodes")
    assert not said(topology, "smallest block size")


# --- R09: commas inside brackets --------------------------------------------------------------


def test_host_lists_with_commas_in_brackets():
    topology = read(
        "SwitchName=leaf1 Nodes=cn[001,003-004]\nSwitchName=leaf2 Nodes=cn[002,010]\n"
        "SwitchName=leaf5 Nodes=gpu-a[1],x7\nSwitchName=core Switches=leaf[1-2,5]\n"
    )
    assert sorted(hosts(topology)) == ["cn001", "cn002", "cn003", "cn004", "cn010", "gpu-a1", "x7"]
    assert len(switches(topology)) == 4
    assert below(topology)["core"] == {"leaf1", "leaf2", "leaf5"}


def test_an_unclosed_bracket_is_refused_with_its_line(tmp_path):
    path = tmp_path / "topology.conf"
    path.write_text("SwitchName=leaf1 Nodes=cn[001,\n")
    with pytest.raises(TopologyError, match=r"^topology\.conf:1: brackets of 'cn\[001,' are not"):
        read(path)


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("a", ["a"]),
        ("node[01-04,7]", ["node01", "node02", "node03", "node04", "node7"]),
        ("im[0],grp[10,11]", ["im0", "grp10", "grp11"]),
        ("r[1-2]n[08-10]-ib", [f"r{r}n{n}-ib" for r in (1, 2) for n in ("08", "09", "10")]),
        ("[1-3]", ["1", "2", "3"]),
        ("a,,b,", ["a", "b"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_host_lists(hostlist, names):
    assert expand(hostlist, "f:1") == names


@pytest.mark.parametrize(
    "hostlist", ["a[1", "a1]", "a[[1]]", "a[]", "a[3-1]", "a[x]", "a[1-]", "]["]
)
def test_broken_host_lists(hostlist):
    with pytest.raises(TopologyError, match="^f:3: "):
        expand(hostlist, "f:3")


@pytest.mark.parametrize(
    "hostlist", ["n[1-999999999]", "a[1-400]b[1-400]", "a[1-90000],b[1-90000]", "x[0-9]" * 30]
)
def test_host_lists_that_are_too_long(hostlist):
    with pytest.raises(TopologyError, match="f:1: more than 100000 names"):
        expand(hostlist, "f:1")
    if "," in hostlist:
        lines = hostlist.replace(",", "\nSwitchName=t Nodes=")
        with pytest.raises(TopologyError, match="text:2: more than 100000 names"):
            read(f"SwitchName=s Nodes={lines}\n")


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 4))
@settings(max_examples=60)
def test_expansion_is_what_was_listed(numbers, width):
    listed = ",".join(str(number).zfill(width) for number in numbers)
    assert expand(f"n[{listed}]", "f:1") == [f"n{str(number).zfill(width)}" for number in numbers]


# --- what no captured file shows --------------------------------------------------------------


def test_comments_case_quotes_and_continued_lines():
    topology = read(
        "# a comment with SwitchName=no\n"
        'switchname=s1 NODES="n[1-2]" LinkSpeed=100 # SwitchName=no\n'
        "SwitchName=s2 \\\n  Nodes=n3 Colour=blue\nSwitchName=top Switches=s1,s2\n"
        "Include other.conf\nLinkSpeed=5\n"
    )
    assert below(topology) == {"s1": {"n1", "n2"}, "s2": {"n3"}, "top": {"s1", "s2"}}
    assert said(topology, "LinkSpeed is left out: Slurm accepts it and does not use it")
    assert said(topology, "line 3: Colour is not known")
    assert said(topology, "line 6: another file is included")
    assert said(topology, "line 7: names no switch")


def test_several_roots_and_leaves_of_different_depth():
    topology = read(
        "SwitchName=a Switches=b Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=c Nodes=n3,n1\n"
    )
    assert said(topology, "what joins the top switches a, c is not in the file")
    assert said(topology, "nodes in several places: n1")
    assert depths(topology, "a") == {"a": 0, "b": 1, "n1": 1, "n2": 2}
    assert Paths(topology).between("n2/host", "n3/host").path_class is PathClass.NET


def test_a_switch_below_two_others():
    topology = read(
        "SwitchName=a Switches=c,c\nSwitchName=b Switches=c\nSwitchName=c Nodes=n[1-2]\n"
    )
    assert said(topology, "switches below several others: c")
    assert below(topology) == {"a": {"c"}, "b": {"c"}, "c": {"n1", "n2"}}


def test_a_switch_that_is_not_described_is_named():
    topology = read("SwitchName=core Switches=leaf[1-2]\nSwitchName=leaf1 Nodes=n1\n")
    assert said(topology, "line 1: named but not described, .*: leaf2$")
    assert Counter(switches(topology)) == {"core": 1, "leaf1": 1, "leaf2": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "text:2: switch a .* line 1 already"),
        ("BlockName=a Nodes=n1\n\nBlockName=a Nodes=n2", "text:3: block a .* line 1 already"),
        (
            "SwitchName=a Switches=b\nSwitchName=b Switches=a",
            "text:1: switch a is above itself: a > b",
        ),
        ("SwitchName=a Switches=a", "text:1: switch a is above itself: a > a"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2", "text:2: a block in a file of switches"),
        ("SwitchName=a", "text:1: SwitchName=a has nothing below it; expected Switches or Nodes"),
        ("BlockName=a LinkSpeed=1", "text:1: BlockName=a has nothing below it; expected Nodes"),
        ("SwitchName=a[1-2] Nodes=n1", "text:1: SwitchName=a.1-2. names no single one"),
        ("SwitchName=a Nodes=n1 Nodes=n2", "text:1: Nodes is there twice"),
        ("SwitchName=a Nodes n1", "text:1: 'Nodes n1' cannot be read"),
        ("BlockName=a Nodes=n1\nBlockSizes=8,x", "text:2: BlockSizes holds 'x'"),
        ("BlockSizes=0", "text:1: BlockSizes holds '0'"),
        ("BlockSizes=4", "text: describes no switch and no block"),
    ],
)
def test_contradictions_are_refused_with_their_line(text, message):
    with pytest.raises(TopologyError, match=f"^{message}"):
        read(text + "\n")


YAML = "- topology: t\n  cluster_default: true\n  "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- topology: &a x\n- topology: *a\n", "text:1: anchors and aliases"),
        (YAML + "tree: [" + "[" * 40 + "\n", "text:3: is nested too deeply"),
        (YAML + "tree: {\n", "text:4: cannot be read as YAML"),
        (
            YAML + "ring:\n    rings: []\n",
            "text: topology t holds ring, where one of tree",
        ),
        (YAML + "tree:\n    switches: 5\n", "text:4: found a scalar, expected a list"),
        (YAML + "tree: x\n", "text:3: found a scalar, expected keys"),
        (YAML + "tree:\n    nodes: x\n", "text: a switch list without 'switches'"),
        (YAML + "tree:\n    switches:\n    - nodes: x\n", "text:5: an entry without 'switch'"),
        (YAML + "tree:\n    switches:\n    - switch: a\n      nodes: n[1\n", "text:5: brackets"),
        (YAML + "block:\n    block_sizes: [x]\n    blocks: []\n", "text:4: BlockSizes holds 'x'"),
        (YAML + "topology: u\n", "text:3: 'topology' is there twice"),
    ],
)
def test_yaml_that_is_refused(text, message):
    with pytest.raises(TopologyError, match=f"^{message}"):
        read(text)


def test_yaml_tree_with_children():
    topology = read(
        YAML + "tree:\n    switches:\n    - switch: top\n      children: s[1-2]\n"
        "    - switch: s1\n      nodes: n[1,3]\n      speed: 7\n    - {switch: s2, nodes: n2}\n"
    )
    assert below(topology) == {"top": {"s1", "s2"}, "s1": {"n1", "n3"}, "s2": {"n2"}}
    assert said(topology, "line 7: speed is left out")


# --- broken input -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_file_cut_off(name):
    survives_every_cut(name, 30)


SMALL = [name for name in FILES if "10000" not in name]


@settings(max_examples=80)
@given(damaged(SMALL))
def test_every_file_with_bytes_flipped(text):
    survives(text)


STARTS = [
    "SwitchName=",
    "- topology: ",
    "\tGPU0\tGPU1\n",
    "GPU 0: x (UUID: y)\n",
    "=== ROCm SMI Log\n",
]


@settings(max_examples=150)
@given(
    text=st.text(max_size=200),
    start=st.sampled_from(["SwitchName=", "- topology: ", "\tGPU0\tGPU1\n", ""]),
)
def test_any_text(text, start):
    survives(start + text)
