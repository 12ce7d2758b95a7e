"""Exceptions out of the user's code, in one line with the place in the user's file. No torch."""

import importlib
import sysconfig
import traceback
from pathlib import Path

_OWN = str(Path(__file__).resolve().parents[1])  # of the runtime
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
MAX_TEXT_CHARACTERS = 500  # characters of a message


def error_text(error: BaseException) -> str:
    """`KeyError: 'reward' (my_maths.py:14)`: the kind, the first line of the message, and the user's own line."""
    message = unicode_text(_message(error)).splitlines()
    text = f"{type(error).__name__}: {message[0][:MAX_TEXT_CHARACTERS]}" if message else type(error).__name__
    place = user_place(error)
    return f"{text} ({place})" if place else text


def _message(error: BaseException) -> str:
    """The message of an exception, whose `__str__` may itself raise."""
    try:
        return str(error)
    except Exception as failed:
        return f"its message can't be read: {type(failed).__name__}"


def unicode_text(text: str) -> str:
    """`text` with lone surrogates, which no encoding has, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def user_place(error: BaseException) -> str:
    """`my_maths.py:14`: the innermost line of the traceback that is neither ours nor a library's; '' without one."""
    frames = [entry for entry in traceback.extract_tb(error.__traceback__) if not _foreign(entry.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _foreign(file: str) -> bool:
    """True where a frame's file is ours, Python's or an installed package's."""
    if file.startswith("<") or file.startswith(str(Path(importlib.__file__).parent)):
        return True
    return str(Path(file).resolve().parent).startswith(_OWN) or file.startswith(_LIBRARIES)
