"""The facts that a host tells when it joins: its address, its machine, and the versions of what its workers run."""

import ipaddress
import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.detect import probe
from realgraph.runtime.hosts.messages import HostFacts
from realgraph.runtime.job.manifest import FileSum, sum_file
from realgraph.runtime.processes.host_id import host_id

_PACKAGES = ("realgraph", "torch", "transformers", "safetensors", "pyzmq", "msgspec")


def split_address(text: str, option: str = "--connect") -> tuple[str, int]:
    """Host and port of `HOST:PORT`, an IPv4 address or a name. option: that it was given by. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or ":" in host or not port.isdigit() or not 0 < int(port) < 65536:
        printed = ", as the run that waits for this host prints it" if option == "--connect" else ""
        hint = f"HOST:PORT, such as 10.0.0.1:7000{printed}"
        raise ConfigError([Problem(Where("command line", path=option), f"{text!r} is no address", hint, "launch")])
    return host, int(port)


def own_address(towards: tuple[str, int]) -> str:
    """This host's address on the way to another one. Raises ConfigError where there is no way."""
    host, port = towards
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((host, port))  # of a datagram socket: sends nothing, chooses the route
            return str(probe_socket.getsockname()[0])
    except OSError as error:
        hint = "check the address and this host's network"
        text = f"there is no way to {host}: {error.strerror or error}"
        raise ConfigError([Problem(Where("command line", path="--connect"), text, hint, "launch")]) from None


def own_name(environment: Mapping[str, str]) -> str:
    """This host's name, as Slurm calls it where it has started this process."""
    return environment.get("SLURMD_NODENAME") or platform.node()


def is_public(address: str) -> bool:
    """True of an address that the whole internet may reach."""
    return ipaddress.ip_address(address).is_global


def other_files(sums: Mapping[str, FileSum], summed: Callable[[Path], FileSum] = sum_file) -> Iterator[str]:
    """Files that are not here as their checksums say, which are made by `summed`, and how."""
    for path, wanted in sums.items():
        try:
            n_bytes = Path(path).stat().st_size
            if n_bytes != wanted.nbytes:
                yield f"{path} has {n_bytes:,} bytes, and {wanted.nbytes:,} on the host of the run"
            elif summed(Path(path)) != wanted:
                yield f"{path} has other bytes than on the host of the run"
        except OSError as error:
            yield f"{path} can't be read: {error.strerror or error}"


def own_facts(name: str, address: str) -> HostFacts:
    """This host's, as it is now."""
    return HostFacts(name, host_id(), address, probe(), own_versions())


def own_versions() -> dict[str, str]:
    """The versions of Python and of the packages that a worker runs; missing ones are left out."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
