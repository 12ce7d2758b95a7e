"""Checks of a local model folder before anything heavy starts: readable, safe to load. No network, no torch."""

from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from realgraph.graphs.errors import Problem, Where
from realgraph.graphs.spec import ModelRole
from realgraph.graphs.yaml.files import read_file
from realgraph.runtime.models.heads import ALIASES, HEAD, without_head

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BRING = "bring all of the model's .safetensors files there: hf download NAME --local-dir FOLDER"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file


def model_problems(role: ModelRole, folder: Path, where: Where, weights: bool = True) -> list[Problem]:
    """Problems of a role's model folder; its shape is the planner's matter. weights: whether they are needed too."""
    try:
        config = msgspec.json.decode(read_file(folder / "config.json"))
    except OSError as error:
        text = f"{folder} has no readable config.json: {error.strerror or error}"
        return [Problem(where, text, "expected a folder as `save_pretrained` writes it", "model")]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return [Problem(where, f"{folder / 'config.json'} is not JSON: {error}", "", "model")]
    if not isinstance(config, dict):
        return [Problem(where, f"{folder / 'config.json'} is not a JSON object", "", "model")]
    problems = []
    if "auto_map" in config:
        text = f"{folder} brings its own Python code (auto_map in config.json), which realgraph doesn't run"
        hint = "use a model whose architecture transformers has itself"
        problems.append(Problem(where, text, hint, "trust_remote_code"))
    return [*problems, *(_weight_problems(role, folder, where) if weights else ())]


def _weight_problems(role: ModelRole, folder: Path, where: Where) -> list[Problem]:
    names = sorted(file.name for file in folder.iterdir())
    if INDEX in names or WHOLE in names:
        try:
            files = _weight_files(folder)
        except ValueError as error:
            return [Problem(where, str(error), BRING, "model")]
        return [] if role.head == "lm" else _head_problems(role, folder, files, where)
    if any(name.endswith(".safetensors") for name in names):
        text = f"{folder} has .safetensors files, but neither {WHOLE} nor {INDEX}, which names a model's shards"
        return [Problem(where, text, BRING, "model")]
    pickled = [name for name in names if name.endswith(PICKLED)]
    if not pickled:
        text = f"{folder} has no weights"
        return [Problem(where, text, "expected one or more .safetensors files", "model")]
    text = f"{folder} has only pickled weights ({pickled[0]}), which can run code when they are loaded"
    hint = (
        "convert them once, on an isolated machine: AutoModelForCausalLM.from_pretrained(FOLDER)"
        ".save_pretrained(FOLDER, safe_serialization=True)"
    )
    return [Problem(where, text, hint, "pickled_weights")]


def _weight_files(folder: Path) -> list[Path]:
    """The files that the weights are read from. Raises ValueError that names the first that is missing or damaged."""
    files = [folder / WHOLE]
    if (folder / INDEX).is_file():
        try:
            shards = msgspec.json.decode(read_file(folder / INDEX), type=_Index).weight_map
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{folder / INDEX} is no index of weights: {error}") from error
        files = [folder / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        of_all = f" ({len(missing)} of {len(files)} files are missing)" if len(files) > 1 else ""
        raise ValueError(f"{folder} lacks {missing[0]}, which {INDEX} names{of_all}")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                """Its header fits its length."""
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is cut short, or no safetensors file: {error}") from error
    return files


def _head_problems(role: ModelRole, folder: Path, files: list[Path], where: Where) -> list[Problem]:
    numbers, learns = _head_numbers(files), role.trainable or role.ema_rate or role.init
    if numbers == 1 or (numbers == 0 and learns):
        return []
    if numbers == 0:
        lack, hint = without_head(role.head)
        text = f"the weights in {folder} {lack}"
    else:
        text = f"the head of the weights in {folder} gives {numbers} numbers, and a {role.head} head gives one"
        hint = "take a model that was trained with num_labels=1; a classifier's labels are no score"
    return [Problem(where, text, hint, "model")]


def _head_numbers(files: list[Path]) -> int:
    """The outputs of the value or score head in the files; 0 where they have none."""
    for file in files:
        with safe_open(file, framework="numpy") as source:
            for name in {HEAD, *ALIASES}.intersection(source.keys()):
                return int(next(iter(source.get_slice(name).get_shape()), 1))
    return 0
