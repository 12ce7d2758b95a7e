"""Hugging Face models as packed models: built without a copy, run on ragged batches. Knows no optimizer and no loss."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig

from realgraph.graphs.errors import in_words
from realgraph.graphs.spec import ModelRole
from realgraph.runtime.attention import attention
from realgraph.runtime.attention.attention import PACKED
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.attention.sharing import share_prefixes
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.cpu.train import lean_hidden, lean_trains
from realgraph.runtime.models.heads import HEAD, Head, network_class, prepare
from realgraph.runtime.models.logprobs import Readout, token_logprobs
from realgraph.runtime.models.weights import own_part, read_config, read_into, refuse, resolve

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Wants:
    """The outputs that a forward pass is to compute.

    output: log-probabilities of the tokens, values before them, or a score per sample. temperature divides the logits.
    entropy: `no`, `detached`, or with `gradient`. where: [T] bool, the tokens whose log-probability counts (None: all);
    the others' are 0 and cost nothing in the head.
    """

    output: str = "logprobs"
    temperature: float = 1.0
    entropy: str = "no"
    where: Tensor | None = None
    chunk_bytes: int | None = None  # of the head's logits; default by device


class PackedModel(nn.Module):
    """A transformers model run on packed batches. `network` keeps its own names and may be shared with a generator.

    head: which output it has. source: the folder it came from (None for random weights without one).
    """

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
        """One forward pass over all samples of `batch` (at least one), which lies on the model's device."""
        shared = share_prefixes(batch, _needed(batch, wants)) if self._shares(batch.tokens.device) else None
        segments = Segments(batch.lengths, batch.tokens.device, shared)
        found = self(batch.tokens, batch.positions(), segments, wants)
        return Outputs(**found)

    def _shares(self, device: torch.device) -> bool:
        """True where common beginnings are computed once. On a GPU the variable-length kernels, which know no shared
        tokens, are worth more. In float64 results must not depend on who shares a batch, and transformers' norms round
        to float32, where a sum of gradients differs from their parts."""
        return device.type == "cpu" and next(self.network.parameters()).dtype != torch.float64

    def forward(self, tokens: Tensor, positions: Tensor, segments: Segments, wants: Wants) -> dict[str, Tensor]:
        """tokens, positions: [T] int64. Returns the fields of `Outputs`, as a dict so that FSDP sees the tensors."""
        if self.config._attn_implementation != PACKED:
            self.config._attn_implementation = PACKED  # a generator that shares the network may have left its own
        place = None if segments.shared is None else segments.shared.place
        if wants.output == "logprobs":
            return self._logprobs((tokens, positions), segments, wants)
        if wants.output == "scores":
            last = segments.offsets[1:].long() - 1
            at = last if place is None else place[last]
            return {"scores": self._scalars(self._states((tokens, positions), segments, at))}
        every = torch.arange(segments.n_tokens, device=tokens.device) if place is None else place
        states = self._scalars(self._states((tokens, positions), segments, every))
        # the hidden state at t - 1 is the state before token t
        return {"values": torch.roll(states, 1).index_fill(0, segments.offsets[:-1].long(), 0.0)}

    def _states(self, row: tuple[Tensor, Tensor], segments: Segments, at: Tensor) -> Tensor:
        """[n, hidden]: the final hidden states of the run tokens `at` ([n] int64, in any order, repeated or not).
        row: tokens and positions, [T] each."""
        tokens, positions = row if segments.shared is None else (x[segments.shared.kept] for x in row)
        if tokens.device.type == "cpu" and lean_trains(self.network):
            rows, place = torch.unique(at, return_inverse=True)
            return lean_hidden(self.network.model, tokens, positions, segments, rows).index_select(0, place)
        hidden: Tensor = self.network.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, segments=segments
        ).last_hidden_state[0]
        return hidden[at]

    def _scalars(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n], in at least float32."""
        value: Tensor = self.network.score(hidden).squeeze(-1)
        return value.to(torch.promote_types(value.dtype, torch.float32))

    def _logprobs(self, row: tuple[Tensor, Tensor], segments: Segments, wants: Wants) -> dict[str, Tensor]:
        tokens = row[0]
        counted = torch.ones_like(tokens, dtype=torch.bool) if wants.where is None else wants.where.clone()
        counted[segments.offsets[:-1].long()] = False  # the first token of a sample follows nothing
        about = counted.nonzero().squeeze(-1)
        readout = Readout(
            self.network.lm_head,
            self.config.vocab_size,
            wants.temperature,
            getattr(self.config, "final_logit_softcapping", None),
            wants.entropy,
            wants.chunk_bytes,
        )
        before = about - 1 if segments.shared is None else segments.shared.place[about - 1]
        logprobs, entropy = token_logprobs(self._states(row, segments, before), tokens[about], readout)
        found = {"logprobs": logprobs.new_zeros(tokens.shape).index_put((about,), logprobs)}
        if entropy is not None:
            found["entropy"] = entropy.new_zeros(tokens.shape).index_put((about,), entropy)
        return found


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


Shard = Callable[[PackedModel], None]


@dataclass(frozen=True)
class Start:
    """The beginning of a model. dtype: of the parameters (default: the role's). seed: random weights instead of the
    files'.

    shard: cuts the parameters, still without storage, over a mesh.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    seed: int | None = None
    shard: Shard | None = None


def build(role: ModelRole, path: str, start: Start) -> PackedModel:
    """A role's model from a Hugging Face folder or Hub id, in evaluation mode.

    The network is built without storage, sharded, and filled tensor by tensor, so a rank never holds more than its own
    part and one tensor. Raises ConfigError for what can't be trained (`weights.read_config`) or is incomplete.
    """
    folder = resolve(path, role.revision)
    config = parse_config(folder)
    try:
        network = empty_network(config, role.head, start.dtype or DTYPES[role.dtype])
    except Exception as error:  # of sizes that don't fit each other torch and transformers raise anything
        raise refuse(folder / "config.json", f"no network can be made of it: {in_words(error)}") from error
    model = PackedModel(network, role.head, folder)
    if start.shard is not None:
        start.shard(model)
    materialise(model, start.device)
    if start.seed is not None:
        initialise(model, start.seed)
    elif HEAD in read_into(model.network, folder, role.head):
        if not (role.trainable or role.ema_rate or role.init):
            hint = "take a model that was trained with one (AutoModelForSequenceClassification saves it)"
            raise refuse(folder, f"the weights have no {role.head} head, and this role never learns one", hint)
        dict(model.network.named_parameters())[HEAD].data.zero_()
    return model.eval()


def parse_config(folder: Path) -> Any:
    """transformers' configuration of a supported model. Raises ConfigError."""
    read_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers checks few fields: for the others it raises whatever they lead to
        raise refuse(folder / "config.json", f"transformers can't read it: {in_words(error)}") from error


def empty_network(config: Any, head: Head, dtype: torch.dtype) -> nn.Module:
    """transformers' network on the meta device, its parameters of `dtype` (buffers keep theirs: RoPE needs float32)."""
    prepare(config, head)
    attention.register()
    config._attn_implementation = PACKED
    config.dtype = dtype
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "initialising on meta is a no-op": that is the point
        network: nn.Module = network_class(config, head)(config)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def materialise(model: PackedModel, device: torch.device) -> None:
    """Give parameters bare storage on `device`, tied ones shared, and fill the buffers (RoPE, Gemma's scale)."""
    model.to_empty(device=device)
    if not isinstance(model, FSDPModule):
        model.network.tie_weights()
    _fill_buffers(model.network)


def _fill_buffers(network: Any) -> None:
    for module in network.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if "embed_scale" in buffers:
            buffers["embed_scale"].fill_(module.scalar_embed_scale)
        elif buffers:
            assert not any(True for _ in module.parameters(recurse=False)), f"unknown buffers {list(buffers)}"
            network._init_weights(module)  # RoPE's frequencies, from the config


def network_over(role: ModelRole, folder: Path, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A network in evaluation mode whose parameters are these very tensors, by name; only its buffers are its own.

    folder: of its config.json. Raises KeyError for a name that the network does not have.
    """
    first = next(iter(tensors.values()))
    network: Any = empty_network(parse_config(folder), role.head, first.dtype)
    modules = dict(network.named_modules())
    for name, tensor in tensors.items():
        place, _, last = name.rpartition(".")
        setattr(modules[place], last, nn.Parameter(tensor, requires_grad=False))
    network.tie_weights()
    for module in modules.values():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=first.device)
    _fill_buffers(network)
    assert not any(parameter.is_meta for parameter in network.parameters()), "a parameter was not given"
    found: nn.Module = network.eval()
    return found


def initialise(model: PackedModel, seed: int) -> None:
    """Draw random weights by the architecture's own rules, the same on every rank and under every sharding."""
    whole = network_class(model.config, model.head)(model.config)  # on the CPU, in float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in whole.modules():
            whole._init_weights(module)
    fill(model, dict(whole.named_parameters()))


def fill(model: PackedModel, tensors: dict[str, Tensor]) -> None:
    """Copy full tensors into the parameters (of a shard: its part). Raises ValueError for a wrong set of names."""
    parameters = dict(model.network.named_parameters())
    if parameters.keys() != tensors.keys():
        raise ValueError(f"other weights than the model's: {sorted(parameters.keys() ^ tensors.keys())[:3]}")
    for name, parameter in parameters.items():
        local, part = own_part(parameter)
        local.copy_(tensors[name].detach()[part])
