"""Run files: laid over graphs, checked against data and models, and printed with the origin of every value."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realgraph.commands.init import run_template
from realgraph.graphs.errors import Where
from realgraph.graphs.spec import Function, GraphSpec
from realgraph.graphs.yaml.document import Dumper, parse_document
from realgraph.graphs.yaml.library import library_names
from realgraph.graphs.yaml.merge import walk
from realgraph.graphs.yaml.schema import type_of
from realgraph.reference.json_schema import graph_schema, run_schema
from realgraph.reference.reference import REFERENCE, SECTIONS, generated_files, reference_text
from realgraph.run_file.compose import check_run, compose
from realgraph.run_file.open_graph import open_graph
from realgraph.run_file.resolved import resolved_text
from realgraph.run_file.run_spec import RunSpec
from tests.graph_texts import TEXT
from tests.run_documents import check_text, compose_text, reachable
from tests.run_texts import ROOT, RUN, place, problems_of, refused, write_model

__all__ = ["place"]


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


@pytest.mark.parametrize(
    ("written", "verified"),
    [
        ("off", ()),
        ("'off'", ()),
        ("0", ()),
        ("first", (1,)),
        ("1", (1, 2, 3, 4, 5, 6, 7)),
        ("3", (3, 6)),
    ],
)
def test_weights_are_verified_at_every_nth_update_at_the_first_or_at_none(
    place: Path, written: str, verified: tuple[int, ...]
) -> None:
    """Said in the file as on the command line, and by the resolved run file; YAML reads a plain off as false."""
    file = place / "verified.yaml"
    file.write_text((place / "run.yaml").read_text() + f"runtime: {{verify_weights: {written}}}\n")
    resolved = place / "resolved.yaml"
    resolved.write_text(resolved_text(compose(file)))
    found = [compose(file), compose(place / "run.yaml", [f"runtime.verify_weights={written}"]), compose(resolved)]
    for runtime in (one.run.runtime for one in found):
        assert tuple(update for update in range(1, 8) if runtime.verifies(update)) == verified
        assert bool(runtime.verified_updates) == bool(verified)
    assert not compose(place / "run.yaml").run.runtime.verified_updates


@pytest.mark.parametrize("written", ["on", "true", "-1", "1.5", "of"])
def test_other_words_for_verifying_weights_are_refused_with_those_that_there_are(place: Path, written: str) -> None:
    (problem,) = refused(place, f"runtime.verify_weights={written}")
    assert problem.where.path == "$.runtime.verify_weights"
    assert "expected a whole number >= 0 or one of first, off" in problem.text


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


@pytest.mark.parametrize("path", ["models.actor.path", "data.path", "eval.data.path", "outputs.dir"])
def test_an_empty_path_is_not_the_folder_of_the_run_file(place: Path, path: str) -> None:
    held_out = ["eval.every=1"] if path.startswith("eval") else []
    (problem,) = refused(place, *held_out, f'{path}=""')
    assert problem.where.path == f"$.{path}" and problem.hint
    assert (place / "run.yaml").is_file() and problem.rule == "path"


def test_a_role_that_is_out_keeps_its_empty_path(place: Path) -> None:
    composed = compose(place / "run.yaml", ["graph=ppo", "params=null"])
    assert composed.spec.models["reward_model"].path == ""


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
    ("name", st.none() | st.text("abcé19 -_.:[]⛏", min_size=1, max_size=8).filter(str.strip)),
    ("staleness", st.integers(0, 8)),
    ("params.kl_coef", st.floats(0, 1)),
    ("params.group_size", st.integers(2, 9)),
    ("calls.train.optimizer.betas", st.tuples(st.floats(0, 1), st.floats(0, 1)).map(list)),
    ("calls.train.optimizer.max_grad_norm", st.none() | st.floats(0.1, 9)),
    ("calls.train.loss.aggregate", st.just({"kind": "constant", "length": 8})),
    ("calls.advantage.steps.scale", st.none()),
    ("calls.reward.args", st.dictionaries(st.text(TEXT, max_size=4), st.text(TEXT, max_size=9), max_size=2)),
    ("rollout.max_running", st.integers(1, 99)),
    ("cluster.kind", st.sampled_from(["cpu", "auto"])),
    ("outputs.trackers", st.lists(st.sampled_from(["wandb", "mlflow"]), max_size=2)),
]
SETTINGS = st.lists(st.sampled_from(FIELDS), unique_by=lambda pair: pair[0], max_size=5).flatmap(
    lambda pairs: st.fixed_dictionaries(dict(pairs))
)


def escaped(value: Any) -> Any:
    from realgraph.graphs.yaml.merge import escape

    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    return escape(value) if isinstance(value, str) else value


@pytest.mark.slow
@given(SETTINGS)
@example({"calls.reward.args": {"${": "${", "a\\${b}": "\\"}})  # references lie in values; keys are as they are
@settings(max_examples=15)
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
    functions = [call.fn for call in checked.graph.calls.values() if isinstance(call, Function)]
    scoring = [fn for fn in functions if fn in ("exact_match", "last_number")]
    assert set(scoring) <= {"last_number"}  # the template's answers end in a number: none would match exactly


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
    documented = {struct for _, _, members in SECTIONS for struct in members}
    assert documented == reachable(type_of(RunSpec)) | reachable(type_of(GraphSpec))
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


def test_the_directory_of_outputs_is_relative_to_the_run_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and data are, too; what stands on the command line is relative to where that is typed."""
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (place / "run.yaml").write_text(RUN + "outputs: {dir: runs/mine}\n")
    assert compose(place / "run.yaml").run.outputs.dir == str(place / "runs/mine")
    assert compose(place / "run.yaml", ["outputs.dir=here"]).run.outputs.dir == str(elsewhere / "here")
    assert compose(place / "run.yaml", ["outputs.dir=/abs"]).run.outputs.dir == "/abs"
    assert compose(place / "run.yaml", ["outputs.dir=null"]).run.outputs.dir is None
