"""`realgraph init`: a commented run file for a graph, to start from. It passes `realgraph check` as it is."""

import json
import re
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.keys import MASK, TOKENS
from realgraph.graphs.spec import Function, Generate, GraphSpec, Train
from realgraph.graphs.yaml.document import COMMAND_LINE, Document, Tree
from realgraph.graphs.yaml.files import read_text
from realgraph.graphs.yaml.load import find_graph, load_graph
from realgraph.graphs.yaml.schema import defaults_of
from realgraph.reference.json_schema import run_schema, schema_text
from realgraph.run_file.resolved import inline
from realgraph.run_file.run_spec import RunSpec
from realgraph.screen.files import write
from realgraph.screen.output import say

SCHEMA = "realgraph.schema.json"
MODEL = "Qwen/Qwen3-0.6B"
DATA, SUBSET = "openai/gsm8k", "main"
_COLUMNS = {"prompt": "question", "answer": "answer"}  # of DATA
EXACT, NUMBER = "exact_match", "last_number"  # DATA's answers are solutions that end in a number: none matches exactly


def init_command(graph: str, out: Path | None) -> None:
    """Write the run file to `out`, or print it. Raises ConfigError; an existing file is never overwritten."""
    if out is not None and out.exists():
        raise ConfigError([Problem(Where(str(out)), "exists already", "give another file by --out", "output")])
    if out is None:
        say(run_template(graph, Path.cwd()), end="")
        return
    text = run_template(graph, Path.cwd(), SCHEMA)
    write_schema(out.parent / SCHEMA)
    write(out, text)
    say(f"wrote {out}, and beside it {SCHEMA}, by which editors complete it; next: realgraph check {out}")


def write_schema(file: Path) -> None:
    """The JSON Schema of run files, beside them. Raises ConfigError where something else has its name."""
    text = schema_text(run_schema())
    if file.exists():
        try:
            ours = json.loads(read_text(file)).get("title") == json.loads(text)["title"]
        except (OSError, ValueError, AttributeError):
            ours = False
        if not ours:
            hint = "rename it, or print the run file: realgraph init > FILE"
            raise ConfigError(
                [Problem(Where(str(file)), "exists already, and is not a schema of realgraph", hint, "output")]
            )
    write(file, text)


def run_template(graph: str, folder: Path, schema: str = "") -> str:
    """The text of a run file for a library graph or a graph file. Raises ConfigError.

    schema: the file, relative to the run file, by which editors complete it; none where it is empty.
    """
    file = find_graph(graph, folder, Where(COMMAND_LINE, 0, "$"))
    spec, resolved = load_graph(file, Document({}), defaults_of(RunSpec))
    source = file.read_text(encoding="utf-8").splitlines()
    marks = resolved.document.marks
    notes = {name: _comment(source[marks[f"$.params.{name}"].line - 1]) for name in spec.params}
    return (
        "\n".join(
            [
                *([f"# yaml-language-server: $schema={schema}"] if schema else []),
                *_head(graph, spec),
                *_models(spec),
                *_params(spec.params, notes),
                *_calls(spec),
                *_data(spec),
                *_rest(spec),
            ]
        )
        + "\n"
    )


def _comment(line: str) -> str:
    comment = re.search(r"\s#\s*(.*)$", line)
    return comment.group(1) if comment else ""


def _line(text: str, note: str = "") -> str:
    return f"{text:<41} # {note}" if note else text


def _head(graph: str, spec: GraphSpec) -> list[str]:
    trains = any(isinstance(call, Train) for call in spec.calls.values())
    return [
        f"# {spec.description or spec.name}.",
        "#   realgraph check FILE    every mistake, with its line; nothing heavy is loaded",
        "#   realgraph plan FILE     what runs where, and how long a step takes",
        f"#   realgraph run FILE      {'train' if trains else 'generate'}",
        f"# Any field of the graph can be changed here by its path; `realgraph graph {graph}` shows its calls.",
        _line(f"graph: {graph}"),
        _line(f"# name: my-{spec.name}", "of the run; default: the graph's name"),
    ]


def _models(spec: GraphSpec) -> list[str]:
    lines = ["", "models:"]
    for name, role in spec.models.items():
        if role.init is None and role.path is None and role.when:
            lines.append(f"  {name}:")
            lines.append(_line(f"    path: {MODEL}", "a folder, relative to this file, or a Hub id"))
            lines.append(_line(f"    # dtype: {role.dtype}", "bfloat16 on GPUs"))
    return lines if len(lines) > 2 else ["", "# models: {}"]


def _params(params: dict[str, Tree], notes: dict[str, str]) -> list[str]:
    if not params:
        return []
    return [
        "",
        "params:",
        *(_param(name, value, notes.get(name, "")) for name, value in params.items()),
    ]


def _param(name: str, value: Tree, note: str) -> str:
    return _line(f"  {name}: {NUMBER}", note) if value == EXACT else _line(f"  # {name}: {inline(value)}", note)


def _calls(spec: GraphSpec) -> list[str]:
    """Scoring that fits DATA, where no parameter chooses it."""
    if EXACT in spec.params.values():
        return []
    lines = [
        _line(f"  {name}: {{fn: {NUMBER}}}", "the answer's last number; a function of your own: my_rewards:score")
        for name, call in spec.calls.items()
        if isinstance(call, Function) and call.fn == EXACT
    ]
    return ["", "calls:", *lines] if lines else []


def _data(spec: GraphSpec) -> list[str]:
    names = [name for name in spec.inputs if name not in (TOKENS, MASK)]
    columns = {name: _COLUMNS.get(name, name) for name in names}
    if TOKENS in spec.inputs:
        columns = {"prompt": _COLUMNS["prompt"], "response": _COLUMNS["answer"]} | columns
    return [
        "",
        "data:",
        _line(f"  path: {DATA}", "a JSONL or parquet file, a folder or glob of them, or a Hub id"),
        _line(f"  subset: {SUBSET}", "of a Hub data set; leave it out for files"),
        _line(f"  columns: {inline(dict(columns))}", "input of the graph: column of the data"),
        _line("  # max_prompt_tokens: 1024", "longer prompts are dropped (too_long: drop)"),
    ]


def _rest(spec: GraphSpec) -> list[str]:
    generates = any(isinstance(call, Generate) for call in spec.calls.values())
    new_tokens = [_line("  max_new_tokens: 256", "of a sample")] if generates else []
    staleness = [_line("# staleness: 4", "rollouts run ahead of training; 0: synchronous")] if generates else []
    evaluation = [
        "# eval:",
        _line("#   every: 20", f"steps; {'on' if generates else 'the loss of'} the data's test split"),
    ]
    evaluation += ["#   n: 1"] if generates else []
    return [
        "",
        "batch:",
        _line("  groups: 64", "data rows a step"),
        *new_tokens,
        "",
        _line("cluster: {nodes: 1, kind: auto}", "this machine; for others see `kind` in docs/reference.md"),
        "steps: 100",
        "seed: 0",
        *staleness,
        *evaluation,
        _line("# checkpoint: {every: 20, keep: 2}", "steps; the last one is always saved"),
    ]
