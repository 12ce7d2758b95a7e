"""The tables that come with the package, as plain values."""

from importlib.resources import files
from typing import Any

import yaml


def shipped_table(name: str) -> Any:
    """The content of `NAME.yaml` of this package; read by libyaml where PyYAML has it, ten times as fast."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((files("realgraph.planner.inputs") / f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader)
