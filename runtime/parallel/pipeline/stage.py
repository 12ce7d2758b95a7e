"""A transformers network cut to the part that lies on one pipeline stage, and the way through a chunk of its layers.

The first stage has the embedding, the last one the final norm and the head; a tied embedding lies on both, each with
its own copy, whose gradients are summed. Layers keep their numbers, and parameters so their Hugging Face names. Knows
the decoders of `runtime.models`, which name their modules alike.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.model_spec import Head, spec_from_config
from realgraph.planner.plan.layout import Layout, Stages
from realgraph.planner.plan.stages import layer_ranges, stages_fault, stages_of
from realgraph.runtime.attention.attention import PartOfRow
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.cpu.train import lean_layers, lean_trains
from realgraph.runtime.parallel.cuts import EMBEDDING, LM_HEAD
from realgraph.runtime.parallel.groups import FLAT_BYTES, Ranks
from realgraph.runtime.parallel.pipeline.schedules import Pipe

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class StageLayers(nn.ModuleList):
    """Some of a decoder's layers, under their own numbers."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)


@dataclass(frozen=True)
class Chunk:
    """Layers of a stage that follow each other. first: the embedding comes before them; last: norm and head behind."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class PipelineStage:
    """A stage's part of a network. ranks: the stages, one of each. stages: the layers of all of them. shapes: of all
    parameters of the whole network, by name. tied: the first and the last stage hold copies of the embedding."""

    ranks: Ranks
    stages: Stages
    shapes: Mapping[str, tuple[int, ...]]
    tied: bool

    @property
    def pipe(self) -> Pipe:
        """The shape of the pipeline."""
        return Pipe(len(self.stages), len(self.stages[0]))

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """This stage's."""
        here, pipe = self.ranks.rank, self.pipe
        return tuple(
            Chunk(layers, pipe.before(here, i) is None, pipe.next(here, i) is None)
            for i, layers in enumerate(layer_ranges(self.stages)[here])
        )

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.ranks.size - 1

    def holder(self, name: str) -> int:
        """The first stage that holds a parameter."""
        if match := _LAYER.match(name):
            number = int(match[1])
            ranges = layer_ranges(self.stages)
            return next(stage for stage, chunks in enumerate(ranges) if any(number in chunk for chunk in chunks))
        return 0 if name == EMBEDDING else self.last

    def owns(self, name: str) -> bool:
        """True where this stage counts a parameter that it holds in sums that count each once."""
        return self.holder(name) == self.ranks.rank

    def everywhere(self, name: str, own: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The whole tensor of a parameter on every stage, where one that holds it has it as `own`. Collective."""
        if not self.owns(name) or own is None:
            own = torch.empty(self.shapes[name], dtype=dtype, device=self.ranks.device)
        return self.ranks.broadcast(own.to(dtype).contiguous(), self.holder(name))

    def sum_tied(self, grads: Mapping[str, Tensor]) -> None:
        """Add, in place, the gradients of both copies of a tied embedding; once a step. grads: by parameter, each this
        rank's piece or shard, which the other stage has alike."""
        here = self.ranks.rank
        if not self.tied or here not in (0, self.last):
            return
        flat = grads[EMBEDDING].view(-1)
        for own in torch.split(flat, max(1, FLAT_BYTES // flat.element_size())):
            own.add_(self.ranks.swap(own, self.last - here))


def cut_stages(network: Any, stages: Stages, ranks: Ranks, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Leave in a network without storage (on the meta device), in place, what lies on this stage; `stage_of` then knows
    it. shapes: of all parameters before anything was cut, by name."""
    tied = hasattr(network, "lm_head") and LM_HEAD not in shapes
    stage = PipelineStage(ranks, stages, shapes, tied)
    numbers = sorted(number for chunk in stage.chunks for number in chunk.layers)
    first, last = ranks.rank == 0, ranks.rank == stage.last
    model = network.model
    model.layers = StageLayers({number: model.layers[number] for number in numbers})
    if not (first or (last and tied)):
        model.embed_tokens = nn.Identity()
    if not last:
        model.norm = nn.Identity()
        for head in ("lm_head", "score"):
            if hasattr(network, head):
                setattr(network, head, nn.Identity())
    network.pipeline_stage = stage


def layer_stages(config: Any, head: Head, layout: Layout) -> Stages:
    """The layers of each stage and chunk of a layout. Raises ConfigError for stages that the model can't lie on."""
    spec = spec_from_config(config.to_dict(), Where())
    stages = stages_of(spec, head, layout)
    if fault := stages_fault(stages, spec.layers, layout.pp, len(stages[0])):
        raise ConfigError([Problem(Where(path="$.layout.stages"), fault, "take the stages of the plan", "layout")])
    return stages


def stage_of(network: nn.Module) -> PipelineStage | None:
    """The stage that a network was cut to."""
    stage = getattr(network, "pipeline_stage", None)
    return stage if isinstance(stage, PipelineStage) else None


def tie(network: Any) -> None:
    """Make the head of a tied network the embedding again, where both lie here."""
    stage = stage_of(network)
    if stage is None:
        network.tie_weights()
    elif stage.tied and stage.ranks.rank == stage.last:
        network.lm_head.weight = network.model.embed_tokens.weight


def layers_of(model: Any, chunk: Chunk) -> list[nn.Module]:
    """The modules of a chunk."""
    return [model.layers.get_submodule(str(number)) for number in chunk.layers]


def through(
    network: Any, chunk: Chunk, row: tuple[Tensor, Tensor, Tensor | None], segments: Segments | PartOfRow
) -> Tensor:
    """[U, hidden] behind a chunk of layers: hidden states as they go to the next one, or normed behind the last.

    row: the run tokens [U] and their positions [U], and the hidden states that came from the chunk before. Where
    tensor parallelism cuts the rows, hidden states are of this rank's.
    """
    model, (tokens, positions, arrived) = network.model, row
    hidden = model.embed_tokens(tokens[None]) if arrived is None else arrived[None]
    layers = layers_of(model, chunk)
    if lean_trains(network):
        hidden = lean_layers(model, layers, (hidden[0], positions), segments)[None]
    else:
        return walk(model, chunk, (hidden, positions[None]), {"segments": segments})[0]
    out: Tensor = (model.norm(hidden) if chunk.last else hidden)[0]
    return out


def walk(model: Any, chunk: Chunk, rows: tuple[Tensor, Tensor], given: Mapping[str, object]) -> Tensor:
    """[n, q, hidden] behind a chunk's layers, normed behind the last. rows: the states before it, and their positions
    [n, q]. given: to every layer, by name."""
    hidden, positions = rows
    turns = _rotations(model, hidden, positions)
    for number, layer in zip(chunk.layers, layers_of(model, chunk), strict=True):
        hidden = layer(
            hidden,
            attention_mask=None,
            position_embeddings=turns[_kind(model, number)],
            position_ids=positions,
            use_cache=False,
            **given,
        )
    out: Tensor = model.norm(hidden) if chunk.last else hidden
    return out


def _kind(model: Any, number: int) -> str:
    """The kind of a layer whose rotations differ from those of others; '' where all have the same."""
    return str(model.config.layer_types[number]) if model.config.model_type.startswith("gemma3") else ""


def _rotations(model: Any, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
    """Cosines and sines by kind of layer."""
    if not model.config.model_type.startswith("gemma3"):
        return {"": model.rotary_emb(hidden, positions)}
    kinds = sorted(set(model.config.layer_types))
    return {kind: model.rotary_emb(hidden, positions, kind) for kind in kinds}
