"""The variables of the environment: the one module that reads them, hands them to processes, and sets them.

Decides nothing. Libraries of others read more of them by their own rules (torch, huggingface_hub). Imports nothing
heavy: the smallest of our processes use it.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType


def variables() -> Mapping[str, str]:
    """Those of this process as they are now, for whoever decides by them or passes some on."""
    return MappingProxyType(dict(os.environ))


def set_for_library(name: str, value: str) -> None:
    """Set what a library reads from the environment of its own process, where it has no other way to be told."""
    os.environ[name] = value
