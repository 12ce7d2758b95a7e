"""A model's config.json, from a directory, the Hub's cache or the table of known models. No network."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.planner.inputs.model_spec import ModelSpec, spec_from_config
from realgraph.planner.inputs.shipped import shipped_table

_NUMBERS = re.compile(r"\d+")  # in a name: of the version, and of the size


def load_model_spec(path: str, where: Where, hub_cache: Path | None = None, revision: str | None = None) -> ModelSpec:
    """The spec of the model whose config `load_config` gives. Raises ConfigError at `where` with the way out."""
    return spec_from_config(load_config(path, where, hub_cache, revision), where)


def load_config(
    path: str, where: Where, hub_cache: Path | None = None, revision: str | None = None
) -> Mapping[str, Any]:
    """The config.json of a local directory, of a Hub id in the local cache, or of a known Hub id in the shipped table;
    in that order.

    Raises ConfigError at `where` with the way out. hub_cache: the `hub` folder of the Hugging Face cache.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _read_config(local / "config.json", where)
    snapshot = _cached_config(path, hub_cache, revision) if hub_cache is not None else None
    if snapshot is not None:
        return _read_config(snapshot, where)
    if path in known_models() and revision in (None, "main"):
        return known_models()[path]
    raise ConfigError([_unknown(path, local, where)])


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Hub id -> the fields of its config.json, from the shipped table."""
    table: dict[str, list[dict[str, Any]]] = shipped_table("models")
    return {name: {"model_type": kind, **row} for kind, rows in table.items() for row in rows for name in row["ids"]}


def _unknown(path: str, local: Path, where: Where) -> Problem:
    is_path = local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    if is_path:
        hint = "a model is a directory with a config.json, or a Hub id"
        return Problem(where, f"no directory {path!r}", hint, "model")
    closest = suggest(path, (name for name in known_models() if _may_mean(path, name)))
    download = f"download it first: `hf download {path} --include '*.json'`"
    hint = f"{closest} else {download}" if closest.startswith("did") else download
    text = f"no directory {path!r}, and no model of that name in the Hugging Face cache or the table of known models"
    return Problem(where, text, hint, "model")


def _may_mean(path: str, name: str) -> bool:
    """True where a known model may be the one that is asked for: another version or size is another model."""
    return name.lower().startswith(path.lower()) or _NUMBERS.findall(path) == _NUMBERS.findall(name)


def _read_config(file: Path, where: Where) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "a model is a directory with a Hugging Face config.json"
        raise ConfigError([Problem(where, f"no {file}", hint, "model")]) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Problem(where, f"{file} can't be read: {error}", "", "model")]) from error
    if not isinstance(config, dict):
        raise ConfigError([Problem(where, f"{file} does not hold a JSON object", "", "model")])
    return config


def _cached_config(name: str, hub_cache: Path, revision: str | None) -> Path | None:
    """The snapshot's config.json in the layout of huggingface_hub: models--org--name/{refs,snapshots}."""
    folder = hub_cache / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    if commit is None:
        return None
    file = folder / "snapshots" / commit / "config.json"
    return file if file.is_file() else None
