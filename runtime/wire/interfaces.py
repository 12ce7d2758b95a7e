"""Network interfaces of this host by name and by address. IPv4, on Linux."""

import fcntl
import socket
import struct
import sys

from realgraph.graphs.errors import ConfigError, Problem, Where

_SIOCGIFADDR = 0x8915  # netdevice(7)


def address_of_interface(name: str, where: Where = Where(path="$.launch.interface")) -> str:
    """The IPv4 address of a network interface. Raises ConfigError at `where`."""
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
    raise ConfigError([Problem(where, fault, hint, "launch")])


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
