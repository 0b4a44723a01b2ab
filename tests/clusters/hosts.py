"""Hosts of their own on this machine: network namespaces with a bridge, each with an address, a name and a firewall.

`Hosts` runs commands on them. `cluster` starts a standalone Spark: the driver, the master and two workers on four hosts.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.integration.standalone import Standalone

NETWORK = "10.77.0."
ADDRESSES = {"driver": f"{NETWORK}1", "master": f"{NETWORK}2", "worker1": f"{NETWORK}3", "worker2": f"{NETWORK}4"}
IPV6_ADDRESSES = {name: f"fd77::{number}" for number, name in enumerate(ADDRESSES, 1)}
WORKERS = ("worker1", "worker2")

OTHER_NETWORK = "10.78.0."
"""The network of `Hosts.interfaces`."""

_numbers = itertools.count()

SPARK_PORTS = {
    "spark.driver.port": "35000",
    "spark.driver.blockManager.port": "35001",
    "spark.blockManager.port": "35010",
}
"""Settings of Spark for a firewall."""

IN_HOST = 'mount --bind "$1" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && hostname "$2" && shift 2 && exec "$@"'


def missing():
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid():
        return "network namespaces need root"
    lacking = [program for program in ("ip", "nft", "unshare") if shutil.which(program) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found: apt-get install iproute2 nftables util-linux"
    name = f"sparkkeras-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces do not work here: {made.stderr.strip()}"
    try:
        tried = subprocess.run(
            [*_inside(name), "unshare", "--uts", "sh", "-c", "ip link add br0 type bridge && nft add table inet t"],
            capture_output=True,
            text=True,
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return f"bridges or firewalls do not work here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Link:
    """The network between hosts, which has no limits by default.

    Attributes:
        delay: The milliseconds from one host to another, in each direction.
        rate: The Mbit/s that each host can send, and can receive.
        loss: The percentage of packets that are lost.
    """

    delay: float = 0
    rate: float = 0
    loss: float = 0


class Hosts:
    """Hosts on one network; a context manager that removes them. The bridge is in a namespace of its own.

    Args:
        folder: For the files of the hosts.
        addresses: The address of each host by its name.
        interfaces: Further addresses of hosts, by name, on a second network, which no other host reaches.
        unknown: The hosts whose names the others cannot resolve.
        link: The network between them.
        cores: The cores that the processes of a host have, by name; all by default.
    """

    def __init__(self, folder, addresses=ADDRESSES, interfaces=None, unknown=(), link=None, cores=None):
        self.folder, self.addresses, self.interfaces = Path(folder), dict(addresses), interfaces or {}
        self.unknown, self.link, self.cores = unknown, link or Link(), cores or {}
        self._relay, self._groups = None, {}
        self._prefix = f"sk{os.getpid()}-{next(_numbers)}"

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        for group in self._groups.values():
            deadline = time.monotonic() + 10
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            with contextlib.suppress(OSError):  # its processes still run
                group.rmdir()
        for name in ("switch", *self.addresses):
            subprocess.run(["ip", "netns", "del", self._namespace(name)], capture_output=True)

    def command(self, host):
        """The words before a command that runs on a host."""
        names = self.folder / f"{host}-hosts"
        inside = ["unshare", "--uts", "sh", "-c", IN_HOST, "sh", str(names), host]
        joined = []
        if host in self._groups:  # before the namespace, in which /sys has no groups
            joined = ["sh", "-c", 'echo $$ > "$1" && shift && exec "$@"', "sh", str(self._groups[host] / "cgroup.procs")]
        return [*joined, *_inside(self._namespace(host)), *inside, "env", f"SPARK_LOCAL_DIRS={self.folder / host}"]

    def allow(self, host, *rules, rejects=False):
        """Let others connect to these ports of a host only.

        Args:
            host: The host.
            *rules: Pairs of a port, or a range such as "35010-35015", and the hosts that may connect to it.
            rejects: Whether connections to any other port are refused; otherwise they remain without an answer.
        """
        lines = ['iif "lo" accept', "ct state established,related accept"]
        for port, sources in rules:
            if not sources:
                continue
            lines.append(f"ip saddr {{ {', '.join(map(self.addresses.get, sources))} }} tcp dport {port} accept")
        if rejects:
            lines.append("meta l4proto tcp reject with tcp reset")
        self._rules(host, "firewall", "filter", "drop", lines)

    def open(self, host):
        """Undo `allow`."""
        self._nft(host, "table inet firewall {}\ndelete table inet firewall")

    def translate(self, host, ports):
        """Let a host listen at its address of the second network only, and be reached at the first one, as behind NAT."""
        self._nft(
            host,
            f"table ip nat {{ chain in {{ type nat hook prerouting priority dstnat; ip daddr {self.addresses[host]} "
            f"tcp dport {ports} dnat to {self.interfaces[host]}; }}\n}}",
        )

    def cut(self, host, *others):
        """Drop what comes to a host from others, and to others from it; without others, all that it sends and receives."""
        peers = others or [each for each in self.addresses if each != host]
        self._rules(host, "cut", "filter - 10", "accept", [f"ip saddr {self.addresses[each]} drop" for each in peers])
        for each in peers:
            self._rules(each, f"cut_{host}", "filter - 10", "accept", [f"ip saddr {self.addresses[host]} drop"])

    def mend(self, host):
        """Undo `cut`."""
        self._nft(host, "table inet cut {}\ndelete table inet cut")
        for each in self.addresses:
            if each != host:
                self._nft(each, f"table inet cut_{host} {{}}\ndelete table inet cut_{host}")

    def _make(self):
        switch = self._namespace("switch")
        _ip("netns", "add", switch)
        for bridge in ("br0", "br1"):
            _ip("-n", switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", switch, "link", "set", bridge, "up")
        delayed = self.link.delay and not _has_netem(switch)
        if delayed:
            self._start_relay(switch)
        for number, (host, address) in enumerate(self.addresses.items()):
            namespace = self._namespace(host)
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            links = [("eth0", address), *((("eth1", self.interfaces[host]),) if host in self.interfaces else ())]
            for place, (device, own) in enumerate(links):
                plug = f"p{number}{place}"
                if delayed:
                    _ip("-n", switch, "link", "set", f"h{number}{place}", "netns", namespace, "name", device)
                else:
                    _ip("-n", switch, "link", "add", plug, "type", "veth", "peer", "name", device, "netns", namespace)
                _ip("-n", switch, "link", "set", plug, "master", f"br{place}", "up")
                words = (f"{own}/64", "dev", device, "nodad") if ":" in own else (f"{own}/24", "dev", device)
                _ip("-n", namespace, "addr", "add", *words)
                _ip("-n", namespace, "link", "set", device, "up")
                self._limit(switch, plug, 0 if delayed else self.link.delay)
                self._limit(namespace, device, 0)
            if self.link.loss:
                lost = f'iif != "lo" numgen random mod 100000 < {self.link.loss * 1000:.0f} drop'
                self._rules(host, "loss", "filter - 20", "accept", [lost])
            if host in self.cores:
                self._groups[host] = _cpu_group(namespace, self.cores[host])
            known = [name for name in self.addresses if name == host or name not in self.unknown]
            lines = [
                *([] if ":" in address else ["127.0.0.1 localhost"]),
                "::1 localhost",
                *(f"{self.addresses[name]} {name}" for name in known),
            ]
            (self.folder / f"{host}-hosts").write_text("\n".join(lines) + "\n")

    def _limit(self, namespace, device, delay):
        """Limit what leaves a device."""
        if delay:
            rate = ["rate", f"{self.link.rate}mbit"] if self.link.rate else []
            _tc(namespace, device, "netem", "delay", f"{delay}ms", *rate, "limit", "100000")
        elif self.link.rate:
            _tc(namespace, device, "tbf", "rate", f"{self.link.rate}mbit", "burst", "128kb", "latency", "50ms")
        if self.link.loss:  # of packets of the size that a network has
            _ip("-n", namespace, "link", "set", device, "gso_max_segs", "1")

    def _start_relay(self, switch):
        pairs = [
            f"h{number}{place},p{number}{place}"
            for number, host in enumerate(self.addresses)
            for place in range(1 + (host in self.interfaces))
        ]
        program = [sys.executable, str(Path(__file__).with_name("relay.py")), str(self.link.delay / 1000), *pairs]
        self._relay = subprocess.Popen([*_inside(switch), *program], stdout=subprocess.PIPE)
        assert self._relay.stdout.readline(), "the relay has not started"

    def _rules(self, host, table, priority, policy, lines):
        chain = f"type filter hook input priority {priority}; policy {policy};"
        new = "\n".join([f"table inet {table} {{ chain input {{", chain, *lines, "}", "}"])
        self._nft(host, f"table inet {table} {{}}\ndelete table inet {table}\n{new}\n")

    def _nft(self, host, text):
        subprocess.run([*_inside(self._namespace(host)), "nft", "-f", "-"], input=text, text=True, check=True)

    def _namespace(self, name):
        return f"{self._prefix}-{name}"


def cluster(folder, hosts, **options):
    """A standalone Spark with a master and two workers on their hosts, whose drivers run on the host ``driver``."""
    prefixes = {name: hosts.command(name) for name in hosts.addresses}
    return Standalone(folder, master="master", hosts=WORKERS, driver="driver", prefixes=prefixes, **options)


def _inside(namespace):
    return ["ip", "netns", "exec", namespace]


def _ip(*words):
    subprocess.run(["ip", *words], check=True)


def _tc(namespace, device, *words, check=True):
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *words]
    return subprocess.run(command, check=check, capture_output=not check)


def _has_netem(namespace):
    return _tc(namespace, "lo", "netem", check=False).returncode == 0


def _cpu_group(name, cores):
    """A control group whose processes have so many cores, of version 1 or 2."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group = (first if first.exists() else second) / name
    if not first.exists():
        (second / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    quota = f"{100_000 * cores:.0f}"
    if first.exists():
        (group / "cpu.cfs_quota_us").write_text(quota)
    else:
        (group / "cpu.max").write_text(f"{quota} 100000")
    return group
