"""Model folders for servers of this host, and the parts of any model folder. Knows no server."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from realgraph.runtime.engine import Parts, WeightSpec
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.memory.anonymous import open_anonymous
from realgraph.runtime.models.checkpoint_files import CheckpointTarget, TensorEntry, Writer, open_tensors, write_parts
from realgraph.runtime.models.heads import parameter_name
from realgraph.runtime.models.weights import COPIED, weight_files
from realgraph.runtime.parallel.checksums import checksum
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import WeightPart

WHOLE_FILE = 1 << 62  # bytes: all tensors in one


class StagedWeights:
    """Model folders for a server on this host. Their weights are memory without a name, which goes with this process;
    at most two are kept: those that the server has, and the next.

    source: the folder that the model came from. folder: of the links to weights, made and removed here.
    """

    def __init__(self, source: Path, specs: Sequence[WeightSpec], folder: Path) -> None:
        self.entries = [TensorEntry(spec.name, spec.dtype, spec.shape) for spec in specs]
        self._source, self._folder = source, folder
        self._made = 0
        self._files: dict[Path, int] = {}  # folder -> descriptor

    def gather(self, parts: Parts) -> Path:
        """A folder with all weights. Raises ValueError for parts that are missing or have no place, OSError."""
        self._made += 1
        folder = self._folder / f"weights-{self._made}"
        if folder.exists():  # of a worker that was killed, in a run that goes on
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for name in ("config.json", *COPIED):
            if (self._source / name).is_file():
                shutil.copyfile(self._source / name, folder / name)
        descriptor = self._files[folder] = open_anonymous(0)
        (folder / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        target = CheckpointTarget(folder, "model", WHOLE_FILE)
        write_parts(target, self.entries, self._counted(parts), Writer())
        return folder

    def keep(self, folder: Path) -> None:
        """Give up all others."""
        for other in [one for one in self._files if one != folder]:
            os.close(self._files.pop(other))
            shutil.rmtree(other)

    def keep_newest(self) -> None:
        """Give up all but the last."""
        self.keep(next(reversed(self._files), Path()))

    def remove(self) -> None:
        """Give up all."""
        self.keep(Path())
        shutil.rmtree(self._folder, ignore_errors=True)

    def _counted(self, parts: Parts) -> Parts:
        shapes = {entry.name: entry.shape for entry in self.entries}
        left = {entry.name: entry.nbytes // entry.dtype.itemsize for entry in self.entries}
        for part in parts:
            if part.name not in shapes or len(part.box.shape) != len(shapes[part.name]):
                raise ValueError(f"weight {part.name!r} is {part.box.shape} at {part.box.start}: it has no place")
            left[part.name] -= part.box.numel
            yield part
        if wrong := sorted(name for name, numel in left.items() if numel):
            raise ValueError(f"weights are missing, or came twice: {wrong[:3]}")


def checkpoint_parts(folder: RunPath, specs: Sequence[WeightSpec]) -> Parts:
    """The weights that `TrainEngine.save` wrote, tensor by tensor."""
    names = {spec.name for spec in specs}
    for file in weight_files(folder):
        source = open_tensors(file)
        for stored in source.keys():  # noqa: SIM118 (a safe_open is no mapping)
            name = parameter_name(stored, "lm", "lm_head.weight" not in names)
            if name in names:  # a server keeps what no step changes
                values = source.get_slice(stored)[:]
                yield WeightPart(name, Box((0,) * values.ndim, tuple(values.shape)), values)


def checksums_of(folder: RunPath, specs: Sequence[WeightSpec]) -> Tensor:
    """[weights] int64: the checksums of a folder's weights, in the order of `specs`."""
    parts = {part.name: part for part in checkpoint_parts(folder, specs)}
    return torch.stack([checksum(parts[spec.name], spec.shape) for spec in specs])
