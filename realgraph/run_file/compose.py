"""Composes run file and overrides to a checked run: what `check`, `plan` and `run` all start with. Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct, structs

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.check.switch import switch_off
from realgraph.graphs.check.warnings import warnings_of
from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import MASK, OF_DATA, TOKENS
from realgraph.graphs.spec import Generate, GraphSpec, Inference, Train
from realgraph.graphs.yaml.document import (
    COMMAND_LINE,
    Document,
    Tree,
    parse_override,
    read_document,
)
from realgraph.graphs.yaml.library import library_names
from realgraph.graphs.yaml.load import (
    SHARED,
    Resolved,
    all_problems,
    decode,
    find_graph,
    format_problems,
    in_its_section,
    lay_over,
    name_problems,
    read_graph,
    resolve,
    shown_name,
    traced,
    user_document,
)
from realgraph.graphs.yaml.schema import check, prepare, type_of
from realgraph.planner.inputs.detect import AUTO
from realgraph.planner.inputs.devices import device_kind
from realgraph.run_file.eval_checks import eval_mistakes
from realgraph.run_file.local_data import LocalData, is_hub_id, probe_data
from realgraph.run_file.local_models import model_problems
from realgraph.run_file.run_spec import RunSpec
from realgraph.run_file.run_warnings import run_warnings, unread_params
from realgraph.run_file.section_checks import section_mistakes
from realgraph.run_file.template_checks import template_mistakes
from realgraph.run_file.user_code import function_problems, functions_folder
from realgraph.runtime.data.row_files import files_at


class Composed(Struct, frozen=True):
    """A run file laid over its graph, decoded; not yet checked by the rules of the language."""

    file: Path  # absolute
    run: RunSpec
    spec: GraphSpec
    resolved: Resolved
    graph: Document  # the lower layer, as it is written

    @property
    def folder(self) -> Path:
        return functions_folder(self.file)

    def where(self, path: str) -> Where:
        """The place of a YAML path, or of its nearest ancestor that a file wrote."""
        return self.resolved.document.where(path)


class Checked(Struct, frozen=True):
    """A run that passed every check that needs no network and no accelerator."""

    graph: Graph
    run: RunSpec
    facts: Facts
    composed: Composed
    warnings: tuple[Problem, ...] = ()  # what is allowed and may not do what it seems to

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run.name or self.graph.name

    @property
    def folder(self) -> Path:
        """The folder that the user's functions are imported from, absolute."""
        return self.composed.folder

    def where(self, path: str) -> Where:
        """The place of a YAML path in the user's files."""
        return self.composed.where(path)


def compose(file: Path, overrides: Sequence[str] = ()) -> Composed:
    """Read, merge, resolve and decode a run file. Raises ConfigError with all problems."""
    return compose_document(read_document(file, shown_name(file)), file, overrides)


def compose_document(document: Document, file: Path, overrides: Sequence[str] = ()) -> Composed:
    """The same from what was read of `file`, which need not exist."""
    composed, problems = _compose(document, file, overrides)
    if problems:
        raise ConfigError(problems)
    return composed


def _compose(document: Document, file: Path, overrides: Sequence[str]) -> tuple[Composed, list[Problem]]:
    """Also the problems that do not stand in the way of further checks. Raises ConfigError for those that do."""
    file = file.absolute()
    user = user_document(document, parse_overrides(overrides))
    graph_file = _graph_file(user, file)
    graph, wrong = read_graph(graph_file)
    merged, misnamed = lay_over(graph, user)
    merged = _with_held_out(merged)
    problems = [*format_problems(user), *wrong, *misnamed]
    try:
        resolved = resolve(RunSpec, merged, graph, {})
    except ConfigError as error:
        located = [in_its_section(problem, merged) for problem in error.problems]
        raise ConfigError(all_problems(problems, located)) from None
    placed, missing = _with_absolute_paths(resolved.document, graph_file, file)
    if wrong:  # what the graph's head lacks can't be decoded
        raise ConfigError(sorted([*problems, *missing]))
    problems += missing
    head = {key: value for key, value in graph.tree.items() if key not in SHARED}
    spec = Document({**head, **{key: placed.tree[key] for key in SHARED}}, placed.marks)
    run, resolved = decode(RunSpec, placed), structs.replace(resolved, document=placed)
    graph_spec = decode(GraphSpec, spec)
    named = graph_spec.name if run.name is None else run.name
    problems += name_problems(named, placed.where("$.name"))
    return Composed(file, run, graph_spec, resolved, graph), sorted(problems)


def _with_held_out(document: Document) -> Document:
    """The held-out data, completed from the training data: how rows are read, and of the same set which."""
    data, evaluation = document.tree.get("data"), document.tree.get("eval")
    held_out = evaluation.get("data") if isinstance(evaluation, dict) else None
    if not isinstance(data, dict) or not isinstance(evaluation, dict) or not isinstance(held_out, dict):
        return document
    keys = _READING if held_out.get("path", data.get("path")) != data.get("path") else ("path", "subset", *_READING)
    taken = {key: data[key] for key in keys if key in data and key not in held_out}
    written = {key: document.marks.get(f"$.data.{key}") for key in taken}
    marks = {f"$.eval.data.{key}": mark for key, mark in written.items() if mark is not None}
    tree = {**document.tree, "eval": {**evaluation, "data": {**taken, **held_out}}}
    return Document(tree, {**document.marks, **marks})


_READING = ("columns", "chat", "system", "template_args", "tools", "max_prompt_tokens", "too_long")


def parse_overrides(overrides: Sequence[str]) -> list[Document]:
    """Each `path=value` as a document. Raises ConfigError with the problems of all of them."""
    documents: list[Document] = []
    problems: list[Problem] = []
    for override in overrides:
        try:
            documents.append(parse_override(override))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return documents


def _graph_file(user: Document, file: Path) -> Path:
    """The graph that the user's run `file` names. Where none is named, the error lists what else is wrong as well."""
    name = user.tree.get("graph")
    where = user.where("$.graph")
    if isinstance(name, str) and "${" not in name:
        graph_file = find_graph(name, Path.cwd() if where.file == COMMAND_LINE else file.parent, where)
        if graph_file.resolve() == file.resolve():
            hint = f"name another file, or one of {', '.join(library_names())}"
            raise ConfigError([Problem(where, "a run file can't be its own graph", hint, "graph")])
        return graph_file
    if name is None and {"calls", "name"} <= user.tree.keys() and "data" not in user.tree:
        text = "this is a graph file: it says how to train, but not on which data"
        hint = f"write a run file that names it: realgraph init --graph {shown_name(file)} --out run.yaml"
        raise ConfigError([Problem(user.where("$"), text, hint, "graph")])
    kind = type_of(RunSpec)
    own = prepare(kind, {key: value for key, value in user.tree.items() if key not in SHARED}, "$", [])
    assert isinstance(own, dict)
    problems = [p for p in check(kind, Document(own, user.marks)) if "'${" not in p.text]
    listing = f"library graphs: {', '.join(library_names())}"
    if isinstance(name, str):
        problems.append(Problem(where, "expected the name of a graph, or a file", listing, "graph"))
    raise ConfigError(structs.replace(p, hint=listing) if p.where.path == "$.graph" else p for p in sorted(problems))


# --- paths ------------------------------------------------------------------------------------------------------------


def _with_absolute_paths(document: Document, graph_file: Path, file: Path) -> tuple[Document, list[Problem]]:
    """Paths of models, data and graph made absolute where they exist, and the directory of the outputs, which need not;
    a problem where they can be no Hub id either."""
    tree = dict(document.tree)
    problems: list[Problem] = []

    def place(section: Tree, path: str, what: str) -> Tree:
        given = section.get("path") if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(given, str):
            return section
        where = document.where(f"{path}.path")
        if not given:
            if what != "model" or section.get("when", True):  # a role that is out has no path, such as `reward_model`
                problems.append(
                    Problem(where, f"no {what} is named", f"such as {_EXAMPLES[what]}, or a folder", "path")
                )
            return section
        base = Path.cwd() if where.file == COMMAND_LINE else file.parent
        if where.file == shown_name(graph_file) and graph_file.is_relative_to(file.parent):
            base = graph_file.parent
        target = base / Path(given).expanduser()
        exists = target.is_dir() or (what != "model" and bool(files_at(str(target))))
        if not exists and not is_hub_id(given):
            hint = f"expected a {what} at {target}, or a Hub id such as {_EXAMPLES[what]}"
            problems.append(Problem(where, f"there is no {what} {given!r}", hint, "path"))
        return {**section, "path": str(target) if exists else given}

    models = document.tree["models"]
    assert isinstance(models, dict)
    tree["models"] = {name: place(role, f"$.models.{name}", "model") for name, role in models.items()}
    tree["data"] = place(tree["data"], "$.data", "data set")
    if isinstance(evaluation := tree.get("eval"), dict):
        tree["eval"] = {**evaluation, "data": place(evaluation.get("data"), "$.eval.data", "data set")}
    rollout = tree.get("rollout")
    if isinstance(rollout, dict) and isinstance(given := rollout.get("python"), str) and "/" in given:
        base = Path.cwd() if document.where("$.rollout.python").file == COMMAND_LINE else file.parent
        tree["rollout"] = {**rollout, "python": str(base / Path(given).expanduser())}
    outputs = tree.get("outputs")
    if isinstance(outputs, dict) and isinstance(given := outputs.get("dir"), str):
        where = document.where("$.outputs.dir")
        if not given:
            problems.append(Problem(where, "no run directory is named", "leave outputs.dir out, or name one", "path"))
        base = Path.cwd() if where.file == COMMAND_LINE else file.parent
        tree["outputs"] = {**outputs, "dir": str(base / Path(given).expanduser())}
    if tree["graph"] not in library_names():
        tree["graph"] = str(graph_file.absolute())
    return Document(tree, document.marks), problems


_EXAMPLES = {"model": "Qwen/Qwen3-0.6B", "data set": "openai/gsm8k"}


# --- checking a run ---------------------------------------------------------------------------------------------------


def check_run(file: Path, overrides: Sequence[str] = (), weights: bool = True) -> Checked:
    """Compose a run file and check it against the rules, its local data and its local models.

    weights: false where the shapes of models are enough. Raises ConfigError with all problems.
    """
    return check_document(read_document(file, shown_name(file)), file, overrides, weights)


def check_document(document: Document, file: Path, overrides: Sequence[str] = (), weights: bool = True) -> Checked:
    """The same from what was read of `file`: a pipe can be read once."""
    return _check(*_compose(document, file, overrides), weights)


def _check(composed: Composed, problems_before: Sequence[Problem], weights: bool = True) -> Checked:
    """Rules, data, models: what needs the composed run. `problems_before` are the problems known so far."""
    problems = [
        *problems_before,
        *_run_problems(composed),
        *_model_folders(composed, weights),
        *_function_problems(composed),
    ]
    path, data = composed.where("$.data.path"), LocalData()
    if path not in [problem.where for problem in problems_before]:
        try:
            source = composed.run.data
            data = probe_data(source.path, source.limit, path, source.split)
        except ConfigError as error:
            problems += error.problems
    facts = facts_of(composed.run, data)
    graph = None
    try:
        graph = compile_graph(composed.spec, composed.where, facts)
    except ConfigError as error:
        problems += [traced(problem, composed.resolved.written) for problem in error.problems]
    else:
        problems += _eval_data_problems(composed, graph)
    if graph is None or problems:
        raise ConfigError(sorted(problems))
    return Checked(graph, composed.run, facts, composed, _warnings(composed, graph, facts))


def _warnings(composed: Composed, graph: Graph, facts: Facts) -> tuple[Problem, ...]:
    resolved = composed.resolved
    of_run = [*run_warnings(composed.run, graph), *unread_params(composed.graph, resolved)]
    warnings = [Problem(composed.where(path), text, hint, "without_effect") for path, text, hint in of_run]
    warnings += warnings_of(composed.spec, composed.where, resolved.document.wrote, facts.steps)
    return tuple(traced(warning, resolved.written) for warning in sorted(warnings))


def _eval_data_problems(composed: Composed, graph: Graph) -> Sequence[Problem]:
    """Held-out data that can't be read, or lack a column that the graph reads."""
    spec = composed.run.eval.data if composed.run.eval is not None else None
    if spec is None or not files_at(spec.path):
        return ()
    try:
        columns = probe_data(spec.path, 1, composed.where("$.eval.data.path"), spec.split).columns
    except ConfigError as error:
        return error.problems
    made = (TOKENS, MASK, *OF_DATA)
    mapped = {key.name: spec.columns.get(key.name, key.name) for key in graph.inputs if key.name not in made}
    return [
        Problem(
            composed.where(f"$.eval.data.columns.{name}"),
            f"the held-out data have no column {column!r} for the input {name!r}",
            suggest(column, columns),
            "eval",
        )
        for name, column in mapped.items()
        if columns is not None and column not in columns
    ]


def facts_of(run: RunSpec, data: LocalData) -> Facts:
    """Facts of a run for the rules. A Hub data set has at least the columns that the user maps."""
    return Facts(
        data_columns=dict(run.data.columns),
        columns=data.columns,
        n_rows=data.n_rows,
        groups=run.batch.groups,
        surplus=run.batch.surplus,
        steps=run.steps,
        staleness=run.staleness,
        max_new_tokens=run.batch.max_new_tokens,
    )


def _model_folders(composed: Composed, weights: bool) -> Iterator[Problem]:
    for name, role in composed.spec.models.items():
        if role.when and role.path is not None and Path(role.path).is_absolute():
            yield from model_problems(role, Path(role.path), composed.where(f"$.models.{name}.path"), weights)


def _function_problems(composed: Composed) -> Iterator[Problem]:
    live, _ = switch_off(composed.spec)
    for problem in function_problems(live.calls, composed.folder, composed.where):
        yield traced(problem, composed.resolved.written)


def _run_problems(composed: Composed) -> Iterator[Problem]:
    """Rules of the run file that are about neither graph nor plan."""
    run, calls = composed.run, composed.spec.calls
    for name in run.allocation:
        if name not in calls:
            yield Problem(
                composed.where(f"$.allocation.{name}"), f"no call {name!r}", suggest(name, calls), "allocation"
            )
    yield from _constrained_calls(composed)
    yield from _device_kinds(composed)
    batch = run.batch
    if batch.expected_new_tokens is not None and batch.expected_new_tokens > batch.max_new_tokens:
        text = f"expected {batch.expected_new_tokens} new tokens, but a sample has at most {batch.max_new_tokens}"
        yield Problem(composed.where("$.batch.expected_new_tokens"), text, "", "batch")
    held_out = [("$.eval.data", run.eval.data)] if run.eval is not None and run.eval.data is not None else []
    for place, data in (("$.data", run.data), *held_out):
        for path, text, hint in template_mistakes(data, place):
            yield Problem(composed.where(path), text, hint, "template")
    if run.eval is not None:
        for path, text, hint in eval_mistakes(run, run.eval, composed.spec):
            yield Problem(composed.where(path), text, hint, "eval")
    for path, text, hint in section_mistakes(run):
        yield Problem(composed.where(path), text, hint, "section")


def _constrained_calls(composed: Composed) -> Iterator[Problem]:
    """Constraints name calls that the run places on devices."""
    live, _ = switch_off(composed.spec)
    placed = [name for name, call in live.calls.items() if isinstance(call, Generate | Inference | Train)]
    given = composed.run.constraints
    named = [(f"$.constraints.share[{i}]", name) for i, names in enumerate(given.share) for name in names]
    named += [(f"$.constraints.forbid.{name}", name) for name in given.forbid]
    for path, name in named:
        if name in placed:
            continue
        what = "is not a call of the graph"
        if name in composed.spec.calls:
            what = "holds no devices" if name in live.calls else "is switched off by its `when`"
        yield Problem(composed.where(path), f"{name!r} {what}", suggest(name, placed), "constraint")


def _device_kinds(composed: Composed) -> Iterator[Problem]:
    """Kinds of devices that the planner's table has."""
    cluster = composed.run.cluster
    kinds = [("$.cluster.kind", cluster.kind)]
    kinds += [(f"$.cluster.more[{i}].kind", more.kind) for i, more in enumerate(cluster.more)]
    for path, kind in kinds:
        if kind == AUTO and path == "$.cluster.kind":
            continue
        try:
            device_kind(kind, composed.where(path))
        except ConfigError as error:
            yield from error.problems
