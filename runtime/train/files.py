"""A train engine's checkpoint: a Hugging Face model folder beside optimizer state. Knows no loss and no batch.

    config.json, generation_config.json, model*.safetensors, tokenizer files    what transformers reads
    optimizer*.safetensors    exp_avg.<name>, exp_avg_sq.<name>; master.<name> where masters are wider than the model
    train_state.json          counters

Everything is whole tensors by name, so that what one layout wrote another one loads. Making a folder appear at once is
the caller's part (write beside, then rename); every file is synced here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from realgraph.runtime.models.checkpoint_files import (
    CheckpointTarget,
    Reader,
    TensorEntry,
    copy_file,
    sync_folder,
    write,
    write_json,
)
from realgraph.runtime.models.models import PackedModel
from realgraph.runtime.models.train_state import STATE, Counters, read_counters
from realgraph.runtime.models.weights import COPIED, full_tensors, read_into
from realgraph.runtime.parallel.groups import CollectiveError, Ranks
from realgraph.runtime.train.optimizer import MOMENT_NAMES, Adam, Masters

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Contents:
    """The tensors of one engine. dtype: of the saved weights, the role's."""

    model: PackedModel
    ranks: Ranks
    dtype: torch.dtype
    masters: Masters | None
    adam: Adam | None

    @property
    def wide(self) -> bool:
        """True where the masters hold more than the saved weights do."""
        return self.masters is not None and self.masters.dtype != self.dtype


class PeerWriteError(OSError, CollectiveError):
    """The rank that writes could not: its own error says why."""


def save(contents: Contents, counters: Counters, folder: Path) -> None:
    """Write a checkpoint; collective. Rank 0 writes; where it can't, every rank raises OSError."""
    steps: list[tuple[Iterable[Any], Callable[[Iterator[Any]], None]]] = [
        (full_tensors(contents.model.network, contents.dtype), lambda found: _write_model(contents, found, folder))
    ]
    if contents.adam is not None or contents.wide:
        entries = _state_entries(contents)
        steps.append(
            (_state_tensors(contents), lambda found: write(CheckpointTarget(folder, OPTIMIZER), entries, found))
        )
    problem: OSError | None = None
    for tensors, task in steps:
        problem = _drain(tensors, task if contents.ranks.rank == 0 and problem is None else None) or problem
    if contents.ranks.rank == 0 and problem is None:
        try:
            write_json(folder / STATE, msgspec.to_builtins(counters))
            sync_folder(folder)
        except OSError as error:
            problem = error
    failed = contents.ranks.add(torch.tensor([float(problem is not None)]))
    if problem is not None:
        raise problem
    if failed.item():
        raise PeerWriteError(f"rank 0 could not write {folder}")


@dataclass(frozen=True)
class HostSnapshot:
    """A whole trained state in host memory, apart from the engine's own: what a rescue writes after a failure."""

    contents: Contents
    counters: Counters
    weights: tuple[tuple[str, Tensor], ...]
    state: tuple[tuple[str, Tensor], ...]

    @property
    def version(self) -> int:
        return self.counters.version

    def write(self, folder: Path) -> None:
        """Write what `save` would have written. From any thread; not collective. Raises OSError."""
        _write_model(self.contents, iter(self.weights), folder)
        if self.state:
            write(CheckpointTarget(folder, OPTIMIZER), _state_entries(self.contents), iter(self.state))
        write_json(folder / STATE, msgspec.to_builtins(self.counters))
        sync_folder(folder)


@torch.no_grad()
def snapshot(contents: Contents, counters: Counters) -> HostSnapshot:
    """Copy the state of an engine whose layout does not shard."""
    has_state = contents.adam is not None or contents.wide
    weights = full_tensors(contents.model.network, contents.dtype)
    state = _state_tensors(contents) if has_state else iter(())
    copy = [tuple((name, tensor.detach().to("cpu", copy=True)) for name, tensor in part) for part in (weights, state)]
    return HostSnapshot(contents, counters, copy[0], copy[1])


def _drain(tensors: Iterable[Any], task: Callable[[Iterator[Any]], None] | None) -> OSError | None:
    """Run `task` over the tensors and go through what it leaves: gathering them is collective."""
    source = iter(tensors)
    problem: OSError | None = None
    if task is not None:
        try:
            task(source)
        except OSError as error:
            problem = error
    for _ in source:
        pass
    return problem


def _write_model(contents: Contents, tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """The Hugging Face part of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    model = contents.model
    named = model.network.named_parameters()
    entries = [TensorEntry(name, contents.dtype, tuple(parameter.shape)) for name, parameter in named]
    write(CheckpointTarget(folder, "model"), entries, tensors)
    config = model.config.to_diff_dict()
    config["dtype"] = str(contents.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    if model.source is not None and model.source.resolve() != folder.resolve():
        for name in COPIED:
            if (model.source / name).is_file():
                copy_file(model.source / name, folder / name)


def _state_entries(contents: Contents) -> Sequence[TensorEntry]:
    masters = contents.masters
    assert masters is not None
    prefixes = (*(MOMENT_NAMES if contents.adam else ()), *(("master",) if contents.wide else ()))
    return [
        TensorEntry(f"{prefix}.{name}", masters.dtype, tuple(parameter.shape))
        for prefix in prefixes
        for name, parameter in zip(masters.names, masters.parameters, strict=True)
    ]


def _state_tensors(contents: Contents) -> Iterator[tuple[str, Tensor]]:
    """In the order of `_state_entries`; collective where sharded."""
    masters, adam = contents.masters, contents.adam
    assert masters is not None
    for moment in MOMENT_NAMES if adam is not None else ():
        for i, name in enumerate(masters.names):
            assert adam is not None
            yield f"{moment}.{name}", masters.whole(i, adam.moment(i, moment))
    if contents.wide:
        for i, name in enumerate(masters.names):
            yield f"master.{name}", masters.whole(i, masters.tensors[i])


@torch.no_grad()
def load(contents: Contents, folder: Path) -> Counters:
    """Read a checkpoint into an engine of any layout; every rank reads its own part.

    Raises FileNotFoundError, or ValueError for one of another format or without the optimizer state that is needed.
    """
    counters = read_counters(folder)
    read_into(contents.model.network, folder, contents.model.head)
    masters, adam = contents.masters, contents.adam
    if masters is None:
        return counters
    masters.refresh()
    if adam is None and not contents.wide:
        return counters
    with Reader(folder, OPTIMIZER) as reader:
        for i, name in enumerate(masters.names):
            part = masters.part(i)
            needed = [f"{prefix}.{name}" for prefix in (MOMENT_NAMES if adam else ())]
            needed += [f"master.{name}"] if contents.wide else []
            if not reader.names.issuperset(needed):
                raise ValueError(f"{folder} lacks {sorted(set(needed) - reader.names)[0]!r}: was it another dtype?")
            if adam is not None:
                moments = {moment: reader.part(f"{moment}.{name}", part) for moment in MOMENT_NAMES}
                adam.restore(i, moments, counters.optimizer_steps)
            if contents.wide:
                masters.tensors[i].copy_(reader.part(f"master.{name}", part))
    masters.publish()
    return counters
