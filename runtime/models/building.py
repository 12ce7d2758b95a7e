"""Packed models made from Hugging Face folders: without storage first, then sharded and filled, never copied whole."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from realgraph.graphs.errors import in_words
from realgraph.graphs.spec import ModelRole
from realgraph.runtime.attention import attention
from realgraph.runtime.attention.attention import PACKED
from realgraph.runtime.attention.latent import put_latent_attention
from realgraph.runtime.models.heads import CLASSIFIER, HEAD, Head, network_class, prepare, without_head
from realgraph.runtime.models.models import PackedModel
from realgraph.runtime.models.weights import own_part, read_config, read_into, refuse, resolve, whole_shapes
from realgraph.runtime.parallel.experts.block import name_experts
from realgraph.runtime.parallel.experts.routers import GroupedRouter
from realgraph.runtime.parallel.pipeline.stage import tie
from realgraph.runtime.parallel.tensor.pieces import cut_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
Shard = Callable[[PackedModel], None]


def master_dtype(role: ModelRole) -> torch.dtype:
    """Dtype of the optimizer's copy of the weights: as asked, else float64 for a float64 role and float32 for
    others."""
    if role.master_dtype is not None:
        return DTYPES[role.master_dtype]
    return torch.float64 if role.dtype == "float64" else torch.float32


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
    refuse_foreign_head(config, role.head, folder)
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
            lack, hint = without_head(role.head)
            raise refuse(folder, f"the weights {lack}", hint)
        dict(model.network.named_parameters())[HEAD].data.zero_()
    return model.eval()


def parse_config(folder: Path) -> Any:
    """transformers' configuration of a supported model. Raises ConfigError."""
    read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers checks few fields: for the others it raises whatever they lead to
        raise refuse(folder / "config.json", f"transformers can't read it: {in_words(error)}") from error
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")  # a model that is built here is not packed, nor what is saved of it
    return config


def refuse_foreign_head(config: Any, head: Head, folder: Path) -> None:
    """Refuse to generate by a critic or a reward model: with tied embeddings it would have a language model's head, and
    say anything. Raises ConfigError."""
    classifiers = [name for name in config.architectures or () if name.endswith(CLASSIFIER)]
    if head == "lm" and classifiers:
        text = f"these are the weights of a {classifiers[0]}, such as a critic or a reward model, which says no tokens"
        raise refuse(
            folder, text, "name the folder of a language model, such as the checkpoint's of the trained policy"
        )


def empty_network(config: Any, head: Head, dtype: torch.dtype) -> nn.Module:
    """transformers' network on the meta device, its parameters of `dtype` (buffers keep theirs: RoPE needs float32)."""
    prepare(config, head)
    attention.register()
    config._attn_implementation = PACKED
    config.dtype = dtype
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "initialising on meta is a no-op": that is the point
        network: nn.Module = network_class(config, head)(config)
        name_experts(network)
        put_latent_attention(network)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def materialise(model: PackedModel, device: torch.device) -> None:
    """Give parameters bare storage on `device`, tied ones shared, and fill the buffers (RoPE, Gemma's scale)."""
    model.to_empty(device=device)
    if not isinstance(model, FSDPModule):
        tie(model.network)
    _fill_buffers(model.network)
    _fuse_norms(model.network, device)


def _fuse_norms(network: nn.Module, device: torch.device) -> None:
    """On a GPU, let the norms of the Llama family (weight x normalised; arXiv:1910.07467, eq. 4) run as torch's one
    kernel, which multiplies by the weight before it rounds. transformers writes seven, most over float32 copies, and
    rounds before. Others, such as Gemma's, stay."""
    for module in network.modules() if device.type == "cuda" else ():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_fused_norm, module)


def _fused_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _fill_buffers(network: Any) -> None:
    for module in network.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if "embed_scale" in buffers:
            buffers["embed_scale"].fill_(module.scalar_embed_scale)
        elif isinstance(module, GroupedRouter):
            module.e_score_correction_bias.zero_()  # until it is read
        elif buffers:
            assert not any(True for _ in module.parameters(recurse=False)), f"unknown buffers {list(buffers)}"
            network._init_weights(module)  # RoPE's frequencies, from the config


def network_over(
    role: ModelRole, folder: Path, tensors: Mapping[str, Tensor], cut: Callable[[nn.Module], None]
) -> nn.Module:
    """A network in evaluation mode whose parameters are these very tensors, by name, and so are buffers that have a
    name here; the others are its own.

    folder: of its config.json. cut: cuts the network, still without storage, as the tensors are. Raises KeyError for a
    name that the network does not have.
    """
    first = next(iter(tensors.values()))
    network: Any = empty_network(parse_config(folder), role.head, first.dtype)
    cut(network)
    modules = dict(network.named_modules())
    for module in modules.values():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=first.device)
    _fill_buffers(network)
    for name, tensor in tensors.items():
        place, _, last = name.rpartition(".")
        given = tensor if last in modules[place]._buffers else nn.Parameter(tensor, requires_grad=False)
        setattr(modules[place], last, given)
    tie(network)
    _fuse_norms(network, first.device)
    assert not any(parameter.is_meta for parameter in network.parameters()), "a parameter was not given"
    evaluated: nn.Module = network.eval()
    return evaluated


def initialise(model: PackedModel, seed: int) -> None:
    """Draw random weights by the architecture's own rules, the same on every rank and under every sharding. They are
    drawn whole, in float32, on the model's device: a GPU takes milliseconds for what a core takes a minute for."""
    device = next(model.parameters()).device
    with device:
        whole = network_class(model.config, model.head)(model.config)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for module in whole.modules():
            whole._init_weights(module)
    fill(model, revert_weight_conversion(whole, dict(whole.named_parameters())))


def fill(model: PackedModel, tensors: dict[str, Tensor]) -> None:
    """Copy full tensors into the parameters (of a shard: its part). Raises ValueError for a wrong set of names."""
    parameters = dict(model.network.named_parameters())
    names = whole_shapes(model.network).keys()
    if names != tensors.keys():
        raise ValueError(f"other weights than the model's: {sorted(names ^ tensors.keys())[:3]}")
    for name, parameter in parameters.items():
        local, part = own_part(parameter, name, cut_of(model.network))
        local.copy_(tensors[name].detach()[part])
