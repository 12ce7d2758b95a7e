"""TCP ports that libraries have opened in this process, closed to everybody. Linux; elsewhere does nothing.

gloo listens on a port as long as a group lives, though it needs the port only while groups are made, takes whoever
connects, and keeps the descriptor.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterable

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06


def listening_sockets() -> frozenset[int]:
    """Descriptors of this process's listening TCP sockets."""
    return frozenset(fd for fd in _descriptors() if _listens(fd)) if sys.platform == "linux" else frozenset()


def refuse_connections(descriptors: Iterable[int]) -> None:
    """Have the kernel drop every packet that comes to these listening sockets; their connections live on.

    The sockets stay open and in their library's hands, which sees nothing of it. Raises OSError.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))  # "return 0": keep no byte
    program = struct.pack("HL", 1, ctypes.addressof(drop))
    for fd in descriptors:
        with socket.socket(fileno=os.dup(fd)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _listens(fd: int) -> bool:
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(fd)) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # closed meanwhile, by another thread
        return False
