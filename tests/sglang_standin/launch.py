"""Stands for SGLang's server process: has a stand-in forked from a process that has torch loaded, and ends with it.

A server that loads torch and transformers itself takes five CPU seconds until it is ready. What the guardian starts,
watches and kills is this process; the fork ends as soon as it does. Needs no torch.
"""

import argparse
import json
import os
import socket
import sys

FORKS = "SGLANG_STANDIN_FORKS"  # names the abstract socket of `tests.sglang_forks`


def launch(arguments: argparse.Namespace) -> None:
    """Be a server until it ends, which is never well."""
    with socket.socket(socket.AF_UNIX) as fork:
        fork.connect(f"\0{os.environ[FORKS]}")
        order = {"arguments": vars(arguments), "environment": dict(os.environ)}
        socket.send_fds(fork, [b"\n"], [1, 2])
        fork.sendall(json.dumps(order).encode() + b"\n")
        fork.recv(1)
    sys.exit(1)
