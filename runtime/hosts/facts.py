"""What a host says of itself when it joins: its address, its machine, and the versions of what its workers run."""

import fcntl
import ipaddress
import platform
import socket
import struct
import sys
from importlib.metadata import PackageNotFoundError, version

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.detect import probe
from realgraph.runtime.hosts.messages import HostFacts
from realgraph.runtime.processes.host_id import host_id

_SIOCGIFADDR = 0x8915  # Linux, netdevice(7)
_PACKAGES = ("realgraph", "torch", "transformers", "safetensors", "pyzmq", "msgspec")


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 host stands in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        hint = "HOST:PORT, such as 10.0.0.1:7000, as the run that waits for this host prints it"
        raise ConfigError([Problem(Where("command line", path="--connect"), f"{text!r} is no address", hint, "launch")])
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_address(towards: tuple[str, int]) -> str:
    """This host's address on the way to another one. Raises ConfigError where there is no way."""
    host, port = towards
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe_socket:
            probe_socket.connect(target)  # of a datagram socket: sends nothing, chooses the route
            return str(probe_socket.getsockname()[0])
    except OSError as error:
        hint = "check the address and this host's network"
        text = f"there is no way to {host}: {error.strerror or error}"
        raise ConfigError([Problem(Where("command line", path="--connect"), text, hint, "launch")]) from None


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface. Raises ConfigError."""
    known = [interface for _, interface in socket.if_nameindex()]
    fault, hint = "", f"this host has {', '.join(known)}"
    if name not in known:
        fault = f"this host has no network interface {name!r}"
    elif sys.platform != "linux":
        fault, hint = "the address of an interface is known on Linux only", "leave launch.interface out"
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                fault = f"the network interface {name!r} has no IPv4 address"
            else:
                return socket.inet_ntoa(answer[20:24])
    raise ConfigError([Problem(Where(path="$.launch.interface"), fault, hint, "launch")])


def interface_of_address(address: str) -> str:
    """The name of this host's network interface with an IPv4 address; '' where there is none, or none can be asked."""
    if sys.platform != "linux":
        return ""
    for _, name in socket.if_nameindex():
        try:
            if address_of_interface(name) == address:
                return name
        except ConfigError:
            continue
    return ""


def is_public(address: str) -> bool:
    """True of an address that the whole internet may reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_global


def own_facts(name: str, address: str) -> HostFacts:
    """This host's, as it is now."""
    return HostFacts(name, host_id(), address, probe(), own_versions())


def own_versions() -> dict[str, str]:
    """Of Python and of the packages that a worker runs; those that are missing are left out."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
