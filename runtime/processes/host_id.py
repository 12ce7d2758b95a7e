"""The name of a host, by which two processes know that they can share memory."""

import hashlib
import os
import socket
import sys
import uuid
from pathlib import Path


def host_id() -> str:
    """Names this host as far as Unix sockets reach: one boot of one machine, one network namespace."""
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    else:
        space = f"{socket.gethostname()}/{uuid.getnode()}"
    return hashlib.sha256(space.encode()).hexdigest()[:16]
