"""The join key of a run: with it an agent proves that it may join, and knows that it has found the right master.

A file of mode 0600 or standard input carries it, never an argument, an environment variable or a log line.
"""

import os
import stat
import sys
from pathlib import Path

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.job.run_folder import private
from realgraph.runtime.wire.curve import KeyPair, make_keys

FORM = "realgraph-join-1"  # the first word of a key, which names its form
STDIN = "-"
_MOST_BYTES = 1024
_KEY_CHARACTERS = 40  # of one key in Z85


class JoinKey(Struct, frozen=True):
    """server: the public key of the run's master. client: the pair that all its agents hold."""

    server: str
    client: KeyPair

    @property
    def text(self) -> str:
        """One line of four words, the last of them secret."""
        return f"{FORM} {self.server} {self.client.public} {self.client.secret}\n"


def make_join_key(server: KeyPair) -> JoinKey:
    """A new key for the agents of one run."""
    return JoinKey(server.public, make_keys())


def write_join_key(key: JoinKey, path: Path) -> None:
    """Write it to a file that only this user can read, in the place of an older one. A reader finds one of the two,
    whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "x", encoding="ascii", opener=private) as file:
        file.write(key.text)
    os.replace(partial, path)


def read_join_key(source: str) -> JoinKey:
    """The key in a file, or `-`: on standard input. Raises ConfigError, also where others can read the file."""
    if source == STDIN:
        return parse_join_key(sys.stdin.readline(_MOST_BYTES), "standard input")
    try:
        with open(source, encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.readline(_MOST_BYTES)
    except OSError as error:
        hint = "it lies in the directory of the run that waits for this host, or comes with --key -"
        raise _wrong(f"the key file can't be read: {error.strerror or error}", hint, source) from None
    if mode & 0o077:
        hint = f"chmod 600 {source}, and start the run again for a new key: this one may be known to others"
        raise _wrong(f"others can read the key file (its mode is {mode:o})", hint, source)
    return parse_join_key(text, source)


def parse_join_key(text: str, source: str) -> JoinKey:
    """The key in one line. source: where it comes from, for the message. Raises ConfigError."""
    words = text.split()
    if len(words) != 4 or words[0] != FORM or any(len(word) != _KEY_CHARACTERS for word in words[1:]):
        hint = f"a key is one line of four words, the first of them {FORM}: join.key of a run that waits for its hosts"
        raise _wrong("no join key", hint, source)
    return JoinKey(words[1], KeyPair(words[2], words[3]))


def _wrong(text: str, hint: str, source: str) -> ConfigError:
    return ConfigError([Problem(Where("command line", path=f"--key {source}"), text, hint, "launch")])
