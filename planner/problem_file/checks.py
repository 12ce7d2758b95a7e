"""Mistakes of a problem file, each with its path in the file and a hint. Builds nothing."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import Problem, Where, suggest
from realgraph.planner.plan.events import Dependency, EventGraph, empty_circuit, show_circuit
from realgraph.planner.problem_file.spec import (
    PROBLEM_FORMAT,
    CallSpec,
    EdgeSpec,
    OptionSpec,
    ProblemFile,
    ReallocationSpec,
    TieSpec,
)

LISTS: dict[str, type[Struct]] = {
    "calls": CallSpec,
    "edges": EdgeSpec,
    "reallocations": ReallocationSpec,
    "ties": TieSpec,
}
_UNKNOWN = re.compile(r"unknown field `(.*?)`")

Wrong = tuple[str, str, str]  # path, text, hint


# --- what msgspec refuses ---------------------------------------------------------------------------------------------


def refusals(text: str | bytes, error: msgspec.ValidationError, file: str) -> list[Problem]:
    """All entries of the wrong form, looked at one by one: msgspec stops at the first and names no index.

    error: what it said of the whole file; it may have said so before it met what is no JSON at all.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as broken:
        return [no_json(broken, file)]
    problems: list[Problem] = []
    for name, kind in LISTS.items() if isinstance(raw, dict) else ():
        entries = raw.get(name)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            problems += _entry(entry, kind, (f"$.{name}[{i}]", file))
    if not problems:
        problems.append(_refusal(error, "$", (file, ProblemFile)))
    return problems


def no_json(error: Exception, file: str) -> Problem:
    """The problem of a file that can't be decoded."""
    return Problem(Where(file), f"this is no JSON: {error}", "see docs/planning_problem.md", "problem_json")


def _entry(entry: object, kind: type[Struct], place: tuple[str, str]) -> list[Problem]:
    path, file = place
    problems: list[Problem] = []
    if kind is CallSpec and isinstance(entry, dict) and isinstance(entry.get("options"), list):
        for i, option in enumerate(entry["options"]):
            problems += _entry(option, OptionSpec, (f"{path}.options[{i}]", file))
    if not problems:
        try:
            msgspec.convert(entry, kind)
        except msgspec.ValidationError as error:
            problems.append(_refusal(error, path, (file, kind)))
    return problems


def _refusal(error: msgspec.ValidationError, base: str, about: tuple[str, type[Struct]]) -> Problem:
    """msgspec ends its message with " - at `$.mesh[1]`": that path, from `base`."""
    file, kind = about
    text, _, place = str(error).partition(" - at `")
    path = base + place.rstrip("`").removeprefix("$")
    unknown = _UNKNOWN.search(text)
    hint = suggest(unknown.group(1), kind.__struct_fields__) if unknown else "see docs/planning_problem.md"
    return Problem(Where(file, path=path), text[:1].lower() + text[1:], hint, "problem_json")


# --- what has the right form but makes no sense -----------------------------------------------------------------------


def problems_of(spec: ProblemFile, file: str) -> list[Problem]:
    """All mistakes beyond form."""
    problems = [*_sizes(spec), *_calls(spec), *_links(spec)]
    if not problems:
        problems += _circuits(spec)
    return [Problem(Where(file, path=path), text, hint, "problem") for path, text, hint in problems]


def n_nodes(spec: ProblemFile) -> int:
    """Nodes of the cluster; the last one may have fewer devices."""
    return -(-spec.devices // (spec.devices_per_node or spec.devices))


def _sizes(spec: ProblemFile) -> Iterator[Wrong]:
    if spec.format != PROBLEM_FORMAT:
        text = f"this file has format {spec.format}; this version reads format {PROBLEM_FORMAT}"
        yield "$.format", text, "write the file for this format: docs/planning_problem.md"
    for name, given, wanted, of in (
        ("memory", spec.memory, spec.devices, "devices"),
        ("host_memory", spec.host_memory, n_nodes(spec), "nodes"),
    ):
        if isinstance(given, tuple) and len(given) != wanted:
            yield f"$.{name}", f"{len(given)} numbers for {wanted} {of}", "one number stands for all"


def _calls(spec: ProblemFile) -> Iterator[Wrong]:
    seen: set[str] = set()
    for i, call in enumerate(spec.calls):
        if call.name in seen:
            yield f"$.calls[{i}].name", f"two calls are named {call.name!r}", "rename one of them"
        seen.add(call.name)
        for j, option in enumerate(call.options):
            for field, text, hint in _option(spec, option):
                yield f"$.calls[{i}].options[{j}]{field}", text, hint


def _option(spec: ProblemFile, option: OptionSpec) -> Iterator[Wrong]:
    if (option.mesh is None) == (not option.meshes):
        yield "", "an option has either `mesh` or `meshes`", '"mesh": [first device, number of devices]'
        return
    meshes = option.meshes or (option.mesh,)
    sizes = {mesh[1] for mesh in meshes if mesh}
    for first, size in filter(None, meshes):
        if first + size > spec.devices:
            text = f"devices {first} to {first + size - 1} are not all of the {spec.devices}, 0 to {spec.devices - 1}"
            yield ".mesh" if option.mesh else ".meshes", text, "a mesh is [first device, number of devices]"
    if len(sizes) > 1:
        yield ".meshes", f"these meshes have {_listed(sizes)} devices", "one option per size: its numbers are per size"
    if len(set(meshes)) < len(meshes):
        yield ".meshes", "a mesh stands twice", "leave one out"
    if has_ranks(option) and len(sizes) == 1:
        ranks = (option.dp or 1) * (option.tp or 1) * (option.pp or 1) * option.cp
        if {ranks} != sizes:
            yield "", f"dp x tp x pp x cp is {ranks}, the mesh has {_listed(sizes)} devices", "every device is one rank"
    if option.latency and option.latency < option.seconds:
        yield ".latency", f"{option.latency} is below the option's {option.seconds} seconds", "leave it out: the same"
    if option.shared > option.active:
        yield ".shared", f"{option.shared:.0f} is more than `active`, {option.active:.0f}", "it is a part of `active`"


def has_ranks(option: OptionSpec) -> bool:
    """True where the option says over how many ranks the weights are cut."""
    return option.dp is not None or option.tp is not None or option.pp is not None


def _listed(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


def _links(spec: ProblemFile) -> Iterator[Wrong]:
    """Edges, reallocations and ties name calls that are there and fit them."""
    calls = {call.name: call for call in spec.calls}
    for i, edge in enumerate(spec.edges):
        yield from _known(calls, (edge.source, edge.target), f"$.edges[{i}]")
    targets: set[str] = set()
    for i, entry in enumerate(spec.reallocations):
        path = f"$.reallocations[{i}]"
        unknown = list(_known(calls, (entry.source, entry.target), path))
        yield from unknown
        if not unknown:
            yield from _reallocation(entry, calls, path)
        if entry.target in targets:
            yield f"{path}.target", f"{entry.target!r} gets weights twice", "one reallocation per call"
        targets.add(entry.target)
    for i, tie in enumerate(spec.ties):
        path = f"$.ties[{i}].calls"
        for j, name in enumerate(tie.calls):
            if name not in calls:
                yield f"{path}[{j}]", f"no call is named {name!r}", suggest(name, calls)
        if len(set(tie.calls)) < max(2, len(tie.calls)):
            yield path, "a tie is of two or more different calls", "leave it out"


def _known(calls: Mapping[str, CallSpec], ends: Sequence[str], path: str) -> Iterator[Wrong]:
    for field, name in zip(("source", "target"), ends, strict=True):
        if name not in calls:
            yield f"{path}.{field}", f"no call is named {name!r}", suggest(name, calls)


def _reallocation(entry: ReallocationSpec, calls: Mapping[str, CallSpec], path: str) -> Iterator[Wrong]:
    source, target = calls[entry.source], calls[entry.target]
    if not source.trains:
        yield f"{path}.source", f"{entry.source!r} does not train", 'its call needs "trains": true'
    if target.trains:
        yield f"{path}.target", f"{entry.target!r} trains: it has the newest weights", "a plain edge orders two calls"
    if (source.role or source.name) != (target.role or target.name):
        yield path, f"{entry.source!r} and {entry.target!r} are of different roles", "give both calls the same `role`"
    rows, columns = len(source.options), len(target.options)
    yield from _in_place(entry, (rows, columns), path)
    numbers = sum(isinstance(row, float) for row in entry.seconds)
    if numbers == len(entry.seconds):
        if numbers != columns:
            text = f"{numbers} numbers for the {columns} options of {entry.target!r}"
            yield f"{path}.seconds", text, "one number per option of the target"
    elif numbers:
        yield f"{path}.seconds", "numbers stand beside rows", "a row per option of the source, or numbers alone"
    elif len(entry.seconds) != rows:
        text = f"{len(entry.seconds)} rows for the {rows} options of {entry.source!r}"
        yield f"{path}.seconds", text, "one row per option of the source"
    else:
        for i, row in enumerate(entry.seconds):
            if isinstance(row, tuple) and len(row) != columns:
                text = f"{len(row)} numbers for the {columns} options of {entry.target!r}"
                yield f"{path}.seconds[{i}]", text, "one number per option of the target"


def _in_place(entry: ReallocationSpec, size: tuple[int, int], path: str) -> Iterator[Wrong]:
    rows, columns = size
    if isinstance(entry.in_place, bool):
        return
    if len(entry.in_place) != columns:
        text = f"{len(entry.in_place)} lists for the {columns} options of {entry.target!r}"
        yield f"{path}.in_place", text, "one list per option of the target"
    for i, numbers in enumerate(entry.in_place):
        if max(numbers, default=0) >= rows:
            text = f"{max(numbers)} is none of the {rows} options of {entry.source!r}, 0 to {rows - 1}"
            yield f"{path}.in_place[{i}]", text, "options are counted from 0"


def _circuits(spec: ProblemFile) -> Iterator[Wrong]:
    """A circuit whose distances sum to 0 would wait for itself."""
    links = [(edge.source, edge.target, edge.distance) for edge in spec.edges]
    links += [(entry.source, entry.target, entry.distance) for entry in spec.reallocations]
    waits = tuple(Dependency(*link) for link in links)
    circuit = empty_circuit(EventGraph({call.name: 1.0 for call in spec.calls}, waits))
    if circuit is not None:
        text = f"{show_circuit(circuit)} waits for itself in one step"
        yield "$.edges", text, "one of these edges has a distance of 1 or more"
