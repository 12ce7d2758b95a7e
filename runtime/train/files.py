"""A train engine's checkpoint: a Hugging Face model folder beside optimizer state. Knows no loss and no batch.

    config.json, generation_config.json, model*.safetensors, tokenizer files    what transformers reads
    optimizer*.safetensors    exp_avg.<name>, exp_avg_sq.<name>; master.<name> where masters are wider than the model
    train_state.json          counters

Everything is whole tensors by name, so that what one layout wrote another one loads. Each worker of the layout reads
its own parts and writes its share of them, without a word of the others. Making a folder appear at once, when all have
written, is the caller's part (write beside, then rename); every file is synced here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from realgraph.graphs.errors import Where
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.plan.layout import Layout
from realgraph.runtime.engine import WeightSpec
from realgraph.runtime.files.paths import RunPath, make_folder, sync_path
from realgraph.runtime.models.checkpoint_files import (
    CheckpointTarget,
    Reader,
    TensorEntry,
    Writer,
    copy_file,
    write_json,
    write_parts,
)
from realgraph.runtime.models.fixed import fixed_parts, fixed_shapes
from realgraph.runtime.models.models import PackedModel
from realgraph.runtime.models.train_state import STATE, Counters, read_counters
from realgraph.runtime.models.weights import COPIED, local_parts, read_into, weight_specs
from realgraph.runtime.parallel.cuts import Box, layout_boxes
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.routes import Gap
from realgraph.runtime.parallel.shares import Shares, shares
from realgraph.runtime.train.errors import LostPart
from realgraph.runtime.train.optimizer import MOMENT_NAMES, Adam, Masters

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Contents:
    """The state of one engine on one worker: its parts of all tensors, live. They stay where they are, whatever an
    engine's passes gather, so that any thread may read them while nothing trains.

    apart: workers whose hosts do not see the run directory; they write what no other has. specs: of the whole model, in
    the order of its files, with the dtype that is saved. weights: by name. states: those that are saved beside the
    weights, by their kind and by the weights' names.
    """

    model: PackedModel
    layout: Layout
    worker: int
    apart: frozenset[int]
    specs: Sequence[WeightSpec]
    weights: Mapping[str, WeightPart]
    states: Mapping[str, Mapping[str, WeightPart]]
    masters: Masters | None
    adam: Adam | None
    # by writers, and True for what is cut as states are, not as weights
    _shares: dict[tuple[tuple[int, ...], bool], Shares] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the saved weights, the role's."""
        return self.specs[0].dtype

    @property
    def parts(self) -> list[tuple[str, WeightPart]]:
        """All of it: the kind of state, '' for weights, and the part."""
        return [(kind, part) for kind, parts in {"": self.weights, **self.states}.items() for part in parts.values()]

    def share(self, writers: Sequence[int]) -> Mapping[str, Mapping[str, Sequence[Box]]]:
        """The boxes of each tensor that this worker writes, by the kind of state, where of the layout's workers only
        `writers` are left.

        Raises LostPart for a part that none of them has.
        """
        chosen = tuple(sorted(set(writers).intersection(self.layout.mesh.devices)))
        apart = self.masters is not None and self.masters.shards is not None
        return {kind: self._share(chosen, apart and kind != "") for kind in ("", *self.states)}

    def _share(self, writers: tuple[int, ...], states: bool) -> Mapping[str, Sequence[Box]]:
        """The same of weights, or of states that are cut further."""
        if (writers, states) not in self._shares:
            shapes = {spec.name: spec.shape for spec in self.specs}
            model = (spec_from_config(self.model.config.to_dict(), Where()), self.model.head)
            boxes = layout_boxes(
                shapes, msgspec.structs.replace(self.layout, sharding="fsdp") if states else self.layout, model
            )
            try:
                self._shares[writers, states] = shares({one: boxes[one] for one in writers}, shapes, self.apart)
            except Gap as error:
                raise LostPart(str(error)) from None
        return self._shares[writers, states][self.worker]


def contents_of(
    model: PackedModel,
    place: tuple[Layout, int, frozenset[int]],
    dtype: torch.dtype,
    masters: Masters | None,
    adam: Adam | None,
) -> Contents:
    """The state of an engine that was just opened. place: its layout, its worker, and the workers apart. dtype: of the
    saved weights."""
    network = model.network
    states = {}
    if masters is not None:
        kinds = {moment: adam.moments_of(moment) for moment in MOMENT_NAMES} if adam is not None else {}
        if masters.dtype != dtype:  # they hold more than the saved weights do
            kinds["master"] = masters.tensors
        boxes = None if masters.shards is None else dict(zip(masters.names, masters.shards.boxes(), strict=True))
        states = {
            kind: local_parts(network, dict(zip(masters.names, tensors, strict=True)), boxes)
            for kind, tensors in kinds.items()
        }
    return Contents(model, *place, weight_specs(network, dtype), local_parts(network), states, masters, adam)


def save(contents: Contents, counters: Counters, folder: RunPath) -> None:
    """Write this worker's share of a checkpoint; all workers of the layout do. Raises OSError."""
    _write(contents, counters, contents.parts, (folder, contents.layout.mesh.devices))


@dataclass(frozen=True)
class HostSnapshot:
    """One worker's part of a trained state in host memory, apart from the engine's own: what a rescue writes after a
    failure."""

    contents: Contents
    counters: Counters
    parts: Sequence[tuple[str, WeightPart]]

    @property
    def version(self) -> int:
        """See Snapshot."""
        return self.counters.version

    def write(self, folder: RunPath, writers: Sequence[int]) -> None:
        """See Snapshot."""
        _write(self.contents, self.counters, self.parts, (folder, writers))


@torch.no_grad()
def snapshot(contents: Contents, counters: Counters) -> HostSnapshot:
    """Copy an engine's state, in the dtypes in which it is saved."""
    parts = [
        (kind, part._replace(values=part.values.detach().to("cpu", None if kind else contents.dtype, copy=True)))
        for kind, part in contents.parts
    ]
    return HostSnapshot(contents, counters, parts)


@torch.no_grad()
def _write(
    contents: Contents, counters: Counters, parts: Sequence[tuple[str, WeightPart]], to: tuple[RunPath, Sequence[int]]
) -> None:
    """Write this worker's share of `parts`, all that it holds. to: the folder, and the workers that are left."""
    folder, writers = to
    share = contents.share(writers)
    here = sorted(set(writers).intersection(contents.layout.mesh.devices))
    writer = Writer(here.index(contents.worker), len(here))
    make_folder(folder)
    dtypes = {kind: next(iter(states.values())).values.dtype for kind, states in contents.states.items()}
    stems = {"model": {"": contents.dtype}, **({OPTIMIZER: dtypes} if dtypes else {})}
    for stem, kinds in stems.items():
        entries = [
            TensorEntry(_saved_name(kind, spec.name), dtype, spec.shape)
            for kind, dtype in kinds.items()
            for spec in contents.specs
        ]
        own = [*_chosen((each for each in parts if each[0] in kinds), share)]
        if "" in kinds:  # fixed tensors are written by everyone who has them
            network = contents.model.network
            entries += [TensorEntry(name, torch.float32, shape) for name, shape in fixed_shapes(network.config).items()]
            own += fixed_parts(network).values()
        write_parts(CheckpointTarget(folder, stem), entries, own, writer)
    if writer.leads:
        _write_rest(contents, counters, folder)
    sync_path(folder)


def _saved_name(kind: str, name: str) -> str:
    """The name of a state of the weight `name` in the files; kind '' is the weight itself."""
    return f"{kind}.{name}" if kind else name


def _chosen(
    parts: Iterable[tuple[str, WeightPart]], share: Mapping[str, Mapping[str, Sequence[Box]]]
) -> Iterator[WeightPart]:
    """The boxes of the parts that are in the share, by their names in the files."""
    for kind, part in parts:
        for box in share[kind].get(part.name, ()):
            yield WeightPart(_saved_name(kind, part.name), box, part.values[box.within(part.box).slices])


def _write_rest(contents: Contents, counters: Counters, folder: RunPath) -> None:
    """Write the files of a checkpoint that hold no tensors."""
    model = contents.model
    config = model.config.to_diff_dict()
    config["dtype"] = str(contents.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    own = isinstance(folder, Path) and model.source is not None and model.source.resolve() == folder.resolve()
    if model.source is not None and not own:
        for name in COPIED:
            if (model.source / name).is_file():
                copy_file(model.source / name, folder / name)
    write_json(folder / STATE, msgspec.to_builtins(counters))


@torch.no_grad()
def load(contents: Contents, folder: RunPath) -> Counters:
    """Read a checkpoint into an engine of any layout; every rank reads its own parts.

    Raises FileNotFoundError, or ValueError for one of another format or without the optimizer state that is needed.
    """
    counters = read_counters(folder)
    read_into(contents.model.network, folder, contents.model.head)
    masters, adam = contents.masters, contents.adam
    if masters is None:
        return counters
    masters.refresh()
    if not contents.states:
        return counters
    with Reader(folder, OPTIMIZER) as reader:
        for kind, parts in contents.states.items():
            for name, part in parts.items():
                saved = _saved_name(kind, name)
                if saved not in reader.names:
                    raise ValueError(f"{folder} lacks {saved!r}: was it another dtype?")
                reader.read(saved, part)
    if adam is not None:
        adam.set_steps(counters.optimizer_steps)
    masters.publish()
    return counters
