"""A model's files: where they are, what is refused, and reading their tensors one by one into place. No engine.

Only safetensors are read, and no code of a checkpoint is run.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.data import hub
from realgraph.runtime.engine import Parts, Weights, WeightSpec
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.models.checkpoint_files import open_tensors, read_part
from realgraph.runtime.models.fixed import beyond_the_model, fixed_parts, fixed_shapes
from realgraph.runtime.models.heads import HEAD, SUPPORTED, Head, parameter_name
from realgraph.runtime.models.quantised import is_readable, unpacked
from realgraph.runtime.models.remote_tensors import UnreadableTensors
from realgraph.runtime.parallel.cuts import Box, overlap
from realgraph.runtime.parallel.exchange import Arriving, WeightPart
from realgraph.runtime.parallel.pipeline.stage import stage_of
from realgraph.runtime.parallel.tensor.pieces import TensorCut, cut_of, shard_of

COPIED = (  # beside the weights, what a saved model needs to be used; copied from its source where it is there
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
HUB_PATTERNS = ["*.safetensors", "model.safetensors.index.json", "config.json", *COPIED]
ELSEWHERE = "*/*"  # the same weights in other forms
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
BRING_WEIGHTS = "bring the model's .safetensors files there; of the Hub, where there is a network: hf download NAME"


def refuse(file: RunPath | str, text: str, hint: str = "") -> ConfigError:
    """A ConfigError with one problem in `file`."""
    return ConfigError([Problem(Where(str(file)), text, hint, "model")])


def resolve(path: str, revision: str | None = None) -> Path:
    """The local folder of a model: a directory as it is, a Hub id through the Hub's cache. Raises ConfigError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise refuse(path, "there is no such model folder")
    reason = hub.out_of_reach()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=ELSEWHERE))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = reason or str(error).strip().splitlines()[0]
        text = f"neither a folder nor a model the Hub would give: {reason}"
        raise refuse(path, text, hub.hint(path, "model")) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model that this runtime can train. Raises ConfigError for anything else."""
    file = folder / "config.json"
    if not file.is_file():
        raise refuse(folder, "this folder holds no config.json", "give a Hugging Face model folder or a Hub id")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise refuse(file, f"not JSON: {error}") from error
    if not isinstance(config, dict):
        raise refuse(file, "not a JSON object")
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        known = ", ".join(f"{key} ({name})" for key, name in SUPPORTED.items())
        raise refuse(file, f"model_type {kind!r} is not supported", f"supported: {known}")
    if "auto_map" in config:
        hint = "remove `auto_map` if the weights are those of the architecture itself"
        raise refuse(file, "the checkpoint asks for its own code (auto_map), which is never run", hint)
    packed = config.get("quantization_config")
    if packed and not is_readable(packed):
        raise refuse(file, "weights quantised in this way can't be read", "take the model's unquantised checkpoint")
    if config.get("use_bidirectional_attention"):
        raise refuse(file, "bidirectional attention is no causal language model")
    return config


def weight_files(folder: RunPath) -> tuple[RunPath, ...]:
    """The safetensors files of a model, sorted. Raises ConfigError where there are none, or not all of the index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            text = (
                f"the index names {missing[0]}, which is not there ({len(missing)} of {len(names)} files are missing)"
            )
            raise refuse(index, text, BRING_WEIGHTS)
        return tuple(folder / name for name in names)
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    pickled = [file.name for pattern in PICKLED for file in folder.glob(pattern)]
    if pickled:
        hint = "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors"
        raise refuse(folder, f"only pickled weights ({pickled[0]}), which can run code when read: refused", hint)
    raise refuse(folder, "the folder has a config.json but no model.safetensors", BRING_WEIGHTS)


def own_part(parameter: Tensor, name: str, cut: TensorCut) -> tuple[Tensor, tuple[slice, ...]]:
    """A parameter's local storage, and which part of the whole tensor it holds."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    inner = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    return shard_of(parameter), cut.place(name, inner)


def whole_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter before anything was cut, by its name; of all stages."""
    stage = stage_of(network)
    if stage is not None:
        return dict(stage.shapes)
    cut = cut_of(network)
    return {name: cut.shape(name, tuple(parameter.shape)) for name, parameter in network.named_parameters()}


def read_into(network: nn.Module, folder: RunPath, head: Head) -> tuple[str, ...]:
    """Fill the parameters (of a shard: its part) from the safetensors of `folder`, cast, a bucket at a time.

    Returns the names that the checkpoint did not have: at most the value or score head. Raises ConfigError where a
    tensor is missing, unknown, or of another shape.
    """
    targets, shapes = (
        local_parts(network) | fixed_parts(network),
        {**whole_shapes(network), **fixed_shapes(network.config)},
    )
    tied = "lm_head.weight" not in shapes
    left = set(targets)
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        files: dict[str, RunPath] = {}
        for file in weight_files(folder):
            try:
                source = stack.enter_context(open_tensors(file))
            except UnreadableTensors as error:
                raise refuse(file, f"the weights can't be read: {error.__cause__}", "is the file whole?") from error
            slices |= {stored: source.get_slice(stored) for stored in source.keys()}  # noqa: SIM118 (no mapping)
            files |= dict.fromkeys(source.keys(), file)
        for stored, view in unpacked(slices).items():
            name, file = parameter_name(stored, head, tied), files.get(stored, folder)
            if name is None or beyond_the_model(network.config, name):
                continue
            if name not in shapes:
                raise refuse(file, f"tensor {stored!r} has no place in {type(network).__name__}")
            if name not in targets:
                continue  # of another stage
            shape = tuple(view.get_shape())
            if shape != shapes[name]:
                raise refuse(file, f"tensor {stored!r} has shape {shape}, the config asks for {shapes[name]}")
            read_part(view, targets[name])
            left.discard(name)
    missing = sorted(left - {HEAD})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise refuse(folder, f"the checkpoint lacks {missing[0]!r}{more}")
    return tuple(sorted(left))


def weight_specs(network: nn.Module, dtype: torch.dtype | None = None) -> tuple[WeightSpec, ...]:
    """The specs of what `full_tensors` gives, without the tensors."""
    kept = next(network.parameters()).dtype
    return tuple(WeightSpec(name, shape, dtype or kept) for name, shape in whole_shapes(network).items())


def local_parts(
    network: nn.Module,
    tensors: Mapping[str, Tensor] | None = None,
    within: Mapping[str, Box] | None = None,
) -> dict[str, WeightPart]:
    """The part of every parameter that lies here, as it is, by its Hugging Face name; of sharded ones perhaps empty.

    tensors: such as lie like the parameters of these names (masters, moments), instead of them. within: where in what
    lies here of a parameter each of them begins, None: with it.
    """
    parts, cut = {}, cut_of(network)
    for name, parameter in network.named_parameters():
        local, part = own_part(parameter, name, cut)
        values, start = local if tensors is None else tensors[name], tuple(one.start for one in part)
        if within is not None:
            start = tuple(a + b for a, b in zip(start, within[name].start, strict=True))
        parts[name] = WeightPart(name, Box(start, tuple(values.shape)), values)
    return parts


def whole(weights: Weights) -> Parts:
    """Weights as parts that are whole."""
    for name, tensor in weights:
        yield WeightPart(name, Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor.detach())


@torch.no_grad()
def take_weights(
    network: nn.Module,
    parts: Parts,
    targets: Mapping[str, WeightPart] | None = None,
    change: Callable[[Tensor, Tensor], object] | None = None,
) -> None:
    """Change every parameter (of a shard: its part; or what `targets` has in its place, all of the same boxes) by the
    parts of its name that come: change(own, new); None: they are copied, if they don't come right there. Raises
    ValueError where a part has no place in the network, and where parts are missing or came twice; those before have
    been taken."""
    targets = local_parts(network) if targets is None else targets
    shapes: dict[str, tuple[int, ...]] = {}  # of all weights, once some part is of others than those here
    left = {name: own.box.numel for name, own in targets.items()}
    if change is None and isinstance(parts, Arriving):
        parts.land_in(targets)
    for name, box, values in parts:
        here = targets.get(name)
        common = overlap(here.box, box) if here is not None and len(here.box.shape) == len(box.shape) else None
        if common is None or common.in_second:
            shapes = shapes or whole_shapes(network)
            _check_inside(name, box, shapes)
        if here is not None and common is not None:
            own, new = here.values[common.in_first], values[common.in_second]
            if change is not None:
                change(own, new)
            elif own.data_ptr() != new.data_ptr():  # else it came right there
                own.copy_(new)
            left[name] -= common.box.numel
    if wrong := sorted(name for name, numel in left.items() if numel):
        raise ValueError(f"weights are missing, or came twice: {wrong[:3]}")


def _check_inside(name: str, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError for a part that has no place among weights of these shapes."""
    if name not in shapes:
        raise ValueError(f"weight {name!r} is unknown")
    whole = Box((0,) * len(shapes[name]), shapes[name])
    inside = overlap(box, whole) if len(box.shape) == len(whole.shape) else None
    if inside is None or inside.in_first:
        raise ValueError(f"weight {name!r} is {box.shape} at {box.start}, not in {whole.shape}")


def full_tensors(network: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, by its Hugging Face name and in a fixed order, cast to `dtype` (None: as it is).

    Collective where the parameters are sharded or cut: every rank has to go through it to the end.
    """
    parameters, cut, stage = dict(network.named_parameters()), cut_of(network), stage_of(network)
    kept = next(iter(parameters.values())).dtype
    for name in whole_shapes(network):
        tensor = None
        if name in parameters:
            parameter = parameters[name]
            piece = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            tensor = cut.whole(name, piece.detach())
            tensor = tensor if dtype is None else tensor.to(dtype)
        if stage is not None:
            tensor = stage.everywhere(name, tensor, dtype or kept)
        assert tensor is not None, "only stages lack parameters"
        yield name, tensor
