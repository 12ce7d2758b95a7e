"""Shapes of the models and machines that published measurements name, where the shipped tables lack them."""

import math
import re

from msgspec.structs import replace

from benchmarks.published import Row
from realgraph.graphs.errors import ConfigError, Where
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.inputs.detect import Probe, resolve
from realgraph.planner.inputs.model_configs import known_models
from realgraph.planner.inputs.model_spec import LatentAttention, ModelSpec, spec_from_config

HOST = Probe(cores=2, host_memory_bytes=0)


def known(name: str) -> ModelSpec:
    """The shape of a model of the shipped table."""
    return spec_from_config(known_models()[name], Where())


def gpt(hidden: int, layers: int, heads: int, vocab: int = 51200) -> ModelSpec:
    """A decoder of GPT-2's kind: an MLP of two matrices, four times as wide; tied embeddings."""
    return ModelSpec("llama", hidden, layers, heads, heads, hidden // heads, 4 * hidden, vocab, True, 0, mlp_matrices=2)


# Megatron-LM, arXiv:2104.04473, table 1, and arXiv:2205.05198, table 3: by billions of parameters.
GPT = {
    1.7: gpt(2304, 24, 24),
    3.6: gpt(3072, 30, 32),
    7.5: gpt(4096, 36, 32),
    18.4: gpt(6144, 40, 48),
    22.0: gpt(6144, 48, 64),
    39.1: gpt(8192, 48, 64),
    76.1: gpt(10240, 60, 80),
    145.6: gpt(12288, 80, 96),
    175.0: gpt(12288, 96, 96),
    310.1: gpt(16384, 96, 128),
    529.6: gpt(20480, 105, 128),
    1008.0: gpt(25600, 128, 160),
}
# mosaicml/llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
DEEPSEEK_V3 = known("deepseek-ai/DeepSeek-V3")
KIMI_K2 = replace(  # arXiv:2507.20534
    DEEPSEEK_V3,
    heads=64,
    kv_heads=64,
    vocab=163840,
    experts=384,
    expert_layers=60,
    router_groups=1,
    router_groups_per_token=1,
)
MOONLIGHT = replace(  # arXiv:2502.16982
    DEEPSEEK_V3,
    hidden=2048,
    layers=27,
    heads=16,
    kv_heads=16,
    intermediate=11264,
    vocab=163840,
    experts=64,
    experts_per_token=6,
    router_groups=1,
    router_groups_per_token=1,
    expert_intermediate=1408,
    expert_layers=26,
    shared_intermediate=2816,
    latent=LatentAttention(0, 512, 64, 128),
)
GPT_OSS = known("openai/gpt-oss-120b")
GLM_AIR = ModelSpec(  # zai-org/GLM-4.5-Air, config.json
    architecture="llama",
    hidden=4096,
    layers=46,
    heads=96,
    kv_heads=8,
    head_dim=128,
    intermediate=10944,
    vocab=151552,
    tied=False,
    max_positions=131072,
    experts=128,
    experts_per_token=8,
    expert_intermediate=1408,
    expert_layers=45,
    shared_intermediate=1408,
)
LLAMA_34B = ModelSpec("llama", 8192, 48, 64, 8, 128, 22016, 32000, False, 4096)  # arXiv:2307.09288, appendix A.2
UNKNOWN = re.compile(r"nemotron(?!-?4)|qwen3.?next")  # layers of other kinds: no formula here


def gated(width: tuple[int, int], layers: int, heads: tuple[int, int, int], vocab: int) -> ModelSpec:
    """A dense decoder of LLaMA's kind, untied. width: hidden and of the MLP; heads: queries', keys', and their size."""
    return ModelSpec("llama", width[0], layers, *heads, width[1], vocab, False, 0)


def routed(dense: ModelSpec, experts: tuple[int, int, int], layers: int, shared: int) -> ModelSpec:
    """The same with experts (how many, how many of them a token passes, width of one) in so many of its layers."""
    count, chosen, width = experts
    return replace(
        dense,
        experts=count,
        experts_per_token=chosen,
        expert_intermediate=width,
        expert_layers=layers,
        shared_intermediate=shared,
    )


def plain(width: tuple[int, int], layers: int, heads: tuple[int, int, int], vocab: int, tied: bool) -> ModelSpec:
    """The same as `gated` with an MLP of two matrices."""
    return replace(gated(width, layers, heads, vocab), mlp_matrices=2, tied=tied)


# Their config.json on the Hub; Nemotron-4: arXiv:2402.16819 and 2406.11704. By a pattern of what sources call them.
OTHERS = (
    (r"falcon.*180b", plain((14848, 59392), 80, (232, 8, 64), 65024, True)),
    (r"falcon.*40b", plain((8192, 32768), 60, (128, 8, 64), 65024, True)),
    (r"gpt-?j", plain((4096, 16384), 28, (16, 16, 256), 50400, False)),
    (r"nemotron-?4.*340b", plain((18432, 73728), 96, (96, 8, 192), 256000, False)),
    (r"nemotron-?4.*15b", plain((6144, 24576), 32, (48, 8, 128), 256000, False)),
    (r"bloom.?176b", gpt(14336, 70, 112, 250880)),
    (r"opt.?1\.3b", gpt(2048, 24, 32, 50272)),
    (r"opt.?6\.7b", gpt(4096, 32, 32, 50272)),
    (r"opt.?13b", gpt(5120, 40, 40, 50272)),
    (r"opt.?30b", gpt(7168, 48, 56, 50272)),
    (r"opt.?66b", gpt(9216, 64, 72, 50272)),
    (r"opt.?175b", gpt(12288, 96, 96, 50272)),
    (r"mistral.?large", gated((12288, 28672), 88, (96, 8, 128), 32768)),
    (r"deepseek.?llm.?7b", gated((4096, 11008), 30, (32, 32, 128), 102400)),
    (r"\byi.?34b", gated((7168, 20480), 60, (56, 8, 128), 64000)),
    (r"phi-?3-mini", gated((3072, 8192), 32, (32, 32, 96), 32064)),
    (r"qwen2.?57b", routed(gated((3584, 20480), 28, (28, 4, 128), 151936), (64, 8, 2560), 28, 20480)),
    (r"glm-?4\.5(?!.?air)", routed(gated((5120, 12288), 92, (96, 8, 128), 151552), (160, 8, 1536), 89, 1536)),
    (r"llama.?4.*scout", routed(gated((5120, 8192), 48, (40, 8, 128), 202048), (16, 1, 8192), 48, 8192)),
    (r"llama.?4.*(maverick|e128)", routed(gated((5120, 16384), 48, (40, 8, 128), 202048), (128, 1, 8192), 24, 8192)),
    (
        r"deepseek.?v2.?lite",
        replace(MOONLIGHT, intermediate=10944, vocab=102400),
    ),
    (
        r"deepseek.?v2",
        replace(
            routed(gated((5120, 12288), 60, (128, 128, 128), 102400), (160, 6, 1536), 59, 3072),
            latent=LatentAttention(1536, 512, 64, 128),
        ),
    ),
)
MIXTRAL = ModelSpec(  # mistralai/Mixtral-8x7B-v0.1, config.json
    architecture="llama",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=32000,
    tied=False,
    max_positions=32768,
    experts=8,
    experts_per_token=2,
    expert_intermediate=14336,
    expert_layers=32,
)
NAMED = (
    *OTHERS,
    (r"deepseek.?v3|deepseek-r1(?!-distill)", DEEPSEEK_V3),
    (r"kimi.?k2|kimi-k2", KIMI_K2),
    (r"moonlight", MOONLIGHT),
    (r"gpt.?oss.?120", GPT_OSS),
    (r"gpt.?oss.?20", known("openai/gpt-oss-20b")),
    (r"intellect-3|glm-?4.5-air", GLM_AIR),
    (r"llama.?-?2?[_ -]3[34]b", LLAMA_34B),
    (
        r"mixtral.*8x22",
        replace(
            MIXTRAL,
            hidden=6144,
            layers=56,
            heads=48,
            intermediate=16384,
            expert_intermediate=16384,
            vocab=32768,
            expert_layers=56,
        ),
    ),
    (r"mixtral", MIXTRAL),
)
HUB = (  # how sources call models of the shipped table
    (r"llama.?-?v?3(\.1)?[_ -]405b", "meta-llama/Llama-3.1-405B"),
    (r"llama.?-?v?3(\.[13])?[_ -]70b", "meta-llama/Llama-3.1-70B"),
    (r"llama.?-?v?3(\.1)?[_ -]8b", "meta-llama/Llama-3.1-8B"),
    (r"llama.?-?v?3\.2[_ -]3b", "meta-llama/Llama-3.2-3B"),
    (r"llama.?-?v?3\.2[_ -]1b|llama-1b", "meta-llama/Llama-3.2-1B"),
    (r"llama.?-?v?2?[_ -]70b", "meta-llama/Llama-2-70b-hf"),
    (r"llama.?-?v?2?[_ -]13b", "meta-llama/Llama-2-13b-hf"),
    (r"llama.?-?v?2?[_ -]7b", "meta-llama/Llama-2-7b-hf"),
    (r"qwen3[_ -]235b|235b-a22b", "Qwen/Qwen3-235B-A22B"),
    (r"qwen3[_ -]30b|30b-a3b", "Qwen/Qwen3-30B-A3B"),
    (r"qwen3[_ -]32b", "Qwen/Qwen3-32B"),
    (r"qwen3[_ -]14b", "Qwen/Qwen3-14B"),
    (r"qwen3[_ -]8b", "Qwen/Qwen3-8B"),
    (r"qwen3[_ -]4b", "Qwen/Qwen3-4B"),
    (r"qwen3[_ -]1\.7b", "Qwen/Qwen3-1.7B"),
    (r"qwen3[_ -]0\.6b", "Qwen/Qwen3-0.6B"),
    (r"qwen(2\.5)?.*72b|72b dense", "Qwen/Qwen2.5-72B"),
    (r"qwen(2\.5)?.*32b|32b dense", "Qwen/Qwen2.5-32B"),
    (r"qwen(2\.5)?.*14b", "Qwen/Qwen2.5-14B"),
    (r"qwen(2\.5)?.*7b|7b dense", "Qwen/Qwen2.5-7B"),
    (r"qwen(2\.5)?.*1\.5b", "Qwen/Qwen2.5-1.5B"),
    (r"mistral.*7b", "mistralai/Mistral-7B-v0.1"),
)


def model_of(row: Row) -> ModelSpec | None:
    """The shape behind a row's model and notes; None where nothing tells it."""
    name = row.model.lower()
    if UNKNOWN.search(name):
        return None
    if name in {known.lower() for known in known_models()}:
        return _known(next(known for known in known_models() if known.lower() == name))
    for pattern, spec in NAMED:
        if re.search(pattern, name):
            return spec
    for pattern, hub in HUB:
        if re.search(pattern, name):
            return _known(hub)
    mpt = re.search(r"mpt-(\w+)", name)
    if mpt and mpt[1] in MPT:
        spec = gpt(*MPT[mpt[1]], vocab=50368)
        return replace(spec, max_positions=row.count("seq_len"))
    return _gpt_of(row) if re.search(r"gpt|bloom|megatron", name) else None


def _known(name: str) -> ModelSpec:
    return spec_from_config(known_models()[name], Where())


def _gpt_of(row: Row) -> ModelSpec | None:
    """A GPT from the notes' hidden, layers and heads; layers from the parameters where they are not told."""
    hidden, layers, heads = (_noted(row, word) for word in ("hidden", "layers", "heads"))
    vocab = 250880 if "250k" in row.notes else 51200
    named = re.search(r"([\d.]+)b\b", row.model.lower())
    params = row.number("params_b", float(named[1]) if named else 0.0) * 1e9
    if not hidden:
        near = min(GPT, key=lambda size: abs(size * 1e9 - params))
        return GPT[near] if abs(near * 1e9 - params) < 0.06 * params else None
    column = re.search(r"layers column (\d+)", row.notes)
    if hidden < 128:
        return None
    layers = int(column[1]) if column else layers or round((params - vocab * hidden) / (12 * hidden * hidden))
    default = 64 if "BLOOM" in row.system else hidden // 128
    heads = heads or default
    return gpt(hidden, layers, heads, vocab) if layers > 0 and heads <= hidden else None


def _noted(row: Row, word: str) -> int:
    found = re.search(rf"{word} (\d+)", row.notes) or re.search(rf"(\d+) {word}", row.notes)
    return int(found[1]) if found else 0


# --- machines ---------------------------------------------------------------------------------------------------------

KINDS = (
    (r"a100.*40", "A100-40"),
    (r"a100", "A100-80"),
    (r"a800", "A800"),
    (r"gb300", "GB300"),
    (r"gb200", "GB200"),
    (r"b300", "B300"),
    (r"b200", "B200"),
    (r"gh200", "GH200"),
    (r"h100.*pcie", "H100-PCIe"),
    (r"h100", "H100-SXM"),
    (r"h200", "H200"),
    (r"h800", "H800"),
    (r"h20\b|h20-", "H20"),
    (r"l40s", "L40S"),
    (r"a6000", "RTX-A6000"),
    (r"mi300", "MI300X"),
)
NVL72 = 64  # devices of a rack that jobs use, all joined by NVLink
HBM2E_BYTES_PER_S = 2.4e12  # the H100 with 96 GB of HBM2e has five stacks at 3.2 Gb/s a pin
POWER_EXPONENT = 0.4  # of the clock in the power limit: power grows with the cube of it, less what does not scale


def _of_axes(row: Row) -> int:
    """Devices that a layout needs, where their number is not told."""
    return math.prod(max(1, row.count(axis, 1)) for axis in ("tp", "pp", "dp", "cp"))


def cluster_of(row: Row) -> Cluster | None:
    """The machine behind a row's `gpu` and `n_gpus`; None where the kind is in no table, or no cluster has so many."""
    name, count = row.gpu.lower(), max(1, row.count("n_gpus", 1) or _of_axes(row))
    kind = next((kind for pattern, kind in KINDS if re.search(pattern, name)), None)
    if kind is None:
        return None
    per_node = min(count, NVL72 if kind.startswith("GB") else 8)
    spec = ClusterSpec(nodes=-(-count // per_node), devices=per_node, kind=kind)
    try:
        found = resolve(spec, HOST)
    except ConfigError:
        return None
    if "hbm2e" in name and kind == "H100-SXM":
        found = replace(found, memory_bytes=96 * 10**9, memory_bytes_per_s=HBM2E_BYTES_PER_S)
    watts = re.search(r"(\d+)w\b", name)
    if watts and kind == "H100-SXM":
        found = replace(found, flops=found.flops * (int(watts[1]) / 700) ** POWER_EXPONENT)
    return found
