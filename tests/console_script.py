"""The console script in the process of a test."""

import sys

import pytest

from realgraph import cli


def typed(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `realgraph` with these arguments; its exit code."""
    monkeypatch.setattr(sys, "argv", ["realgraph", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)
