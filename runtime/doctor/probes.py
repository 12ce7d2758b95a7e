"""A look at this host: versions, memory, limits, disk, network. Judges nothing, and imports neither torch nor zmq.

Only the disk may take its time, so it has a deadline: a file server that is gone would hold this process for ever.
"""

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from realgraph.planner.inputs.detect import probe
from realgraph.runtime.doctor.facts import UNLIMITED, Disk, HostReport, Network, ProcessLimits
from realgraph.runtime.processes.host_id import host_id

PACKAGES = ("realgraph", "torch", "transformers", "pyzmq", "safetensors", "msgspec")
_MODULES = {"pyzmq": "zmq"}
DISK_SECONDS = 6.0  # for a file system to take what is written
ANSWER_SECONDS = 2.0
_WRITE_SECONDS, _WRITE_BYTES, _PIECE_BYTES = 1.0, 256 << 20, 4 << 20
_SHM = "/dev/shm"
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MEMORY = Path("/proc/meminfo")
_INFINIBAND = Path("/sys/class/infiniband")
_NOWHERE = ("192.0.2.1", 9)  # an address of documentation, RFC 5737: nothing is sent


def look(name: str, network: Network, folder: Path) -> HostReport:
    """This host, all but torch. folder: for the disk."""
    machine = probe()
    shm_bytes, shm_free_bytes = _space(_SHM)
    return HostReport(
        name=name,
        id=host_id(),
        network=network,
        machine=machine,
        available_bytes=min(_available_bytes(), machine.host_memory_bytes) or machine.host_memory_bytes,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        limits=ProcessLimits(
            open_files=_limit(resource.RLIMIT_NOFILE, hard=True),
            processes=_limit(resource.RLIMIT_NPROC),
            locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        ),
        disk=look_at_disk(folder),
        versions=versions(),
        infiniband=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    )


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python and of packages that are installed, and can be found."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            if importlib.util.find_spec(_MODULES.get(package, package)) is not None:
                found[package] = version(package)
    return found


def outward_address() -> str:
    """This host's address on its way to others; that of loopback where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect(_NOWHERE)  # chooses the route
        except OSError:
            return "127.0.0.1"
        return str(datagrams.getsockname()[0])


def look_at_network(address: str, interface: str) -> Network:
    """An address of this host, which listens there on any port and dials itself. interface: its name."""
    ports = 0
    if _PORT_RANGE.exists():
        first, last = map(int, _PORT_RANGE.read_text(encoding="ascii").split())
        ports = last - first + 1
    error = ""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(ANSWER_SECONDS)
            with socket.create_connection(server.getsockname(), timeout=ANSWER_SECONDS):
                server.accept()[0].close()
    except OSError as failed:
        error = os.strerror(failed.errno) if failed.errno else str(failed)
    return Network(address, interface, ports, error)


def look_at_disk(folder: Path) -> Disk:
    """The file system of a folder, and how fast it takes a file, which is removed."""
    found: list[Disk] = []
    thread = threading.Thread(target=lambda: found.append(_disk(folder)), name="disk", daemon=True)
    thread.start()
    thread.join(DISK_SECONDS)
    return found[0] if found else Disk(str(folder), error=f"its file system has not answered within {DISK_SECONDS:g} s")


def _disk(folder: Path) -> Disk:
    try:
        space = shutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder, prefix=".realgraph-doctor-", buffering=0) as file:
            piece, began, n_bytes = os.urandom(_PIECE_BYTES), time.monotonic(), 0
            most = min(_WRITE_BYTES, space.free // 2)
            while n_bytes < most and time.monotonic() - began < _WRITE_SECONDS:
                n_bytes += file.write(piece)
            os.fsync(file.fileno())
            seconds = time.monotonic() - began
    except OSError as error:
        return Disk(str(folder), error=(error.strerror or str(error)).lower())
    return Disk(str(folder), space.total, space.free, n_bytes / seconds)


def _space(folder: str) -> tuple[int, int]:
    """Bytes of a file system, and those that are free; none where it is not there."""
    try:
        space = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return space.total, space.free


def _limit(which: int, *, hard: bool = False) -> int:
    found = resource.getrlimit(which)[int(hard)]
    return UNLIMITED if found == resource.RLIM_INFINITY else found


def _available_bytes() -> int:
    """As the kernel estimates it; 0 where it says nothing."""
    if not _MEMORY.exists():
        return 0
    lines = (line.split() for line in _MEMORY.read_text(encoding="ascii").splitlines())
    return next((1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:"), 0)
