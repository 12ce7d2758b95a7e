"""Passes of a model whose layers lie on several workers: what one pipeline stage does with each micro-batch.

All workers of a data-parallel rank have its micro-batches, so that only hidden states and their gradients travel; the
last stage alone has outputs and losses.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.models.models import AnySegments, PackedModel, Wants
from realgraph.runtime.parallel.experts.routing import load_balance, record_of
from realgraph.runtime.parallel.pipeline.executor import StageExecutor, StagePasses
from realgraph.runtime.parallel.pipeline.notes import notes_of, put_notes, states_of, with_notes
from realgraph.runtime.parallel.pipeline.schedules import Action
from realgraph.runtime.parallel.pipeline.stage import PipelineStage
from realgraph.runtime.parallel.tensor.network import edges_of


@dataclass(frozen=True)
class PackedMicroBatch:
    """Samples that pass through the model together. dummy: they are there for the pass alone."""

    batch: Packed
    wants: Wants
    dummy: bool = False


@dataclass(frozen=True)
class Judged:
    """A micro-batch's loss, and what is noted of it once its backward pass is on its way."""

    loss: Tensor
    note: Callable[[], None]


Judge = Callable[[PackedMicroBatch, Outputs], Judged]
NoteLoad = Callable[[PackedMicroBatch, Tensor | None], None]


class StagedModel:
    """A model cut to one stage, with its place in the pipeline. Making it is collective over the stages.

    dtype: of hidden states.
    """

    def __init__(self, model: PackedModel, stage: PipelineStage, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._chunks = stage.chunks
        self._pipeline = StageExecutor(stage.pipe, stage.ranks)

    def infer(self, work: Sequence[PackedMicroBatch]) -> list[Outputs]:
        """Forward passes of all micro-batches; their outputs in order, on the last stage alone. Collective."""
        begun, found = _Begun(self._model, work), dict[int, Outputs]()

        def forward(action: Action, arrived: Tensor | None) -> Tensor:
            out = self._forward(begun, action, arrived)
            if action.chunk == len(self._chunks) - 1:
                begun.end(action.microbatch)
            if "hidden" in out:
                return out["hidden"]
            found[action.microbatch] = Outputs(**out)
            return next(iter(out.values()))

        def backward(*_: object) -> None:
            raise AssertionError("inference has no backward pass")

        self._pipeline.infer(len(work), StagePasses(partial(self._room, begun), forward, backward))
        return [found[i] for i in sorted(found)]

    def train(
        self, work: Sequence[PackedMicroBatch], judge: Judge, collect: Callable[[], None], note_load: NoteLoad
    ) -> None:
        """Forward and backward passes of all micro-batches. judge: asked on the last stage, in order. collect: called
        when gradients have come to the parameters. note_load: told `Outputs.expert_load` of each chunk's layers.
        Collective."""
        begun, judged = _Begun(self._model, work), dict[int, Judged]()
        routed = StageRoutes(self._model) if any(one.wants.balance for one in work) else None

        def forward(action: Action, arrived: Tensor | None) -> Tensor:
            states = arrived if routed is None or arrived is None else states_of(arrived, routed.n)
            out = self._forward(begun, action, states)
            note_load(work[action.microbatch], out.get("expert_load"))
            if routed is not None:
                routed.add(action, arrived)
            if "hidden" in out:
                return out["hidden"] if routed is None else routed.message(action, out["hidden"])
            balance = {} if routed is None else {"balance": routed.balance(action)}
            judged[action.microbatch] = found = judge(work[action.microbatch], Outputs(**out, **balance))
            return found.loss

        def backward(action: Action, made: Tensor, grad: Tensor | None) -> None:
            self._begin(begun[action.microbatch])
            if routed is None:
                torch.autograd.backward([made], None if grad is None else [grad])
            else:
                routed.backward(action, made, grad)
            collect()
            if grad is None:
                judged.pop(action.microbatch).note()
            if action.chunk == 0:
                begun.end(action.microbatch)

        with _reduced_once(self._model):
            room = partial(self._room, begun, n_notes=0 if routed is None else routed.n)
            self._pipeline.train(len(work), StagePasses(room, forward, backward))
        collect()

    def _forward(self, begun: "_Begun", action: Action, arrived: Tensor | None) -> dict[str, Tensor]:
        one, chunk = begun[action.microbatch], self._chunks[action.chunk]
        out: dict[str, Tensor] = self._model(one.tokens, one.positions, one.segments, one.wants, chunk, arrived)
        return out

    def _begin(self, one: "_Inputs") -> None:
        """Recomputed layers find the edges and the routes of their own micro-batch, not those of the last one that went
        forward."""
        self._model.begin_routes(one.segments, one.wants)
        edges = edges_of(self._model.network)
        if edges is not None:
            edges.begin(one.segments.n_rows)

    def _room(self, begun: "_Begun", microbatch: int, n_notes: int = 0) -> Tensor:
        """Memory for a micro-batch's hidden states, [own rows, hidden], and so many numbers behind them."""
        edges, segments = edges_of(self._model.network), begun[microbatch].segments
        rows = segments.n_rows if edges is None else edges.own_rows(segments.n_rows)
        width = self._model.config.hidden_size
        room = torch.empty(rows, width, dtype=self._dtype, device=begun[microbatch].tokens.device)
        return with_notes(room, torch.zeros(n_notes, dtype=torch.float64)) if n_notes else room


class StageRoutes:
    """The routes of micro-batches through the stages, where their balance is a loss: it is of all layers at once.

    Each stage adds its layers' totals to those that come with the hidden states; the last one has the balance. Its
    gradient with respect to the totals, which is every stage's, goes back with that of the hidden states.
    """

    def __init__(self, model: PackedModel) -> None:
        record = record_of(model.network)
        if record is None:
            raise ValueError("a load_balance term takes a mixture of experts, and the model has none")
        self._record, self._sharers = record, model.sharers
        self._device = next(model.parameters()).device
        self.n = 2 * record.n_experts + 1  # numbers
        # by micro-batch and chunk: what came, its totals, and these with the chunk's own
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor, Tensor]] = {}

    def add(self, action: Action, arrived: Tensor | None) -> None:
        """Take up the totals of the pass that has just been made."""
        before = torch.zeros(self.n, dtype=torch.float64, device=self._device)
        if arrived is not None:
            before = notes_of(arrived, self.n)
        before.requires_grad_()
        self._kept[action.microbatch, action.chunk] = arrived, before, before + self._record.totals(self._device)

    def message(self, action: Action, hidden: Tensor) -> Tensor:
        """The message for the next stage."""
        return with_notes(hidden, self._kept[action.microbatch, action.chunk][2])

    def balance(self, action: Action) -> Tensor:
        """The term of all layers, on the last stage. Collective over the ranks that share rows."""
        return load_balance(self._kept[action.microbatch, action.chunk][2], self._sharers)

    def backward(self, action: Action, made: Tensor, grad: Tensor | None) -> None:
        """The backward pass of a chunk; the gradient of what came is then ready to be sent."""
        arrived, before, totals = self._kept.pop((action.microbatch, action.chunk))
        if grad is None:
            torch.autograd.backward([made])
        else:
            torch.autograd.backward([made, totals], [grad, notes_of(grad, self.n)])
        if arrived is not None and arrived.grad is not None:
            put_notes(arrived.grad, torch.zeros_like(totals) if before.grad is None else before.grad)


@dataclass(frozen=True)
class _Inputs:
    """The inputs of `PackedModel.forward`."""

    tokens: Tensor
    positions: Tensor
    segments: AnySegments
    wants: Wants


class _Begun:
    """The inputs of the micro-batches that are on their way."""

    def __init__(self, model: PackedModel, work: Sequence[PackedMicroBatch]) -> None:
        self._model, self._work = model, work
        self._begun: dict[int, _Inputs] = {}

    def __getitem__(self, microbatch: int) -> _Inputs:
        if microbatch not in self._begun:
            batch, wants = self._work[microbatch].batch, self._work[microbatch].wants
            segments = self._model.segments(batch, wants)
            self._begun[microbatch] = _Inputs(batch.tokens, batch.positions(), segments, wants)
        return self._begun[microbatch]

    def end(self, microbatch: int) -> None:
        """Its last pass on this stage is over."""
        del self._begun[microbatch]


@contextmanager
def _reduced_once(model: PackedModel) -> Iterator[None]:
    """Inside, a sharded model keeps its weights gathered and adds up gradients; at the end they are reduced, once.

    All stages gather at once, not each when its first micro-batch arrives. The reduction is asked for explicitly, as
    torch's own pipeline stages do: after the sync is switched on before the last backward pass alone, parameters that
    this pass does not reach would have no gradients.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    _set(model, last=False)
    root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    root._lazy_init()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    yield
    _set(model, last=True)
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()


def _set(model: PackedModel, *, last: bool) -> None:
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):  # the outermost one stays gathered, as torch has it
            module.set_reshard_after_forward(last and bool(name), recurse=False)
