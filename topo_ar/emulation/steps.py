"""The commands that build a cluster, as data: what the executor runs and ``--dry-run`` prints.

Every namespace is kept alive by its pid 1, a ``cat`` that reads a pipe whose write end only the
creating process holds. When that process ends for whatever reason, ``cat`` sees the end of the pipe
and exits, and the kernel takes every process, mount, link and queue of the namespace with it.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from topo_ar.emulation.layout import Host, Layout, subnet
from topo_ar.emulation.links import bucket
from topo_ar.emulation.spec import ClusterSpec

SWITCH = "switch"
PRIVATE_ROOTS = ("/tmp", "/var/tmp", "/dev/shm")
_KEEP_ALIVE = "exec env --ignore-signal=CHLD cat >/dev/null 2>&1"
_RELAY = Path(__file__).with_name("relay.py")


@dataclass(frozen=True, slots=True)
class Step:
    """One command.

    ``spawn`` creates the namespaces called `target` with `script` as their pid 1, which prints its
    pid as others see it; ``run`` feeds `script` to a shell in the network namespace of `target`;
    ``serve`` starts `script` as a daemon inside `target`, which prints ``up`` when it is ready.
    Scripts name pids by variables, ``$switch`` and ``$host0``.
    """

    kind: Literal["spawn", "run", "serve"]
    target: str
    script: str

    def argv(self, rootless: bool) -> list[str]:
        """Return the command; its variables are for a shell, or `os.path.expandvars`."""
        user = ["-U", "-r"] if rootless else []
        enter = ["-U", "--preserve-credentials"] if rootless else []
        if self.kind == "run":
            return ["nsenter", "-t", f"${self.target}", *enter, "-n", "--", "sh", "-es"]
        if self.kind == "serve":
            daemon = ["sh", "-ec", self.script]
            return ["nsenter", "-t", f"${self.target}", *enter, "-n", "-p", "--", *daemon]
        tail = ["-f", "--kill-child", "--propagation", "private", "sh", "-ec", self.script]
        if self.target == SWITCH:
            return ["unshare", *user, "-n", "-m", "-p", *tail]
        outer = ["nsenter", "-t", f"${SWITCH}", *enter, "-n", "-m", "-p", "--"]
        return [*outer, "unshare", "-n", "-u", "-i", "-p", "-m", *tail]


def build_steps(
    spec: ClusterSpec, layout: Layout, *, keep: tuple[str, ...] = (), python: str = "python3"
) -> tuple[tuple[Step, ...], ...]:
    """Return stages of steps; the steps of one stage may run at the same time.

    Parameters
    ----------
    spec, layout
        The cluster, and its names and addresses.
    keep
        Absolute paths below a host's private directories that stay visible inside the hosts.
    python
        The interpreter that runs the delay relay, where the spec asks for a latency.
    """
    delayed = spec.latency > 0
    stages = [
        (Step("spawn", SWITCH, _switch_script()),),
        (Step("run", SWITCH, _bridges(spec, layout, delayed)),),
        tuple(Step("spawn", host.name, _host_script(host, layout, keep)) for host in layout.hosts),
        (Step("run", SWITCH, _ports(spec, layout, delayed)),),
        tuple(Step("run", host.name, _nics(spec, host)) for host in layout.hosts),
    ]
    if delayed:
        stages.append((Step("serve", SWITCH, _relay(spec, layout, python)),))
    return tuple(stages)


def shell_script(stages: tuple[tuple[Step, ...], ...], rootless: bool) -> str:
    """Return a bash script that builds the cluster of `stages` and keeps it until Enter."""
    lines = [
        "#!/usr/bin/env bash",
        "# Builds the hosts and keeps them until Enter; ends with this shell, however it ends.",
        "set -e",
        "dir=$(mktemp -d); trap 'rm -rf \"$dir\"' EXIT",
        'mkfifo "$dir/alive"; exec 9<>"$dir/alive"',
        "first_line() {",
        '  while [ ! -s "$dir/$1" ]; do kill -0 $!; sleep 0.01; done; head -n 1 "$dir/$1"',
        "}",
    ]
    for stage in stages:
        for step in stage:
            lines += ["", *_shell_lines(step, rootless)]
    return "\n".join([*lines, "", "read -r _", ""])


def _shell_lines(step: Step, rootless: bool) -> list[str]:
    argv = step.argv(rootless)
    command = " ".join(word if word.startswith("$") else shlex.quote(word) for word in argv)
    if step.kind == "run":
        return [f"{command} <<'END'", step.script.rstrip("\n"), "END"]
    log = f"$dir/{step.target}.{step.kind}"
    lines = [f'setsid {command} <"$dir/alive" >"{log}" 9>&- &']
    name = f"{step.target}.{step.kind}"
    if step.kind == "spawn":
        return [*lines, f"export {step.target}=$(first_line {name})"]
    return [*lines, f"first_line {name}"]


def _switch_script() -> str:
    # The old /proc still counts pids the way the creator does, so the pid is read there; the switch
    # mounts none of its own, and the hosts only after they have read theirs.
    return f"read P R </proc/self/stat\nip link set lo up\necho $P\n{_KEEP_ALIVE}\n"


def _host_script(host: Host, layout: Layout, keep: tuple[str, ...]) -> str:
    boot_id = f"00000000-0000-4000-8000-{host.index:012d}"
    lines = ["read P R </proc/self/stat", f"hostname {host.name}"]
    lines.append("mount -t tmpfs -o mode=0755 run /run")
    for number, path in enumerate(keep):
        lines += _bind(path, f"/run/keep{number}", move=False)
    for root in PRIVATE_ROOTS:
        lines.append(f"[ ! -d {root} ] || mount -t tmpfs -o mode=1777 tmpfs {root}")
    for number, path in enumerate(keep):
        lines += _bind(f"/run/keep{number}", path, move=True)
    lines += [
        "cat >/run/hosts <<X",
        "127.0.0.1 localhost",
        *_host_names(layout),
        "X",
        "[ ! -e /etc/hosts ] || mount --bind /run/hosts /etc/hosts",
        "mount -t proc proc /proc",
        "mount -t sysfs sysfs /sys || true",
        f"echo {boot_id} >/run/boot_id",
        "mount --bind /run/boot_id /proc/sys/kernel/random/boot_id",
        "tr -d - </run/boot_id >/run/machine-id",
        "[ ! -e /etc/machine-id ] || mount --bind /run/machine-id /etc/machine-id",
        # Without these any NIC answers for the address of every other NIC of its host.
        "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore",
        "echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce",
        "ip link set lo up",
        "echo $P",
        _KEEP_ALIVE,
    ]
    return "\n".join(lines) + "\n"


def _bind(source: str, target: str, *, move: bool) -> list[str]:
    original = target if move else source
    parent = shlex.quote(os.path.dirname(target))
    make = (
        f"mkdir -p {shlex.quote(target)}"
        if os.path.isdir(original)
        else f"mkdir -p {parent}; : >{shlex.quote(target)}"
    )
    how = "--move" if move else "--rbind"
    return [f"{make}; mount {how} {shlex.quote(source)} {shlex.quote(target)}"]


def _host_names(layout: Layout) -> list[str]:
    return [
        f"{nic.address} {host.name if nic is host.nics[0] else nic.port}"
        for host in layout.hosts
        for nic in host.nics
    ]


def _bridges(spec: ClusterSpec, layout: Layout, delayed: bool) -> str:
    bridges = [] if delayed else list(layout.leaves)
    if layout.trunks:
        bridges.append("spine")
    lines = []
    for name in bridges:
        lines.append(f"link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
        lines.append(f"link set {name} mtu {spec.mtu} up")
    shapes = []
    for trunk in layout.trunks:
        ends = f"{trunk.leaf_port} mtu {spec.mtu} type veth peer name {trunk.spine_port}"
        lines.append(f"link add {ends} mtu {spec.mtu}")
        lines.append(f"link set {trunk.leaf_port}{'' if delayed else ' master ' + trunk.leaf} up")
        lines.append(f"link set {trunk.spine_port} master spine up")
        if trunk.rate is not None:
            for device in (trunk.leaf_port, trunk.spine_port):
                shapes.append(bucket(device, trunk.rate, spec.burst))
    return _batch("ip", lines) + _batch("tc", shapes)


def _ports(spec: ClusterSpec, layout: Layout, delayed: bool) -> str:
    lines, shapes = [], []
    for host in layout.hosts:
        for nic in host.nics:
            ends = f"{nic.port} mtu {spec.mtu} type veth peer name {nic.name} mtu {spec.mtu}"
            lines.append(f"link add {ends} netns ${host.name}")
            lines.append(f"link set {nic.port}{'' if delayed else ' master ' + host.leaf} up")
            shapes.append(bucket(nic.port, nic.rate, spec.burst))
    return _batch("ip", lines) + _batch("tc", shapes)


def _nics(spec: ClusterSpec, host: Host) -> str:
    lines, shapes = [], []
    for index, nic in enumerate(host.nics):
        lines.append(f"addr add {nic.address}/24 dev {nic.name}")
        lines.append(f"link set {nic.name} up")
        lines.append(
            f"route change {subnet(index)} dev {nic.name} src {nic.address} "
            f"congctl {spec.congestion_control}"
        )
        shapes.append(bucket(nic.name, nic.rate, spec.burst))
    return _batch("ip", lines) + _batch("tc", shapes)


def _relay(spec: ClusterSpec, layout: Layout, python: str) -> str:
    switches = []
    for leaf in layout.leaves:
        ports = [nic.port for host in layout.hosts if host.leaf == leaf for nic in host.nics]
        ports += [trunk.leaf_port for trunk in layout.trunks if trunk.leaf == leaf]
        switches.append(",".join(ports))
    command = [python, "-I", "-S", str(_RELAY), repr(spec.latency), *switches]
    return f"exec {shlex.join(command)}\n"


def _batch(tool: str, lines: list[str]) -> str:
    return "\n".join([f"{tool} -batch - <<X", *lines, "X", ""]) if lines else ""
