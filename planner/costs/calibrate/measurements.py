"""The measurements of `realgraph profile`: each case, and the seconds it took. Data only; measures nothing."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.costs.overhead import Operation
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.model_spec import ModelSpec


class Gemm(Struct, frozen=True, tag=True):
    """A product [tokens, width] x [width, width] in the profile's dtype."""

    tokens: int
    width: int


class AttentionCase(Struct, frozen=True, tag=True):
    """Causal attention of `samples` sequences of `length` tokens."""

    samples: int
    length: int
    heads: int
    head_dim: int
    backward: bool = False  # with its backward pass

    @property
    def flops(self) -> float:
        """4 operations per pair of tokens and element, half of the pairs; a backward pass has 2.5 times as many
        (FlashAttention-2, arXiv:2307.08691, sec. 4.1)."""
        forward = 2.0 * self.samples * self.heads * self.head_dim * self.length**2
        return forward * (3.5 if self.backward else 1.0)


class DeviceCopy(Struct, frozen=True, tag=True):
    """Copy `nbytes` within the device's memory: as many are read as written."""

    nbytes: int


class HostLink(Struct, frozen=True, tag=True):
    """Copy `nbytes` between pinned host memory and a GPU."""

    nbytes: int
    to_device: bool


class Collective(Struct, frozen=True, tag=True):
    """A collective over groups of `ranks` neighbours, all groups at once, with `nbytes` on each rank (of a gather:
    afterwards). `p2p`: a message of so many bytes from the first of two to the second, and one back."""

    op: Operation
    nbytes: int
    ranks: int


class Pass(Struct, frozen=True, tag=True):
    """One call of the train engine on every device, as data-parallel copies: `samples` of `length` tokens on each."""

    model: ModelSpec
    samples: int
    length: int
    microbatches: int = 1
    # forward and backward in `microbatches` equal parts, then one optimizer step; otherwise forward passes
    train: bool = False


class DecodeCase(Struct, frozen=True, tag=True):
    """One decode step of the embedded engine: `running` sequences of `context` tokens on each device. cuda_graphs:
    replayed where the device has them."""

    model: ModelSpec
    running: int
    context: int
    cuda_graphs: bool = True


class RolloutCase(Struct, frozen=True, tag=True):
    """A whole batch of the embedded engine: `groups` prompts of `prompt` tokens with `per_group` samples of exactly
    `new` tokens on each device."""

    model: ModelSpec
    groups: int
    per_group: int
    prompt: int
    new: int
    running: int


Case = Gemm | AttentionCase | DeviceCopy | HostLink | Collective | Pass | DecodeCase | RolloutCase


class Measured(Struct, frozen=True):
    """A case and its least seconds over `count` repeats."""

    case: Case
    seconds: float
    spread: float = 0.0  # (median - least) / least
    count: int = 1


class ProfileTask(Struct, frozen=True):
    """The cases that the workers of a profile run, in this order, `rounds` times and more while the least seconds still
    fall; `budget_seconds` ends it, after a whole round."""

    cases: tuple[Case, ...]
    cluster: Cluster
    dtype: DType  # of weights and activations
    rounds: int = 5
    budget_seconds: float = 150.0


def merged(workers: Sequence[Sequence[Measured]]) -> tuple[Measured, ...]:
    """One measurement of each case from those of all workers, which ran it at the same time: the slowest one's."""
    measurements: list[Measured] = []
    for same in zip(*workers, strict=True):
        slowest = max(same, key=lambda one: one.seconds)
        measurements.append(Measured(slowest.case, slowest.seconds, max(one.spread for one in same), slowest.count))
    return tuple(measurements)


# --- what is measured on which machine --------------------------------------------------------------------------------


GROUP_OPERATIONS: tuple[Operation, ...] = ("allreduce", "gather", "scatter", "exchange")


def cases_of(cluster: Cluster) -> tuple[Case, ...]:
    """The cases for a cluster's devices: sizes that a CPU core or a GPU works on for milliseconds."""
    return (*_kernels(cluster), *_collectives(cluster), *_engines(cluster))


def _kernels(cluster: Cluster) -> tuple[Case, ...]:
    if cluster.is_cpu:
        sizes = ((16, 128), (64, 128), (512, 128), (2048, 128), (64, 512), (512, 512), (2048, 256), (256, 1024))
        attention = [AttentionCase(4, 256, 4, 32, back) for back in (False, True)]
        attention += [AttentionCase(1, 1024, 4, 32, back) for back in (False, True)]
        return (*(Gemm(*size) for size in sizes), *attention, DeviceCopy(1 << 26))
    sizes = (
        (128, 4096),
        (512, 4096),
        (2048, 4096),
        (8192, 4096),
        (2048, 1024),
        (8192, 1024),
        (8192, 8192),
        (512, 8192),
    )
    attention = [AttentionCase(8, 2048, 32, 128, back) for back in (False, True)]
    attention += [AttentionCase(1, 16384, 32, 128, back) for back in (False, True)]
    links = [HostLink(1 << 28, to_device) for to_device in (True, False)]
    return (*(Gemm(*size) for size in sizes), *attention, DeviceCopy(1 << 30), *links)


def _collectives(cluster: Cluster) -> tuple[Case, ...]:
    """Each operation over every aligned power of two of a node's devices, and over all of them; messages of pairs."""
    devices = cluster.devices_per_node
    groups = [ranks for ranks in (2, 4, 8, 16) if ranks < devices and devices % ranks == 0]
    sizes = (1 << 12, 1 << 18, 1 << 22) if cluster.is_cpu else (1 << 14, 1 << 22, 1 << 28)
    if devices == 1:
        return ()
    over_groups = [Collective(op, n, ranks) for ranks in (*groups, devices) for op in GROUP_OPERATIONS for n in sizes]
    pairs = [Collective("p2p", n, 2) for n in sizes] if devices % 2 == 0 else []
    return (*over_groups, *pairs)


def _engines(cluster: Cluster) -> tuple[Case, ...]:
    """Passes, decode steps and rollouts of small models: what large ones cost besides follows from the kernels."""
    if cluster.is_cpu:
        narrow, wide = toy_model(64, 2, 64), toy_model(192, 4, 64)
        sizes = [(model, n, parts) for model in (narrow, wide) for n, parts in ((8, 1), (48, 1), (48, 3))]
        sizes += [(narrow, 192, 1), (narrow, 192, 6)]
        steps = [(narrow, 8, 32), (narrow, 128, 32), (wide, 1, 32), (wide, 8, 32), (wide, 64, 32), (wide, 32, 256)]
        rollouts = [RolloutCase(narrow, 16, 8, 8, 6, 64), RolloutCase(wide, 8, 4, 24, 12, 32)]
    else:
        narrow, wide = toy_model(1024, 4, 32768), toy_model(4096, 4, 32768)
        sizes = [(narrow, 8, 1), (narrow, 32, 1), (narrow, 32, 4), (wide, 8, 1), (wide, 16, 1), (wide, 16, 4)]
        steps = [(wide, n, length) for n in (1, 8, 64) for length in (512, 2048)] + [
            (wide, 256, 512),
            (narrow, 64, 512),
        ]
        rollouts = [RolloutCase(narrow, 16, 8, 128, 64, 64), RolloutCase(wide, 8, 8, 512, 128, 64)]
    length = 16 if cluster.is_cpu else 512
    return (
        *(Pass(model, samples, length, parts, train) for train in (False, True) for model, samples, parts in sizes),
        *(DecodeCase(*step) for step in steps),
        *rollouts,
    )


def toy_model(hidden: int, layers: int, vocab: int) -> ModelSpec:
    """A Qwen3 of that width with heads of 32 (of 128 from a width of 1,024 on), half as many of them for keys."""
    head_dim = 128 if hidden >= 1024 else 32
    heads = hidden // head_dim
    return ModelSpec(
        architecture="qwen3",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=max(1, heads // 2),
        head_dim=head_dim,
        intermediate=3 * hidden,
        vocab=vocab,
        tied=True,
        max_positions=1024 if hidden < 1024 else 16384,
        qk_norm=True,
    )


def config_json(model: ModelSpec, dtype: DType) -> Mapping[str, object]:
    """The config.json of a `toy_model`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": model.max_positions,
        "dtype": dtype,
    }
