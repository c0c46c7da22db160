#!/usr/bin/env bash
# Builds the hosts and keeps them until Enter; ends with this shell, however it ends.
set -e
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
mkfifo "$dir/alive"; exec 9<>"$dir/alive"
first_line() {
  while [ ! -s "$dir/$1" ]; do kill -0 $!; sleep 0.01; done; head -n 1 "$dir/$1"
}

setsid unshare -U -r -n -m -p -f --kill-child --propagation private sh -ec 'read P R </proc/self/stat
ip link set lo up
echo $P
exec env --ignore-signal=CHLD cat >/dev/null 2>&1
' <"$dir/alive" >"$dir/switch.spawn" 9>&- &
export switch=$(first_line switch.spawn)

nsenter -t $switch -U --preserve-credentials -n -- sh -es <<'END'
ip -batch - <<X
link add leaf0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0
link set leaf0 mtu 9000 up
link add leaf1 type bridge stp_state 0 forward_delay 0 mcast_snooping 0
link set leaf1 mtu 9000 up
link add spine type bridge stp_state 0 forward_delay 0 mcast_snooping 0
link set spine mtu 9000 up
link add leaf0-spine mtu 9000 type veth peer name spine-leaf0 mtu 9000
link set leaf0-spine master leaf0 up
link set spine-leaf0 master spine up
link add leaf1-spine mtu 9000 type veth peer name spine-leaf1 mtu 9000
link set leaf1-spine master leaf1 up
link set spine-leaf1 master spine up
X
tc -batch - <<X
qdisc replace dev leaf0-spine root tbf rate 2gbit burst 262144 latency 50ms
qdisc replace dev spine-leaf0 root tbf rate 2gbit burst 262144 latency 50ms
qdisc replace dev leaf1-spine root tbf rate 200mbit burst 262144 latency 50ms
qdisc replace dev spine-leaf1 root tbf rate 200mbit burst 262144 latency 50ms
X
END

setsid nsenter -t $switch -U --preserve-credentials -n -m -p -- unshare -n -u -i -p -m -f --kill-child --propagation private sh -ec 'read P R </proc/self/stat
hostname host0
mount -t tmpfs -o mode=0755 run /run
[ ! -d /tmp ] || mount -t tmpfs -o mode=1777 tmpfs /tmp
[ ! -d /var/tmp ] || mount -t tmpfs -o mode=1777 tmpfs /var/tmp
[ ! -d /dev/shm ] || mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat >/run/hosts <<X
127.0.0.1 localhost
10.77.0.1 host0
10.77.0.2 host1
10.77.0.3 host2
10.77.1.3 host2-eth1
X
[ ! -e /etc/hosts ] || mount --bind /run/hosts /etc/hosts
mount -t proc proc /proc
mount -t sysfs sysfs /sys || true
echo 00000000-0000-4000-8000-000000000000 >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
tr -d - </run/boot_id >/run/machine-id
[ ! -e /etc/machine-id ] || mount --bind /run/machine-id /etc/machine-id
echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
ip link set lo up
echo $P
exec env --ignore-signal=CHLD cat >/dev/null 2>&1
' <"$dir/alive" >"$dir/host0.spawn" 9>&- &
export host0=$(first_line host0.spawn)

setsid nsenter -t $switch -U --preserve-credentials -n -m -p -- unshare -n -u -i -p -m -f --kill-child --propagation private sh -ec 'read P R </proc/self/stat
hostname host1
mount -t tmpfs -o mode=0755 run /run
[ ! -d /tmp ] || mount -t tmpfs -o mode=1777 tmpfs /tmp
[ ! -d /var/tmp ] || mount -t tmpfs -o mode=1777 tmpfs /var/tmp
[ ! -d /dev/shm ] || mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat >/run/hosts <<X
127.0.0.1 localhost
10.77.0.1 host0
10.77.0.2 host1
10.77.0.3 host2
10.77.1.3 host2-eth1
X
[ ! -e /etc/hosts ] || mount --bind /run/hosts /etc/hosts
mount -t proc proc /proc
mount -t sysfs sysfs /sys || true
echo 00000000-0000-4000-8000-000000000001 >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
tr -d - </run/boot_id >/run/machine-id
[ ! -e /etc/machine-id ] || mount --bind /run/machine-id /etc/machine-id
echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
ip link set lo up
echo $P
exec env --ignore-signal=CHLD cat >/dev/null 2>&1
' <"$dir/alive" >"$dir/host1.spawn" 9>&- &
export host1=$(first_line host1.spawn)

setsid nsenter -t $switch -U --preserve-credentials -n -m -p -- unshare -n -u -i -p -m -f --kill-child --propagation private sh -ec 'read P R </proc/self/stat
hostname host2
mount -t tmpfs -o mode=0755 run /run
[ ! -d /tmp ] || mount -t tmpfs -o mode=1777 tmpfs /tmp
[ ! -d /var/tmp ] || mount -t tmpfs -o mode=1777 tmpfs /var/tmp
[ ! -d /dev/shm ] || mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat >/run/hosts <<X
127.0.0.1 localhost
10.77.0.1 host0
10.77.0.2 host1
10.77.0.3 host2
10.77.1.3 host2-eth1
X
[ ! -e /etc/hosts ] || mount --bind /run/hosts /etc/hosts
mount -t proc proc /proc
mount -t sysfs sysfs /sys || true
echo 00000000-0000-4000-8000-000000000002 >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
tr -d - </run/boot_id >/run/machine-id
[ ! -e /etc/machine-id ] || mount --bind /run/machine-id /etc/machine-id
echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
ip link set lo up
echo $P
exec env --ignore-signal=CHLD cat >/dev/null 2>&1
' <"$dir/alive" >"$dir/host2.spawn" 9>&- &
export host2=$(first_line host2.spawn)

nsenter -t $switch -U --preserve-credentials -n -- sh -es <<'END'
ip -batch - <<X
link add host0-eth0 mtu 9000 type veth peer name eth0 mtu 9000 netns $host0
link set host0-eth0 master leaf0 up
link add host1-eth0 mtu 9000 type veth peer name eth0 mtu 9000 netns $host1
link set host1-eth0 master leaf0 up
link add host2-eth0 mtu 9000 type veth peer name eth0 mtu 9000 netns $host2
link set host2-eth0 master leaf1 up
link add host2-eth1 mtu 9000 type veth peer name eth1 mtu 9000 netns $host2
link set host2-eth1 master leaf1 up
X
tc -batch - <<X
qdisc replace dev host0-eth0 root tbf rate 1gbit burst 262144 latency 50ms
qdisc replace dev host1-eth0 root tbf rate 1gbit burst 262144 latency 50ms
qdisc replace dev host2-eth0 root tbf rate 1gbit burst 262144 latency 50ms
qdisc replace dev host2-eth1 root tbf rate 500mbit burst 262144 latency 50ms
X
END

nsenter -t $host0 -U --preserve-credentials -n -- sh -es <<'END'
ip -batch - <<X
addr add 10.77.0.1/24 dev eth0
link set eth0 up
route change 10.77.0.0/24 dev eth0 src 10.77.0.1 congctl cubic
X
tc -batch - <<X
qdisc replace dev eth0 root tbf rate 1gbit burst 262144 latency 50ms
X
END

nsenter -t $host1 -U --preserve-credentials -n -- sh -es <<'END'
ip -batch - <<X
addr add 10.77.0.2/24 dev eth0
link set eth0 up
route change 10.77.0.0/24 dev eth0 src 10.77.0.2 congctl cubic
X
tc -batch - <<X
qdisc replace dev eth0 root tbf rate 1gbit burst 262144 latency 50ms
X
END

nsenter -t $host2 -U --preserve-credentials -n -- sh -es <<'END'
ip -batch - <<X
addr add 10.77.0.3/24 dev eth0
link set eth0 up
route change 10.77.0.0/24 dev eth0 src 10.77.0.3 congctl cubic
addr add 10.77.1.3/24 dev eth1
link set eth1 up
route change 10.77.1.0/24 dev eth1 src 10.77.1.3 congctl cubic
X
tc -batch - <<X
qdisc replace dev eth0 root tbf rate 1gbit burst 262144 latency 50ms
qdisc replace dev eth1 root tbf rate 500mbit burst 262144 latency 50ms
X
END

read -r _
