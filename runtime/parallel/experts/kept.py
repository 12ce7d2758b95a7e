"""The experts that generation chooses, token by token, as training replays them. Knows no cache and no request.

Source: rollout routing replay (R3), arXiv:2510.11370: choices are replayed, their weights are the trainer's own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from realgraph.runtime.parallel.experts.block import SparseBlock
from realgraph.runtime.parallel.experts.routing import RoutingRecord, record_of, route_dtype
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.pipeline.stage import stage_of

Choices = NDArray[Any]  # [tokens, layers of experts, experts a token] of `route_dtype`
_ROOM = 64  # tokens more than there are, where memory is taken


class SequenceRoutes:
    """The choices of one sequence, of the layers of experts that are here.

    Of each token those are kept behind which the next token was drawn: a token that is computed again after that, since
    its keys were lost or are of old weights, keeps its first ones. Sequences that take over the keys of a prompt take
    the choices that made these very keys, which are the newest.
    """

    def __init__(self, n_prompt: int, like: Choices) -> None:
        """like: [0, layers, k]."""
        self._kept = like
        self._n = 0
        self._prompt: Choices | None = None  # of the prompt's newest pass, where it is not the first
        self._n_prompt = n_prompt

    def take(self, start: int, rows: Choices, final: int) -> None:
        """A pass has computed tokens `start`, `start` + 1, ...; those before have been taken. The choices of the first
        `final` tokens stay, where there are any."""
        end, first = start + len(rows), max(start, min(self._n, final))
        if self._prompt is None and start < min(self._n, self._n_prompt):
            self._prompt = self._with_room(self._n_prompt)
        if self._prompt is not None and start < self._n_prompt:
            stop = min(end, self._n_prompt)
            self._prompt[start:stop] = rows[: stop - start]
        if end > len(self._kept):
            self._kept = self._with_room(max(end + _ROOM, 2 * len(self._kept)))
        self._kept[first:end] = rows[first - start :]
        self._n = max(self._n, end)

    def _with_room(self, n: int) -> Choices:
        """A copy of what is kept, for `n` tokens."""
        copy = np.empty((n, *self._kept.shape[1:]), self._kept.dtype)
        copy[: min(n, self._n)] = self.kept[:n]
        return copy

    def of_prompt(self, n: int) -> Choices:
        """[n, layers here, k]: the choices that made the keys of the prompt's first n tokens that the cache holds."""
        return (self._kept if self._prompt is None else self._prompt)[:n]

    @property
    def kept(self) -> Choices:
        """[tokens, layers here, k]: of all tokens that were computed."""
        return self._kept[: self._n]


class RouteNotes:
    """Takes down the choices of generation's passes through a network (this rank's part of it)."""

    def __init__(self, record: RoutingRecord, layers: Sequence[int], top_k: int, stages: Ranks | None) -> None:
        """layers: those of experts that are here, by their numbers among all. stages: where others have other ones."""
        self._record, self._layers, self._stages = record, list(layers), stages
        self._none, self._dtype = record.n_experts, route_dtype(record.n_experts)
        self._like: Choices = torch.empty((0, len(self._layers), top_k), dtype=self._dtype).numpy()

    def begin(self) -> None:
        """A pass begins."""
        self._record.note()

    def of_pass(self, n: int, q: int) -> Choices:
        """[n, q, layers here, k]: the choices for q tokens of each of n sequences, in the pass that has ended."""
        noted = self._record.noted()
        made = np.empty((n, q, *self._like.shape[1:]), self._like.dtype)
        if self._layers:
            made[:] = torch.stack([noted[layer] for layer in self._layers], 1).cpu().numpy().reshape(made.shape)
        return made

    def sequence(self, n_prompt: int) -> SequenceRoutes:
        """The notes of a sequence that nothing was computed of."""
        return SequenceRoutes(n_prompt, self._like)

    def whole(self, ended: Sequence[SequenceRoutes]) -> list[Tensor]:
        """[tokens, layers, k] of sequences that have ended, all layers of experts: `route_dtype`, on the CPU. The last
        token, which no pass has computed, has no choice. Collective over the stages."""
        counts = [len(one.kept) for one in ended]
        found = torch.zeros((sum(counts), self._record.n_layers, self._like.shape[-1]), dtype=self._dtype)
        if ended and self._layers:
            found[:, self._layers] = torch.from_numpy(np.concatenate([one.kept for one in ended]))
        if ended and self._stages is not None:  # gloo knows no int16
            sums = found if self._dtype == torch.uint8 else found.int()
            found = self._stages.add(sums.to(self._stages.device)).to("cpu", self._dtype)
        none = found.new_full((1, *found.shape[1:]), self._none)
        return [torch.cat([part, none]) for part in torch.split(found, counts)]


def route_notes(network: nn.Module) -> RouteNotes:
    """The notes of a network of experts. Raises ValueError where there is none."""
    record, stage = record_of(network), stage_of(network)
    if record is None:
        raise ValueError("routing_replay is for mixtures of experts, and this model is none")
    layers = [module.layer for module in network.modules() if isinstance(module, SparseBlock)]
    config: Any = network.config
    return RouteNotes(record, layers, config.num_experts_per_tok, None if stage is None else stage.ranks)
