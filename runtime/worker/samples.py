"""The result of a graph without training: every sample with its scores, one JSON line each. Worker side."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import MASK, TOKENS, is_prompt
from realgraph.runtime.files.paths import RemotePath, RunPath
from realgraph.runtime.job.sample_ids import is_held_out, place_of, sample_ids
from realgraph.runtime.job.samples import is_shown, shown_name
from realgraph.runtime.master.records import JsonLines
from realgraph.runtime.store.assemble import decode_value
from realgraph.runtime.store.store import Store


class RemoteLines:
    """One JSON object a line of a file on the host of the run."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path

    def write(self, value: object) -> None:
        """Append a line, which is there when this returns. Raises OSError."""
        self._path.append(msgspec.json.encode(value) + b"\n")

    def close(self) -> None:
        """Nothing is held open."""


Lines = JsonLines | RemoteLines


def open_lines(path: RunPath) -> Lines:
    """A file of lines that grows, here or on the host of the run."""
    return JsonLines(path) if isinstance(path, Path) else RemoteLines(path)


class SamplesFile:
    """Writes groups as this worker's store holds them, just before they are forgotten.

    A line has `group` (its number in the run), `sample` (its place in the group, from 0), the prompt and the other
    values of the data row, the text, whether it ended by itself, the numbers of prompt and new tokens, and what calls
    wrote, wherever they ran. Values per token stay out. A resumed run has removed the lines of what it makes again.
    """

    def __init__(self, graph: Graph, store: Store, decode: Callable[[Sequence[int]], str], file: Lines) -> None:
        self._graph, self._store, self._decode, self._file = graph, store, decode, file

    def write(self, groups: Sequence[int]) -> None:
        """Append the samples of `groups`, in order, without those of evaluations. Raises OSError."""
        n = self._graph.samples_per_group
        for group in sorted(group for group in groups if not is_held_out(group)):
            for sample in sample_ids(group, n):
                if self._store.has(self._own(TOKENS), sample):
                    self._file.write(self._line(group, sample))

    def _line(self, group: int, sample: int) -> dict[str, object]:
        line: dict[str, object] = {"group": group, "sample": place_of(sample)}
        for name, key in self._graph.keys.items():
            id = group if key.type.level == "group" else sample
            prompt = is_prompt(key.type)
            if (prompt or is_shown(key.type)) and self._store.has(name, id):
                value = decode_value(self._store.get(name, id), key.type)
                line[shown_name(self._graph, key)] = (
                    self._decode(value) if prompt and isinstance(value, list) else value
                )
        mask = self._store.get(self._own(MASK), sample)
        new = int(mask.sum())
        return {**line, "prompt_tokens": len(mask) - new, "new_tokens": new}

    def _own(self, key: str) -> str:
        """The full name of a key of the samples of groups."""
        return f"{self._graph.leading}.{key}" if self._graph.leading else key

    def close(self) -> None:
        self._file.close()
