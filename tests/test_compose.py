"""Run files: laid over graphs, checked against data and models, and printed with the origin of every value."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.compose import check_run, check_text, compose, compose_text
from realgraph.graphs.document import Dumper, parse_document
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.load import library_names
from realgraph.graphs.merge import walk
from realgraph.graphs.schema import type_of
from realgraph.graphs.spec import Function, GraphSpec
from realgraph.init_command import run_template
from realgraph.json_schema import graph_schema, run_schema
from realgraph.local_data import probe_data
from realgraph.open_graph import open_graph
from realgraph.reference import REFERENCE, documented, generated_files, reachable, reference_text
from realgraph.resolved import resolved_text
from realgraph.run_spec import RunSpec

ROOT = Path(__file__).parent.parent
RUN = """\
graph: grpo
models: {actor: {path: model}}
data:
  path: data/train.jsonl
  columns: {prompt: question}
batch: {groups: 4, max_new_tokens: 16}
params:
  group_size: 2
  lr: 2e-6
calls:
  reward: {fn: "my_rewards:score", args: {strict: true}}
steps: 3
"""


def write_model(folder: Path, **config: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (folder / "model.safetensors").write_bytes(b"")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run file, its data and its model."""
    write_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def problems_of(call: Callable[[], object]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        call()
    return list(caught.value.problems)


def refused(place: Path, *overrides: str) -> list[Problem]:
    return problems_of(lambda: check_run(place / "run.yaml", overrides))


# --- what a good run gives --------------------------------------------------------------------------------------------


def test_a_run_is_checked_against_its_local_data(place: Path) -> None:
    checked = check_run(place / "run.yaml")
    assert checked.facts.columns == ("question", "answer")
    assert (checked.facts.n_rows, checked.facts.groups, checked.facts.steps) == (10, 4, 3)
    assert checked.run.data.path == str(place / "data/train.jsonl")
    assert checked.graph.models["actor"].path == str(place / "model")
    assert (checked.graph.samples_per_group, checked.name, checked.folder) == (2, "grpo", place)


def test_another_kind_of_cluster_keeps_its_size(place: Path) -> None:
    file = place / "sized.yaml"
    file.write_text((place / "run.yaml").read_text() + "cluster: {nodes: 2, devices: 4, kind: H100-SXM}\n")
    cluster = compose(file, ["cluster.kind=A100-80"]).run.cluster
    assert (cluster.nodes, cluster.devices, cluster.kind) == (2, 4, "A100-80")


def test_where_knows_the_file_of_every_value(place: Path) -> None:
    composed = compose(place / "run.yaml", ["seed=5"])
    run, graph = str(place / "run.yaml"), "realgraph/graphs/library/grpo.yaml"
    assert composed.where("$.params.lr") == Where(run, 9, "$.params.lr")
    assert composed.where("$.calls.reward.args.strict") == Where(run, 11, "$.calls.reward.args.strict")
    assert composed.where("$.calls.train.minibatches").file == graph
    assert composed.where("$.calls.train.optimizer.eps").file == graph
    assert composed.where("$.seed") == Where("command line", 0, "$.seed")
    assert composed.where("$.runtime.threads") == Where(run, 1, "$.runtime.threads")


def test_a_graph_file_beside_the_run_file_is_found(place: Path) -> None:
    library = ROOT / "graphs/library/grpo.yaml"
    (place / "mine.yaml").write_text(library.read_text().replace("name: grpo", "name: mine"))
    composed = compose(place / "run.yaml")
    (place / "run.yaml").write_text(RUN.replace("graph: grpo", "graph: mine.yaml"))
    other = compose(place / "run.yaml")
    assert (other.spec.name, other.spec.calls) == ("mine", composed.spec.calls)
    assert other.run.graph == str(place / "mine.yaml")


def test_paths_of_the_command_line_are_relative_to_where_it_is_typed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "elsewhere").mkdir()
    write_model(place / "elsewhere" / "model")
    monkeypatch.chdir(place / "elsewhere")
    assert compose(place / "run.yaml").spec.models["actor"].path == str(place / "model")
    composed = compose(place / "run.yaml", ["models.actor.path=model"])
    assert composed.spec.models["actor"].path == str(place / "elsewhere/model")


def test_hub_ids_stay_as_they_are(place: Path) -> None:
    run = check_run(place / "run.yaml", ["models.actor.path=Qwen/Qwen3-0.6B", "data.path=openai/gsm8k"])
    assert (run.graph.models["actor"].path, run.run.data.path) == ("Qwen/Qwen3-0.6B", "openai/gsm8k")
    assert (run.facts.columns, run.facts.n_rows) == (None, None)


def test_text_is_composed_as_the_file_would_be(place: Path) -> None:
    assert compose_text(RUN, place / "run.yaml").run == compose(place / "run.yaml").run
    assert check_text(RUN, place / "run.yaml").graph == check_run(place / "run.yaml").graph


FIELDS: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("steps", st.integers(1, 10**6)),
    ("seed", st.integers(0, 2**31)),
    ("name", st.none() | st.text(max_size=8)),
    ("staleness", st.integers(0, 8)),
    ("params.kl_coef", st.floats(0, 1)),
    ("params.group_size", st.integers(2, 9)),
    ("calls.train.optimizer.betas", st.tuples(st.floats(0, 1), st.floats(0, 1)).map(list)),
    ("calls.train.optimizer.max_grad_norm", st.none() | st.floats(0.1, 9)),
    ("calls.train.loss.aggregate", st.just({"kind": "constant", "length": 8})),
    ("calls.advantage.steps.scale", st.none()),
    ("calls.reward.args", st.dictionaries(st.text(max_size=4), st.text(max_size=9), max_size=2)),
    ("batch.max_running", st.integers(1, 99)),
    ("cluster.kind", st.sampled_from(["cpu", "auto"])),
    ("outputs.trackers", st.lists(st.sampled_from(["wandb", "mlflow"]), max_size=2)),
]
SETTINGS = st.lists(st.sampled_from(FIELDS), unique_by=lambda pair: pair[0], max_size=5).flatmap(
    lambda pairs: st.fixed_dictionaries(dict(pairs))
)


def escaped(value: Any) -> Any:
    from realgraph.graphs.merge import escape

    if isinstance(value, dict):
        return {escape(key): escaped(item) for key, item in value.items()}
    return escape(value) if isinstance(value, str) else value


@given(SETTINGS)
@settings(max_examples=25, deadline=None)
def test_a_value_means_the_same_in_the_file_on_the_command_line_and_in_the_resolved_file(
    values: dict[str, Any],
) -> None:
    file = Path("/nowhere/run.yaml")
    base = yaml.safe_load("graph: grpo\nmodels: {actor: {path: a/b}}\ndata: {path: c/d}")
    nested = json.loads(json.dumps(base))
    overrides = []
    for name, value in values.items():
        *above, last = name.split(".")
        inner = nested
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = escaped(value)
        text = yaml.dump(escaped(value), Dumper=Dumper, default_flow_style=True, width=10**6).removesuffix("...\n")
        overrides.append(f"{name}={text}")
    in_file = compose_text(yaml.dump(nested, Dumper=Dumper), file)
    on_line = compose_text(yaml.dump(base), file, overrides)
    again = compose_text(resolved_text(on_line), file)
    assert in_file.run == on_line.run == again.run
    assert in_file.spec == on_line.spec == again.spec


# --- what is refused, and where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "path", "text", "hint"),
    [
        ("graph: grpo", "graph: gropo", "$.graph", "'gropo' is neither a library graph nor the file", "mean 'grpo'?"),
        ("graph: grpo", "grpah: grpo", "$.grpah", "unknown key 'grpah'", "did you mean 'graph'?"),
        ("graph: grpo", "graph: [grpo]", "$.graph", "expected text, got a list", "library graphs: generate, grpo"),
        ("graph: grpo", "graph: ${name}", "$.graph", "expected the name of a graph, or a file", "library graphs"),
        ("graph: grpo", "steps: 3", "$.steps", "given twice", ""),
        ("steps: 3", "stesp: 3", "$.stesp", "unknown key 'stesp'", "did you mean 'steps'?"),
        ("steps: 3", "steps: 0", "$.steps", "expected a whole number >= 1, got 0", ""),
        ("steps: 3", "staleness: 1.5", "$.staleness", "expected a whole number >= 0, got 1.5", ""),
        ("steps: 3", "overdue: maks", "$.overdue", "expected one of allow, drop, mask, wait", "did you mean 'mask'?"),
        ("steps: 3", "format: 7", "$.format", "format 7 is unknown: this version reads formats 1 to 1", "newer"),
        ("steps: 3", "seed: ${oc.env:SEED}", "$.seed", "${oc.env:SEED} is not a plain reference", ""),
        ("lr: 2e-6", "lrr: 2e-6", "$.params.lrr", "the graph grpo has no parameter 'lrr'", "did you mean 'lr'?"),
        ("lr: 2e-6", "lr: fast", "$.params.lr", "expected a number, as the graph's default", ""),
        ("lr: 2e-6", "lr: ${graph}", "$.params.lr", "expected a number, as the graph's default", ""),
        ("reward: {fn", "rewrad: {fn", "$.calls.rewrad", "the graph grpo has no call 'rewrad'", "mean 'reward'?"),
        ("fn: ", "fun: ", "$.calls.reward.fun", "unknown key 'fun' of kind function", "did you mean 'fn'?"),
        ("actor: {path", "actr: {path", "$.models.actr", "the graph grpo has no role 'actr'", "did you mean 'actor'?"),
        ("path: model}", "paths: model}", "$.models.actor.paths", "unknown key 'paths'", "did you mean 'path'?"),
        ("path: model}", "path: ./modle}", "$.models.actor.path", "there is no model './modle'", "or a Hub id such as"),
        ("path: model}", "trainable: true}", "$.models.actor", "nobody says where the weights", "path"),
        (
            "path: data/train.jsonl",
            "path: data/trian.jsonl",
            "$.data.path",
            "there is no data set",
            "or a Hub id such as",
        ),
        ("path: data/train.jsonl", "split: train", "$.data.path", "required, but not given: expected text", ""),
        (
            "prompt: question",
            "promt: question",
            "$.data.columns.promt",
            "has no input 'promt'",
            "did you mean 'prompt'?",
        ),
        ("prompt: question", "prompt: questoin", "$.data.columns.prompt", "no column 'questoin'", "mean 'question'?"),
        ("groups: 4", "groups: 40", "$.batch.groups", "the data set has 10 rows", "at most 10"),
        ("groups: 4", "expected_new_tokens: 17", "$.batch.expected_new_tokens", "a sample has at most 16", ""),
        ("steps: 3", "allocation: {trian: {dp: 2}}", "$.allocation.trian", "no call 'trian'", "did you mean 'train'?"),
        ("steps: 3", "allocation: {train: {dq: 2}}", "$.allocation.train.dq", "unknown key 'dq'", "known: "),
        ("steps: 3", "eval: {call: rewrd}", "$.eval.call", "'rewrd' is no function call", "did you mean 'reward'?"),
        ("steps: 3", "eval: {every: 2}", "$.eval", "have no test split", "give eval.data"),
        (
            "steps: 3",
            "eval: {data: {path: data, columns: {prompt: q}}}",
            "$.eval.data.columns.prompt",
            "no column 'q'",
            "",
        ),
        ("steps: 3", "eval: {n: 2, k: [1, 4], temperature: 1}", "$.eval.k", "pass@4 needs at least 4", "eval.n to 4"),
        ("steps: 3", "eval: {n: 4}", "$.eval.n", "greedy decoding gives the same text 4 times", "temperature"),
        ("graph: grpo", "graph: run.yaml", "$.graph", "a run file can't be its own graph", "name another file"),
        ("steps: 3", "cluster: {nodes: 0}", "$.cluster.nodes", "expected a whole number >= 1, got 0", ""),
    ],
)
def test_each_mistake_of_a_run_file_has_its_place(
    place: Path, right: str, wrong: str, path: str, text: str, hint: str
) -> None:
    run = RUN.replace(right, wrong)
    assert run != RUN
    (place / "run.yaml").write_text(run)
    found = refused(place)
    here = [problem for problem in found if problem.where.path == path]
    assert len(here) == 1, found
    assert text in here[0].text
    assert hint in here[0].hint
    given_at = [i for i, line in enumerate(run.splitlines(), 1) if wrong in line]
    if not here[0].text.startswith("required") and path != "$.models.actor":
        assert here[0].where.line == given_at[-1]
        assert here[0].where.file == str(place / "run.yaml")


def test_held_out_data_are_read_as_the_training_data(place: Path) -> None:
    run = RUN.replace("steps: 3", "steps: 3\neval: {every: 1, data: {path: data, limit: 2}}")
    (place / "run.yaml").write_text(run)
    checked = check_run(place / "run.yaml")
    assert checked.run.eval is not None
    held = checked.run.eval.data
    assert held is not None and held.limit == 2 and checked.run.data.limit is None
    assert held.columns == checked.run.data.columns == {"prompt": "question"}
    (place / "run.yaml").write_text(run.replace("limit: 2", "columns: {answer: answer, prompt: answer}"))
    own = check_run(place / "run.yaml").run.eval
    assert own is not None and own.data is not None and own.data.columns["prompt"] == "answer"


def test_a_graph_file_in_place_of_a_run_file_is_told_so(place: Path) -> None:
    (place / "run.yaml").write_text((ROOT / "graphs/library/sft.yaml").read_text())
    (problem,) = refused(place)
    assert "this is a graph file" in problem.text
    assert "realgraph init --graph" in problem.hint


def test_empty_data_are_told_so(place: Path) -> None:
    (place / "data" / "train.jsonl").write_text("")
    (problem,) = refused(place)
    assert (problem.where.path, problem.text) == ("$.data.path", "the data set is empty")


def test_mistakes_of_all_sorts_come_at_once(place: Path) -> None:
    overrides = ["models.actor.path=./none", "allocation.trian.dp=1", "params.minibatches=3", "data.columns.prmpt=x"]
    paths = [problem.where.path for problem in refused(place, *overrides)]
    wanted = ["$.allocation.trian", "$.data.columns.prmpt", "$.models.actor.path", "$.calls.train.minibatches"]
    assert sorted(paths) == sorted(wanted)


def test_a_rule_about_a_reference_names_the_value_behind_it(place: Path) -> None:
    problem = refused(place, "params.minibatches=3")[0]
    assert problem.where.path == "$.calls.train.minibatches"
    assert problem.hint.endswith("its value comes from params.minibatches, command line")


def broken_model(folder: Path, name: str) -> None:
    match name:
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
        case "list config":
            (folder / "config.json").write_text("[]")
        case "own code":
            (folder / "config.json").write_text('{"auto_map": {"AutoModel": "x.Y"}}')
        case "pickled":
            (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        case "no weights":
            (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("no config", "has no readable config.json: No such file or directory", "save_pretrained"),
        ("bad config", "config.json is not JSON", ""),
        ("list config", "config.json is not a JSON object", ""),
        ("own code", "brings its own Python code (auto_map in config.json)", "transformers has itself"),
        ("pickled", "has only pickled weights (pytorch_model.bin), which can run code", "safe_serialization=True"),
        ("no weights", "has no weights", ".safetensors"),
    ],
)
def test_a_model_folder_that_is_unsafe_or_incomplete_is_refused(place: Path, name: str, text: str, hint: str) -> None:
    broken_model(place / "model", name)
    problem = refused(place)[0]
    assert problem.where == Where(str(place / "run.yaml"), 2, "$.models.actor.path")
    assert text in problem.text
    assert hint in problem.hint


def test_a_role_that_is_off_needs_no_model(place: Path) -> None:
    check_run(place / "run.yaml", ["models.ref.path=model"])
    write_model(place / "other")
    broken_model(place / "other", "pickled")
    override = f"models.ref.path={place / 'other'}"
    check_run(place / "run.yaml", [override])
    assert "pickled" in refused(place, override, "params.kl_coef=0.1")[0].text


# --- local data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1, 3, 100])
def test_rows_and_columns_are_those_of_the_files(tmp_path: Path, limit: int | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = Where()
    (tmp_path / "a.jsonl").write_text('{"q": 1, "a": 2}\n\n{"q": 3, "a": 4}\n{"q": 5, "a": 6}')
    (tmp_path / "b.jsonl").write_text('{"q": 1, "a": 2}\n')
    (tmp_path / "notes.txt").write_text("x\n")
    pq.write_table(pa.table({"q": [1, 2, 3, 4], "a": [1, 2, 3, 4]}), tmp_path / "c.parquet")
    for path, n_rows in [("a.jsonl", 3), ("*.jsonl", 4), ("c.parquet", 4)]:
        data = probe_data(str(tmp_path / path), limit, where)
        assert (data.columns, data.n_rows) == (("q", "a"), min(n_rows, limit or n_rows))
    (tmp_path / "c.parquet").unlink()
    assert probe_data(str(tmp_path), limit, where).n_rows == min(4, limit or 4)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x.jsonl", b"{oops\n", "x.jsonl:1 is not JSON"),
        ("x.jsonl", b"\n[1, 2]\n", "x.jsonl:2 is not a JSON object"),
        ("x.jsonl", b"\xff\xfe\n", "x.jsonl:1 is not JSON"),
        ("x.parquet", b"PAR", "x.parquet can't be read"),
    ],
)
def test_data_that_can_not_be_read_names_file_and_line(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    where = Where("run.yaml", 4, "$.data.path")
    problem = problems_of(lambda: probe_data(str(tmp_path / name), None, where))[0]
    assert problem.where == where
    assert text in problem.text


# --- what is printed and written --------------------------------------------------------------------------------------


def test_the_resolved_file_says_where_each_value_came_from(place: Path) -> None:
    text = resolved_text(compose(place / "run.yaml", ["seed=7", "calls.advantage.steps.scale=null"]))
    run, graph = f"{place}/run.yaml", "realgraph/graphs/library/grpo.yaml"
    origin = {}
    for line in text.splitlines()[1:]:
        value, _, comment = line.partition("  # ")
        origin[value.strip()] = comment
    assert origin["steps: 3"] == f"{run}:12"
    assert origin["seed: 7"] == "command line"
    assert origin["scale: null"] == "command line, deleted"
    assert origin["overdue: mask"] == "default"
    assert origin["n: 2"] == f"{graph}:{line_in('grpo', 'n: ${params.group_size}')}, ${{params.group_size}}"
    tree = parse_document(text, "x").tree
    leaves = sum(1 for _, value in walk(tree, "$") if not isinstance(value, dict) or not value)
    items = sum(len(value) for _, value in walk(tree, "$") if isinstance(value, list))
    assert leaves - items == sum(1 for line in text.splitlines()[1:] if "  # " in line)


def line_in(graph: str, part: str) -> int:
    lines = (ROOT / f"graphs/library/{graph}.yaml").read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if part in line)


@pytest.mark.parametrize("name", library_names())
def test_a_new_run_file_passes_the_check_and_shows_every_parameter(name: str, tmp_path: Path) -> None:
    text = run_template(name, tmp_path)
    checked = check_text(text, tmp_path / "run.yaml")
    assert checked.graph.name == name
    uncommented = "\n".join(
        line.replace("  # ", "  ", 1) if line.startswith("  # ") else line for line in text.splitlines()
    )
    again = compose_text(uncommented, tmp_path / "run.yaml")
    assert again.spec == checked.composed.spec
    params = parse_document(uncommented, "x").tree.get("params", {})
    assert params == checked.composed.spec.params
    scoring = [call.fn for call in checked.graph.calls.values() if isinstance(call, Function) and call.over == "sample"]
    assert scoring in ([], ["last_number"])  # the template's answers end in a number: none would match exactly


@pytest.mark.parametrize("name", library_names())
def test_a_graph_opens_by_name_by_file_and_by_run_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(run_template(name, tmp_path))
    graph = open_graph(name)
    assert graph == open_graph(str(ROOT / f"graphs/library/{name}.yaml"))
    assert graph.calls.keys() == open_graph(str(tmp_path / "run.yaml")).calls.keys()


def test_a_graph_alone_takes_overrides_of_its_own_sections() -> None:
    assert "ref" in open_graph("grpo", ["params.kl_coef=0.1"]).models
    found = problems_of(lambda: open_graph("grpo", ["steps=3", "params.klcoef=1"]))
    assert [problem.text for problem in found] == [
        "the graph grpo has no parameter 'klcoef'",
        "a graph has no 'steps'",
    ]


# --- the generated documents ------------------------------------------------------------------------------------------


def test_the_documents_are_those_that_the_types_give() -> None:
    for name, text in generated_files().items():
        assert (ROOT / "docs" / name).read_text() == text, f"run `realgraph schema`: docs/{name} is out of date"


def test_every_struct_is_in_the_reference_and_every_link_leads_to_a_heading() -> None:
    assert documented() == reachable(type_of(RunSpec)) | reachable(type_of(GraphSpec))
    text = reference_text()
    headings = {
        "".join(c for c in line.lstrip("# ").lower() if c.isalnum() or c in " -_").replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    links = {part.partition(")")[0] for part in text.split("](#")[1:]}
    assert links <= headings
    assert REFERENCE in generated_files()


def test_schemas_take_what_the_loader_takes_and_refuse_typos(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    run, graph = (jsonschema.Draft202012Validator(schema) for schema in (run_schema(), graph_schema()))
    for validator in (run, graph):
        validator.check_schema(validator.schema)
    for name in library_names():
        text = (ROOT / f"graphs/library/{name}.yaml").read_text()
        assert graph.is_valid(parse_document(text, "x").tree)
        template = run_template(name, tmp_path)
        assert run.is_valid(parse_document(template, "x").tree)
        resolved = resolved_text(compose_text(template, tmp_path / "run.yaml"))
        assert run.is_valid(parse_document(resolved, "x").tree)
    for right, wrong in [("steps: 3", "stesp: 3"), ("fn: ", "fun: "), ("path: model}", "paths: model}")]:
        assert run.is_valid(parse_document(RUN, "x").tree)
        assert not run.is_valid(parse_document(RUN.replace(right, wrong), "x").tree)
