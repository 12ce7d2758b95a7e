"""Hosts of a network on one machine: network namespaces, each with an address of its own, joined by a bridge; and mount
namespaces, in which a folder is another one. Linux, as root."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_NUMBERS = count()  # of the networks of this process


def enter_namespace(name: str) -> None:
    """Put this process, whose threads all start later, into a named network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {name}")
    os.close(descriptor)


def hide(folder: str) -> None:
    """Have this process, and all that it starts, see an empty file system of their own at `folder`."""
    _mount(b"tmpfs", folder, b"tmpfs", 0)


def show(folder: str, at: str) -> None:
    """Have this process, and all that it starts, see `folder` at another place, too."""
    _mount(folder.encode(), at, None, _MS_BIND)


def _mount(source: bytes, place: str, kind: bytes | None, flags: int) -> None:
    """Mount something for this process, and all that it starts, alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None),
        lambda: libc.mount(source, place.encode(), kind, flags, None),
    ):
        if failed():
            raise OSError(ctypes.get_errno(), "mount", place)


@cache
def mounts() -> bool:
    """True where a process may have mounts of its own: as root, and not in every container."""
    try:
        return not subprocess.run(
            ["unshare", "--mount", "true"], check=False, capture_output=True, timeout=60
        ).returncode
    except FileNotFoundError:
        return False


def ip(*words: str) -> None:
    """`ip WORDS...`; raises where it fails."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


@dataclass(frozen=True)
class Network:
    """Namespaces, and the address of each."""

    spaces: tuple[str, ...]
    addresses: tuple[str, ...]

    def link(self, number: int, state: str) -> None:
        """Cut a host off, or join it again: `down`, `up`."""
        ip("link", "set", f"{self.spaces[number]}h", state)

    def shape(self, number: int, rate: str) -> None:
        """Limit what reaches a host to a rate in the words of tc: `1gbit`; '': no longer."""
        device = f"{self.spaces[number]}h"
        words = ["add", "dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        words = words if rate else ["del", "dev", device, "root"]
        subprocess.run(["tc", "qdisc", *words], check=True, capture_output=True, text=True, timeout=60)

    def received_bytes(self, number: int) -> int:
        """Bytes that others have sent to a host so far."""
        words = ["ip", "netns", "exec", self.spaces[number], "cat", "/sys/class/net/eth0/statistics/rx_bytes"]
        return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)


def why_not() -> str:
    """The reason for which namespaces can't be made here; '' where they can."""
    try:
        ip("netns", "add", f"rg{os.getpid()}try")
    except FileNotFoundError:
        return "there is no `ip` (iproute2)"
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    ip("netns", "del", f"rg{os.getpid()}try")
    return ""


@dataclass(frozen=True)
class Loopback:
    """The network of a namespace that reaches nothing but itself: all its connections can be cut and slowed."""

    space: str

    def link(self, state: str) -> None:
        """Drop all that is sent, or no longer: `down`, `up`. Connections live on, and send again."""
        ip("-n", self.space, "link", "set", "lo", state)

    def slow(self, rate: str, latency: str) -> None:
        """Let no more pass than a rate in the words of tc: what is above waits so long at most, or is dropped; '': no
        longer."""
        shape = ["add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "16kb", "latency", latency]
        words = shape if rate else ["del", "dev", "lo", "root"]
        tc = ["ip", "netns", "exec", self.space, "tc", "qdisc", *words]
        subprocess.run(tc, check=True, capture_output=True, text=True)


@contextmanager
def loopback() -> Iterator[Loopback]:
    """Such a network; gone afterwards."""
    space = f"rg{os.getpid()}l{next(_NUMBERS)}"
    ip("netns", "add", space)
    try:
        ip("-n", space, "link", "set", "lo", "mtu", "1500", "up")
        yield Loopback(space)
    finally:
        ip("netns", "del", space)


@contextmanager
def network(n_hosts: int) -> Iterator[Network]:
    """So many hosts that reach each other; gone afterwards. The kernel removes a namespace's devices after its end, so
    each network of a process has names of its own."""
    stem, subnet = (
        f"rg{os.getpid() % 10**5}x{next(_NUMBERS)}",
        f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}",
    )
    bridge = f"{stem}b"
    spaces = tuple(f"{stem}n{i}" for i in range(n_hosts))
    addresses = tuple(f"{subnet}.{i + 1}" for i in range(n_hosts))
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "up")
        for space, address in zip(spaces, addresses, strict=True):
            ip("netns", "add", space)
            ip("link", "add", f"{space}h", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{space}h", "master", bridge, "up")
            for words in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                ip("-n", space, *words)
            ip("-n", space, "link", "set", "lo", "up")
        yield Network(spaces, addresses)
    finally:
        for space in spaces:  # links first: the kernel removes those of a namespace later, and their names are needed
            subprocess.run(["ip", "link", "del", f"{space}h"], check=False, capture_output=True, timeout=60)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=60)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True, timeout=60)
