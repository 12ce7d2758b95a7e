"""A plan as JSON that people edit: exact both ways, and every mistake is named by its path in the file."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.graphs.yaml.document import child
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import PLAN_FORMAT, Allocation, Hashes, Plan, Turn

Value = TypeVar("Value")
HINT = "make the plan again with `realgraph plan --out`"


def plan_to_json(plan: Plan) -> str:
    """Indented, with a newline at the end; floats in their shortest exact form."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"


def plan_from_json(text: str, file: str = "") -> Plan:
    """The inverse of `plan_to_json`. Raises ConfigError with all the problems found; semantics: see `validate`."""
    try:
        raw = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0)
        problem = Problem(Where(file, line), f"this is no JSON: {getattr(error, 'msg', error)}", HINT, "plan_json")
        raise ConfigError([problem]) from error
    if not isinstance(raw, dict):
        raise ConfigError([Problem(Where(file), "a plan is a JSON object", HINT, "plan_json")])
    if raw.get("format", PLAN_FORMAT) != PLAN_FORMAT:
        text = f"this plan has format {raw['format']}; this version reads format {PLAN_FORMAT}"
        raise ConfigError([Problem(Where(file, path="$.format"), text, HINT, "plan_format")])
    problems = [*_unknown_keys(raw, file), *_not_finite(raw, "$", file)]
    _each(raw, "allocations", lambda value: msgspec.convert(value, Allocation), (file, problems))
    _each(raw, "orders", lambda value: msgspec.convert(value, tuple[Turn, ...]), (file, problems))
    if not problems:
        try:
            return msgspec.convert(raw, Plan, str_keys=True)
        except msgspec.ValidationError as error:
            problems.append(_problem(error, "$", file))
    raise ConfigError(problems)


def _no_number(name: str) -> float:
    """NaN and Infinity, which Python reads though JSON has none."""
    raise ValueError(f"{name} is no number of JSON")


def _not_finite(value: object, path: str, file: str) -> Iterator[Problem]:
    """Numbers too large for a float, such as 1e999."""
    if isinstance(value, float) and not math.isfinite(value):
        yield Problem(Where(file, path=path), "expected a finite number", "", "plan_json")
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(item, child(path, key), file)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that stands twice would lose one of its values."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name!r} stands twice in one object")
        fields[name] = value
    return fields


def _each(raw: Mapping[str, Any], part: str, convert: Callable[[Any], Value], found: tuple[str, list[Problem]]) -> None:
    """Convert every entry of a mapping by itself, so that an error can name the entry."""
    file, problems = found
    entries = raw.get(part)
    if not isinstance(entries, dict):
        return  # the conversion of the whole says so
    for name, value in entries.items():
        try:
            convert(value)
        except msgspec.ValidationError as error:
            problems.append(_problem(error, f"$.{part}.{name}", file))


def _problem(error: msgspec.ValidationError, base: str, file: str) -> Problem:
    """msgspec ends its message with " - at `$.layout.tp`": that path, from `base`."""
    text, _, place = str(error).partition(" - at `")
    path = base + place.rstrip("`").removeprefix("$") if place else base
    return Problem(Where(file, path=path), text[:1].lower() + text[1:], "", "plan_json")


def _unknown_keys(raw: Mapping[str, Any], file: str) -> list[Problem]:
    """Names that no field has, with the closest spelling: a mistyped field must not fall back to its default."""
    problems = list(_strangers(raw, Plan, ("$", file)))
    problems += _strangers(raw.get("hashes"), Hashes, ("$.hashes", file))
    allocations, orders = raw.get("allocations"), raw.get("orders")
    for name, allocation in allocations.items() if isinstance(allocations, dict) else ():
        place = f"$.allocations.{name}"
        problems += _strangers(allocation, Allocation, (place, file))
        layout = allocation.get("layout") if isinstance(allocation, dict) else None
        problems += _strangers(layout, Layout, (f"{place}.layout", file))
        mesh = layout.get("mesh") if isinstance(layout, dict) else None
        problems += _strangers(mesh, DeviceMesh, (f"{place}.layout.mesh", file))
    for device, turns in orders.items() if isinstance(orders, dict) else ():
        for i, turn in enumerate(turns if isinstance(turns, list) else ()):
            problems += _strangers(turn, Turn, (f"$.orders.{device}[{i}]", file))
    return problems


def _strangers(value: object, kind: type[msgspec.Struct], place: tuple[str, str]) -> list[Problem]:
    if not isinstance(value, dict):
        return []
    path, file = place
    known = kind.__struct_fields__
    return [
        Problem(Where(file, path=f"{path}.{name}"), f"unknown field {name!r}", suggest(str(name), known), "plan_json")
        for name in value
        if name not in known
    ]
