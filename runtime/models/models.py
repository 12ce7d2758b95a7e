"""Hugging Face models as packed models: run on ragged batches. Knows no file, no optimizer and no loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from realgraph.runtime.attention import attention
from realgraph.runtime.attention.attention import PACKED
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.attention.sharing import share_prefixes
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.cpu.train import lean_hidden, lean_trains
from realgraph.runtime.models.heads import Head
from realgraph.runtime.models.logprobs import Readout, token_logprobs
from realgraph.runtime.parallel.context.segments import Asked, ContextSegments
from realgraph.runtime.parallel.cuts import EMBEDDING
from realgraph.runtime.parallel.experts.routing import record_of
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.pipeline.stage import Chunk, layers_of, through
from realgraph.runtime.parallel.tensor.network import edges_of
from realgraph.runtime.parallel.tensor.pieces import cut_of

AnySegments = Segments | ContextSegments


@dataclass(frozen=True)
class Wants:
    """The outputs that a forward pass is to compute.

    output: log-probabilities of the tokens, values before them, or a score per sample. temperature divides the logits.
    entropy: `no`, `detached`, or with `gradient`. where: [T] bool, the tokens whose log-probability counts (None: all);
    the others' are 0 and cost nothing in the head. balance: of the loads of experts, too. routes: [T, layers of
    experts, experts a token], where each token goes in place of its routers' choice (see `routing.choose`).
    """

    output: str = "logprobs"
    temperature: float = 1.0
    entropy: str = "no"
    where: Tensor | None = None
    balance: bool = False
    routes: Tensor | None = None
    chunk_bytes: int | None = None  # of the head's logits; default by device


class Row(NamedTuple):
    """The input of a pass. tokens, positions: [T] int64. chunk: the layers that it goes through, None: all. arrived:
    the hidden states from the chunk before, None in the first."""

    tokens: Tensor
    positions: Tensor
    chunk: Chunk | None = None
    arrived: Tensor | None = None


class PackedModel(nn.Module):
    """A transformers model run on packed batches. `network` keeps its own names and may be shared with a generator.

    head: which output it has. source: the folder it came from (None for random weights without one). context: the
    ranks that share each batch, where there are several.
    """

    context: Ranks | None = None

    def __init__(self, network: nn.Module, head: Head = "lm", source: Path | None = None) -> None:
        super().__init__()
        attention.register()
        self.network: Any = network
        self.head: Head = head
        self.source = source

    @property
    def config(self) -> Any:
        """The network's transformers configuration."""
        return self.network.config

    def run(self, batch: Packed, wants: Wants) -> Outputs:
        """One forward pass over all samples of `batch` (at least one), which lies on the model's device. Ranks that
        share batches pass the same one, and all get the outputs of it all."""
        outputs = self(batch.tokens, batch.positions(), self.segments(batch, wants), wants)
        return Outputs(**outputs)

    def segments(self, batch: Packed, wants: Wants) -> AnySegments:
        """The samples of a batch as `forward` takes them: this rank's part, where ranks share batches."""
        if self.context is not None:
            return ContextSegments(batch.lengths, self.context, batch.tokens.device)
        # the balance of experts is of all tokens, wherever and however they are computed
        shares = self._shares(batch.tokens.device) and not wants.balance
        shared = share_prefixes(batch, _needed(batch, wants), wants.routes) if shares else None
        return Segments(batch.lengths, batch.tokens.device, shared)

    def _shares(self, device: torch.device) -> bool:
        """True where common beginnings are computed once. On a GPU the variable-length kernels, which know no shared
        tokens, are worth more. In float64 results must not depend on who shares a batch, and transformers' norms round
        to float32, where a sum of gradients differs from their parts."""
        return device.type == "cpu" and next(self.network.parameters()).dtype != torch.float64

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: AnySegments,
        wants: Wants,
        chunk: Chunk | None = None,
        arrived: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See `Row`. Returns the fields of `Outputs`, as a dict so that FSDP sees the tensors; of a chunk that is not
        the last, in place of the head's, `hidden`: the states for the next one."""
        if self.config._attn_implementation != PACKED:
            self.config._attn_implementation = PACKED  # a generator that shares the network may have left its own
        row = Row(tokens, positions, chunk, arrived)
        self.begin_routes(segments, wants)
        record = record_of(self.network) if torch.is_grad_enabled() else None
        if record is None:
            return self._outputs(row, segments, wants)
        idle = isinstance(segments, ContextSegments) and segments.idle
        record.begin(idle=idle)
        outputs = self._outputs(row, segments, wants)
        record.end()
        whole = wants.balance and chunk is None  # of a chunk, who knows the others adds it
        balance = {"balance": record.balance(self.sharers, tokens.device)} if whole else {}
        return {**outputs, "expert_load": record.load(), **balance}

    @property
    def sharers(self) -> tuple[Ranks, ...]:
        """The ranks among which the rows of a pass are shared out, along each axis."""
        return (cut_of(self.network).ranks, *([] if self.context is None else [self.context]))

    def begin_routes(self, segments: AnySegments, wants: Wants) -> None:
        """A pass begins, or layers of it are computed again: its rows go to the experts that `wants` gives, if any.
        Raises ValueError for choices of another model."""
        record, routes = record_of(self.network), wants.routes
        if routes is None:
            if record is not None:
                record.replay(None)
            return
        if record is None:
            raise ValueError("the batch has routes to experts, and the model has no experts")
        shape = (segments.n_tokens, record.n_layers, self.config.num_experts_per_tok)
        if routes.shape != shape:
            raise ValueError(f"routes to experts have the shape {[*routes.shape]}, for this model {[*shape]}")
        own, edges = routes if segments.run is None else routes[segments.run], edges_of(self.network)
        if edges is not None:
            edges.begin(segments.n_rows)
            own = edges.own_part(own, record.n_experts)
        record.replay(own)

    def _outputs(self, row: Row, segments: AnySegments, wants: Wants) -> dict[str, Tensor]:
        """The head's fields of `forward`, or `hidden`."""
        if row.chunk is not None and not row.chunk.last:
            return {"hidden": self._backbone(_run_part(row, segments), segments)}
        if wants.output == "logprobs":
            return self._logprobs(row, segments, wants)
        if wants.output == "scores":
            return {"scores": self._scalars(row, segments, segments.offsets[1:].long() - 1)}
        every = torch.arange(segments.n_tokens, device=row.tokens.device)
        states = self._scalars(row, segments, every)
        # the hidden state at t - 1 is the state before token t
        return {"values": torch.roll(states, 1).index_fill(0, segments.offsets[:-1].long(), 0.0)}

    def _states(self, row: Row, segments: AnySegments, at: Tensor) -> Tensor:
        """[n, hidden]: the final hidden states of the run tokens `at` ([n] int64, in any order, repeated or not).
        Where the vocabulary is cut, each rank's gradient is a part of theirs."""
        run = _run_part(row, segments)
        if edges_of(self.network) is None and lean_trains(self.network):
            rows, place = torch.unique(at, return_inverse=True)
            model = self.network.model
            part = (layers_of(model, run.chunk), run.arrived) if run.chunk and run.arrived is not None else None
            return lean_hidden(model, (run.tokens, run.positions), segments, rows, part).index_select(0, place)
        hidden, edges = self._backbone(run, segments), edges_of(self.network)
        return hidden[at] if edges is None else edges.enter(hidden[None])[0][at]

    def _backbone(self, run: Row, segments: AnySegments) -> Tensor:
        """[U, hidden] of the run tokens behind all layers, or behind those of a chunk; where tensor parallelism cuts
        the rows, of this rank's."""
        edges = edges_of(self.network)
        if edges is not None:
            edges.begin(segments.n_rows)
        if run.chunk is not None:
            return through(self.network, run.chunk, (run.tokens, run.positions, run.arrived), segments)
        if lean_trains(self.network):
            return lean_hidden(self.network.model, (run.tokens, run.positions), segments)
        hidden: Tensor = self.network.model(
            input_ids=run.tokens[None], position_ids=run.positions[None], use_cache=False, segments=segments
        ).last_hidden_state[0]
        return hidden

    def _scalars(self, row: Row, segments: AnySegments, at: Tensor) -> Tensor:
        """[n], in at least float32: the value or score head's outputs at the packed positions `at` ([n] int64)."""
        edges, (rows, asked) = edges_of(self.network), _asked(segments, at)
        if edges is None:
            value: Tensor = self.network.score(self._states(row, segments, rows)).squeeze(-1)
        else:  # each rank its own rows: a number of each is less to send than its state
            hidden = self._backbone(_run_part(row, segments), segments)
            value = edges.gather(self.network.score(hidden).squeeze(-1))[rows]
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        return value if asked is None else asked.join(value)

    def _logprobs(self, row: Row, segments: AnySegments, wants: Wants) -> dict[str, Tensor]:
        tokens = row.tokens
        counted = torch.ones_like(tokens, dtype=torch.bool) if wants.where is None else wants.where.clone()
        counted[segments.offsets[:-1].long()] = False  # the first token of a sample follows nothing
        about = counted.nonzero().squeeze(-1)
        pieces, tp = cut_of(self.network).by_name.get(EMBEDDING), cut_of(self.network).ranks
        readout = Readout(
            self.network.lm_head,
            self.config.vocab_size if pieces is None else max(size for _, size in pieces.spans),
            wants.temperature,
            getattr(self.config, "final_logit_softcapping", None),
            wants.entropy,
            wants.chunk_bytes,
            None if pieces is None else (pieces.spans[tp.rank], tp),
        )
        before, asked = _asked(segments, about - 1)
        targets = tokens[about if asked is None else about[asked.which]]
        logprobs, entropy = token_logprobs(self._states(row, segments, before), targets, readout)
        if asked is not None:
            logprobs, entropy = asked.join(logprobs), None if entropy is None else asked.join(entropy)
        outputs = {"logprobs": logprobs.new_zeros(tokens.shape).index_put((about,), logprobs)}
        if entropy is not None:
            outputs["entropy"] = entropy.new_zeros(tokens.shape).index_put((about,), entropy)
        return outputs


def _run_part(row: Row, segments: AnySegments) -> Row:
    """Tokens and positions of those that are run."""
    run = segments.run
    return row if run is None else row._replace(tokens=row.tokens[run], positions=row.positions[run])


def _asked(segments: AnySegments, at: Tensor) -> tuple[Tensor, Asked | None]:
    """The run tokens at the packed positions `at` ([n] int64): all of them, or those of this rank and the way of their
    results to the others."""
    if isinstance(segments, ContextSegments):
        asked = segments.asked(at)
        return asked.rows, asked
    return at if segments.shared is None else segments.shared.place[at], None


def _needed(batch: Packed, wants: Wants) -> list[int]:
    """The number of each sample's tokens, from its first on, whose state `wants` asks for; at least 1.

    The log-probability of a token and the value before it follow from the state of the token before.
    """
    if wants.output == "scores":
        return list(batch.lengths)
    if wants.output == "values" or wants.where is None:
        return [max(1, n - 1) for n in batch.lengths]
    counted = wants.where.numpy()
    ends = np.cumsum(batch.lengths)
    last = np.maximum.accumulate(np.where(counted, np.arange(len(counted)), -1))[ends - 1]
    needed: list[int] = np.maximum(1, last - ends + np.array(batch.lengths)).tolist()
    return needed
