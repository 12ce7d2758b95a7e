"""The files that a user asks a command to write."""

import os
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where


def refuse_unwritable(out: Path | None) -> None:
    """Raise ConfigError for a file that can't be written, before anybody has waited for what goes there."""
    if out is None:
        return
    folder = out.absolute().parent
    if out.is_dir():
        raise _unwritable(out, "it is a directory")
    if not folder.is_dir():
        raise _unwritable(out, f"there is no directory {folder}")
    if not os.access(out if out.exists() else folder, os.W_OK):
        raise _unwritable(out, "permission denied")


def write(out: Path, text: str) -> None:
    """Write a file that the user asked for. Raises ConfigError where that can't be."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(out, (error.strerror or str(error)).lower()) from error


def make_folder(folder: Path) -> None:
    """Make a folder that the user named, where it is not there. Raises ConfigError where that can't be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder can't be made: {(error.strerror or str(error)).lower()}"
        raise ConfigError([Problem(Where(str(folder)), text, "name a folder that is yours", "out")]) from error


def _unwritable(out: Path, why: str) -> ConfigError:
    hint = "name a file in a directory that exists and is yours"
    return ConfigError([Problem(Where(str(out)), f"can't be written: {why}", hint, "out")])
