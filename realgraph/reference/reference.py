"""The reference of the YAML, written from the structs: every field, its type, default and meaning."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from msgspec import inspect

from realgraph.graphs.functions import BUILTINS
from realgraph.graphs.keys import GENERATED, ROUTES, ROUTES_KEY
from realgraph.graphs.maths import Aggregate, Clip, Loss, OffPolicy, Term
from realgraph.graphs.spec import GraphSpec, ModelCall, ModelRole, Optimizer
from realgraph.graphs.steps import AdaptiveKL, Step
from realgraph.graphs.yaml.catalogue import library
from realgraph.graphs.yaml.document import Document
from realgraph.graphs.yaml.library import library_folder
from realgraph.graphs.yaml.load import load_graph
from realgraph.graphs.yaml.schema import default_of, defaults_of, describe, structs, type_of
from realgraph.planner.costs.memory.margin import MemorySpec
from realgraph.planner.inputs.cluster import ClusterSpec, NodesSpec
from realgraph.planner.problem_file.spec import problem_schema
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.reference.field_notes import field_notes, summary
from realgraph.reference.json_schema import graph_schema, run_schema, schema_text
from realgraph.run_file.resolved import inline
from realgraph.run_file.run_spec import RunSpec
from realgraph.runtime.job.job import BatchSpec, CheckpointSpec, DataSpec, EvalSpec, OutputSpec, RuntimeSpec
from realgraph.runtime.job.launch import HostsLaunch, LocalLaunch, RayLaunch, SlurmLaunch
from realgraph.runtime.job.rollout import RolloutSpec
from realgraph.screen import files
from realgraph.screen.files import make_folder, refuse_unwritable, write
from realgraph.screen.output import say

REFERENCE, RUN_SCHEMA, GRAPH_SCHEMA = "reference.md", "realgraph.schema.json", "graph.schema.json"
PROBLEM_SCHEMA = "planning_problem.schema.json"
_RUN = (
    DataSpec,
    BatchSpec,
    RolloutSpec,
    ClusterSpec,
    NodesSpec,
    Pin,
    Constraints,
    MemorySpec,
    EvalSpec,
    CheckpointSpec,
    OutputSpec,
    RuntimeSpec,
    LocalLaunch,
    HostsLaunch,
    SlurmLaunch,
    RayLaunch,
)
SECTIONS: tuple[tuple[str, str, Sequence[type]], ...] = (
    ("The run file", "What a user edits.", (RunSpec, *_RUN)),
    ("The graph file", "An algorithm: calls over models and keys.", (GraphSpec, ModelRole)),
    ("Calls", "`kind` says which one an entry of `calls` is.", (*get_args(ModelCall), Optimizer, Loss)),
    (
        "Advantage steps",
        "Entries of `steps`; the entry's name is its kind where it gives none.",
        (*get_args(Step), AdaptiveKL),
    ),
    ("Loss terms", "Entries of `terms`; the entry's name is its kind where it gives none.", get_args(Term)),
    ("Clips", "Of `policy_gradient`.", get_args(Clip)),
    ("Off-policy corrections", "Of `policy_gradient`.", get_args(OffPolicy)),
    ("Aggregations", "Of a loss.", get_args(Aggregate)),
)

_INTRODUCTION = f"""# YAML reference

Written by `realgraph schema` from the types that the loader uses; do not edit. Editors complete and check the files by
`{RUN_SCHEMA}` (run files) and `{GRAPH_SCHEMA}` (graph files): put this into the first line of a run file:

```yaml
# yaml-language-server: $schema=docs/{RUN_SCHEMA}
```

## How files are read

- A **graph file** is an algorithm, a **run file** is what a user edits. The run file is laid over the graph that it
  names: they share one namespace of `params`, `models`, `calls` and `inputs`. Then come the overrides of the command
  line, from left to right: `realgraph run run.yaml calls.train.lr=1e-5 steps=10`.
- Mappings merge; lists and single values replace. A mapping that names another `kind` than the one below it replaces
  that one. A new entry stands before the one that follows it in the upper file, or at the end:
  `steps: {{overlong: {{start: 900, limit: 1024}}, center: {{}}}}` runs `overlong` before the graph's `center`.
- `null` deletes an entry of a mapping and resets a field to its default: `calls.advantage.steps.scale=null`. Where null
  is a value of the field (its type says so), and in `params` and `args`, it is that value. An empty section changes
  nothing.
- `${{params.lr}}` stands for the value at that path, defaults included; it is read after everything is merged. Only
  plain references: the environment, files and code can't be reached. `\\${{` is a literal `${{`.
- Under `params` only names that the graph declares, at the type of its default; a whole number may stand for a float.
- Where `when` is false, 0, empty or null, the role or call is out, with the calls, steps and terms that need it.
- The YAML is OmegaConf's: `1e-5` is a number, dates are text, a key given twice is an error. `on`, `off`, `yes` and
  `no` are true and false as values: quote them where text is meant.
- Paths of models and data are relative to the run file (on the command line: to the working directory) where something
  is there; otherwise they are Hub ids. Models that bring their own code or only pickled weights are refused.
"""


def schema_command(out_dir: Path) -> None:
    """Write the reference and the schemas, into a new folder where there is none. Raises ConfigError where the folder
    can't be written to."""
    make_folder(out_dir)
    texts = generated_files()
    for name in texts:
        refuse_unwritable(out_dir / name, files.REFERENCE if name == REFERENCE else files.SCHEMA)
    for name, text in texts.items():
        write(out_dir / name, text)
        say(f"wrote {out_dir / name}")


def generated_files() -> dict[str, str]:
    """File name -> its text."""
    schemas = {RUN_SCHEMA: run_schema(), GRAPH_SCHEMA: graph_schema(), PROBLEM_SCHEMA: problem_schema()}
    return {REFERENCE: reference_text(), **{name: schema_text(schema) for name, schema in schemas.items()}}


def reference_text() -> str:
    """The reference as Markdown."""
    parts = [_INTRODUCTION]
    for title, introduction, members in SECTIONS:
        parts.append(f"## {title}\n\n{introduction}\n")
        parts += [_struct_text(member) for member in members]
    parts += [_keys_text(), _functions_text(), _library_text()]
    return "\n".join(parts)


def _struct_text(struct: type) -> str:
    kind = type_of(struct)
    assert isinstance(kind, inspect.StructType)
    lines = [f"### {heading(kind)}", "", summary(struct)]
    if kind.fields:
        lines += ["", "| field | type | default | meaning |", "|---|---|---|---|"]
        notes = field_notes(struct)
        lines += [_row(field, notes.get(field.name, "")) for field in kind.fields]
    return "\n".join(lines) + "\n"


def heading(kind: inspect.StructType) -> str:
    """`kl (loss term)` is found by its kind; sections of files by their struct."""
    return f"{kind.cls.__name__}: `kind: {kind.tag}`" if kind.tag_field else kind.cls.__name__


def _row(field: inspect.Field, note: str) -> str:
    default = "**required**" if field.required else f"`{_default_text(field)}`"
    return f"| `{field.encode_name}` | {_cell(type_text(field.type))} | {_cell(default)} | {_cell(note)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default_text(field: inspect.Field) -> str:
    value = default_of(field)
    for struct in structs(field.type):
        if struct.tag_field and isinstance(value, dict) and value.get(struct.tag_field) == struct.tag:
            return f"{{kind: {struct.tag}}}"
    return "{...}" if isinstance(value, dict) and value else inline(value)


def type_text(kind: inspect.Type) -> str:
    """A type in words, structs linked to their headings."""
    match kind:
        case inspect.UnionType():
            return " or ".join(type_text(member) for member in kind.types)
        case inspect.StructType():
            return f"[{kind.tag if kind.tag_field else kind.cls.__name__}](#{_anchor(heading(kind))})"
        case inspect.DictType():
            inner = "anything" if isinstance(kind.value_type, inspect.AnyType) else type_text(kind.value_type)
            return f"name -> {inner}"
        case inspect.VarTupleType() | inspect.ListType():
            return f"list of {type_text(kind.item_type)}"
        case _:
            return describe(kind)


def _anchor(title: str) -> str:
    """GitHub's anchor of a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def _keys_text() -> str:
    rows = [f"| `{name}` | {key} |" for name, key in {**GENERATED, ROUTES: ROUTES_KEY}.items()]
    notes = f"Token keys have the length of `tokens`. `{ROUTES}` is there for a role with `routing_replay`."
    head = f"## Keys that a generate call writes\n\n{notes}\n\n| key | type |\n|---|---|"
    return "\n".join([head, *rows]) + "\n"


def _functions_text() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in BUILTINS.items()]
    head = "## Built-in functions\n\nNames for `fn` of a function call; `module:function` is the user's own.\n"
    return "\n".join([head, "| name | gives |", "|---|---|", *rows]) + "\n"


def _library_text() -> str:
    return "\n".join(["## Library graphs\n", *_library_rows()])


def _library_rows() -> Iterator[str]:
    for name, description in library().items():
        spec, _ = load_graph(library_folder() / f"{name}.yaml", Document({}), defaults_of(RunSpec))
        params = ", ".join(f"`{key}: {inline(value)}`" for key, value in spec.params.items())
        yield f"### {name}\n\n{description}.\n\nCalls: {', '.join(f'`{call}`' for call in spec.calls)}.\n"
        if params:
            yield f"Parameters: {params}.\n"
