"""The loader: every type error at once, each where it was written, typos with their fix, and graph files."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.spec import GraphSpec
from realgraph.graphs.yaml.document import Document, Dumper, parse_document
from realgraph.graphs.yaml.library import library_folder, library_names
from realgraph.graphs.yaml.load import find_graph, load_graph, read_graph, resolve
from realgraph.graphs.yaml.merge import merge, walk
from realgraph.graphs.yaml.schema import check, defaults_of, plain, type_of
from realgraph.run_file.run_spec import RunSpec
from tests.graph_texts import GRAPH, MAPPINGS, line_of, problems_of, spec_of

# --- every type error, with its place ---------------------------------------------------------------------------------

MISTAKES = [
    ("n: ${params.n}", "n: 0", "$.calls.rollout.n", "expected a whole number >= 1 and <= 10,000, got 0", ""),
    ("n: ${params.n}", "n: 2.0", "$.calls.rollout.n", "expected a whole number >= 1 and <= 10,000, got 2.0", "write 2"),
    ("n: ${params.n}", "n: true", "$.calls.rollout.n", "expected a whole number >= 1 and <= 10,000, got true", ""),
    ("n: ${params.n}", "n: null", "", "", ""),
    ("n: ${params.n}", "top_p: 0.0", "$.calls.rollout.top_p", "expected a number > 0 and <= 1, got 0.0", ""),
    ("n: ${params.n}", "temperature: .nan", "$.calls.rollout.temperature", "expected a number >= 0, got nan", ""),
    (
        "lr: ${params.lr}",
        "lr: '1e-5'",
        "$.calls.train.lr",
        "expected a number >= 0, got '1e-5'",
        "leave the quotes out",
    ),
    ("lr: ${params.lr}", "lr: [1]", "$.calls.train.lr", "expected a number >= 0, got a list", ""),
    ("fn: exact_match", "fn: on", "$.calls.reward.fn", "expected text, got true", "quote the word"),
    ("fn: exact_match", "fn: 12", "$.calls.reward.fn", "expected text, got 12", 'quote it: "12"'),
    ("fn: exact_match", "fnn: x", "$.calls.reward.fnn", "unknown key 'fnn' of kind function", "did you mean 'fn'?"),
    ("reads: [text, answer]", "reads: text", "$.calls.reward.reads", "expected a list, each item text", "write [text]"),
    ("reads: [text, answer]", "reads: [text, 3]", "$.calls.reward.reads[1]", "expected text, got 3", 'quote it: "3"'),
    (
        "writes: {reward: sample float32}",
        "writes: [reward]",
        "$.calls.reward.writes",
        "expected a mapping, got a list",
        "",
    ),
    ("kind: function", "kind: fucntion", "$.calls.reward.kind", "unknown kind 'fucntion'", "did you mean 'function'?"),
    (
        "kind: function",
        "over: sample",
        "$.calls.reward.kind",
        "required, but not given: one of generate, inference",
        "",
    ),
    (
        "by: group",
        "by: goup",
        "$.calls.advantage.steps.center.by",
        "expected one of batch, group",
        "did you mean 'group'?",
    ),
    ("center: {by", "centre: {by", "$.calls.advantage.steps.centre.kind", "required, but not given", "mean 'center'?"),
    (
        "dual: 3.0",
        "dual: 1.0",
        "$.calls.train.loss.terms.policy.clip.dual",
        "expected a number > 1 or null, got 1.0",
        "",
    ),
    ("scale: {}", "scala: {by: batch}", "$.calls.advantage.steps.scala.kind", "required", "did you mean 'scale'?"),
    ("dual: 3.0", "lower: 1", "$.calls.train.loss.terms.policy.clip.lower", "of kind two_sided", "did you mean 'low'?"),
    ("kind: token_mean", "kind: constant", "$.calls.train.loss.aggregate.length", "required, but not given", ""),
    ("kind: token_mean", "kind: 3", "$.calls.train.loss.aggregate.kind", "unknown kind 3", ""),
    ("weight_decay: 0.1", "weight_decay: -1", "$.calls.train.optimizer.weight_decay", "a number >= 0, got -1", ""),
    ("weight_decay: 0.1", "betas: [0.9]", "$.calls.train.optimizer.betas", "a list of 2 items", ""),
    ("weight_decay: 0.1", "betas: [0.9, 2]", "$.calls.train.optimizer.betas[1]", "a number >= 0 and <= 1, got 2", ""),
    ("trainable: true", "trainable: 1", "$.models.actor.trainable", "expected true or false, got 1", ""),
    ("trainable: true", "head: lmm", "$.models.actor.head", "expected one of lm, score, value", "did you mean 'lm'?"),
    ("answer: group text", "answer: 5", "$.inputs.answer", "expected text, got 5", ""),
    ("name: tiny", "nam: tiny", "$.nam", "unknown key 'nam'", "did you mean 'name'?"),
    ("name: tiny", "description: x", "$.name", "required, but not given: expected text", ""),
]


@pytest.mark.parametrize(("right", "wrong", "path", "words", "hint"), MISTAKES, ids=[m[1] for m in MISTAKES])
def test_each_mistake_has_its_place_and_its_fix(right: str, wrong: str, path: str, words: str, hint: str) -> None:
    assert right in GRAPH
    text = GRAPH.replace(right, wrong)
    found = problems_of(text)
    if not path:
        assert found == []
        return
    assert [problem.where.path for problem in found if problem.where.path == path] == [path], found
    problem = next(problem for problem in found if problem.where.path == path)
    assert words in problem.text
    assert hint in problem.hint
    missing = words.startswith("required")
    if not missing:
        assert problem.where.line == line_of(text, wrong)
    assert problem.where.file == "tiny.yaml" or path == "$.name"


@pytest.mark.parametrize(
    ("right", "wrong"), [("weight_decay: 0.1", "betas: 0.9"), ("reads: [text, answer]", "reads: 3")]
)
def test_a_list_of_one_is_no_fix_where_it_would_be_a_mistake_too(right: str, wrong: str) -> None:
    (problem,) = [one for one in problems_of(GRAPH.replace(right, wrong)) if "expected a list" in one.text]
    assert problem.hint == ""


def test_all_mistakes_come_at_once_and_in_order() -> None:
    text = GRAPH
    wanted = []
    for right, wrong, path, _, _ in MISTAKES:
        if right in text and path and right not in ("name: tiny", "kind: function", "center: {by"):
            text = text.replace(right, wrong)
            wanted.append(path)
    found = problems_of(text)
    assert set(wanted) <= {problem.where.path for problem in found}
    assert [p.where for p in found] == sorted(p.where for p in found)


def test_a_key_of_another_kind_says_whose_it_is() -> None:
    problem = problems_of(GRAPH, "calls.train.loss.terms.policy.clip={kind: stop_gradient, dual: 2}")[0]
    assert problem.hint == "it belongs to kind two_sided"


def test_a_wrong_value_behind_a_reference_names_its_source() -> None:
    problem = problems_of(GRAPH, "params.n=0")[0]
    assert (problem.where.line, problem.where.path) == (line_of(GRAPH, "n: ${params.n}"), "$.calls.rollout.n")
    assert problem.hint == "its value comes from params.n, command line"


@pytest.mark.parametrize(
    ("override", "text", "hint"),
    [
        ("params.lrr=1", "the graph tiny has no parameter 'lrr'", "did you mean 'lr'?"),
        ("params.n=1.5", "expected a whole number, as the graph's default 4 is; got 1.5", ""),
        ("params.lr=fast", "expected a number, as the graph's default 1e-05 is; got 'fast'", ""),
        ("params.clip=true", "expected a number, as the graph's default 0.2 is; got true", ""),
        ("params.n=null", "a parameter can't be deleted: the graph refers to it", "leave it out for its default, 4"),
        ("calls.trian.lr=1", "the graph tiny has no call 'trian'", "did you mean 'train'?"),
        ("calls.mine.lr=1", "the graph tiny has no call 'mine'", "known: advantage, reward, rollout, train"),
        ("models.acotr.path=x", "the graph tiny has no role 'acotr', and no call of yours runs it", "mean 'actor'?"),
    ],
)
def test_a_user_may_name_only_what_the_graph_has(override: str, text: str, hint: str) -> None:
    found = problems_of(GRAPH, override)
    assert [problem.text for problem in found] == [text]
    assert hint in found[0].hint
    assert found[0].where.file == "command line"


def test_an_empty_section_changes_nothing() -> None:
    assert spec_of(GRAPH, "calls=null", "params=null") == spec_of(GRAPH)


# --- typos ------------------------------------------------------------------------------------------------------------


def keys_of_structs(text: str) -> list[tuple[str, str]]:
    """Each key of a graph text that the schema knows, long enough for a typo to be recognisable, with its line."""
    from tests.run_documents import reachable

    fields = {name for struct in reachable(type_of(GraphSpec)) for name in struct.__struct_fields__}
    return [
        (path, key)
        for path, _ in walk(parse_document(text, "x").tree, "$")
        if (key := path.rpartition(".")[2]) in fields
        and len(key) >= 4
        and not path.startswith(("$.params.", "$.inputs."))
        and path.rpartition(".")[0] != "$.calls"
    ]


TYPOS = {
    "swap": lambda key, i: key[:i] + key[i + 1] + key[i] + key[i + 2 :],
    "drop": lambda key, i: key[:i] + key[i + 1 :],
    "double": lambda key, i: key[: i + 1] + key[i:],
    "other": lambda key, i: key[:i] + "x" + key[i + 1 :],
}


@given(st.data())
@settings(max_examples=80)
def test_a_typo_in_any_key_is_reported_at_its_line_with_the_right_spelling(data: st.DataObject) -> None:
    path, key = data.draw(st.sampled_from(KNOWN_KEYS))
    i = data.draw(st.integers(0, len(key) - 2))
    wrong = TYPOS[data.draw(st.sampled_from(sorted(TYPOS)))](key, i)
    if wrong == key:
        return
    parent: Any = TYPO_DOCUMENT.tree
    for part in path.split(".")[1:-1]:
        parent = parent[part]
    if wrong in parent:
        return
    at = TYPO_DOCUMENT.marks[path].line
    text_lines = TYPO_TEXT.splitlines()
    text_lines[at - 1] = text_lines[at - 1].replace(f"{key}:", f"{wrong}:", 1)
    found = problems_of("\n".join(text_lines))
    where = [p for p in found if p.where.line == at and p.where.path == f"{path.rpartition('.')[0]}.{wrong}"]
    assert where, found
    assert where[0].hint.startswith(f"did you mean {key!r}?")


TYPO_TEXT = yaml.dump(parse_document(GRAPH, "x").tree, Dumper=Dumper, default_flow_style=False, sort_keys=False)
TYPO_DOCUMENT = parse_document(TYPO_TEXT, "x")
KNOWN_KEYS = keys_of_structs(TYPO_TEXT)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", library_names())
def test_library_graphs_load_and_their_references_lead_somewhere(name: str) -> None:
    spec, resolved = load_graph(library_folder() / f"{name}.yaml", Document({}), defaults_of(RunSpec))
    assert spec.name == name
    assert "${" not in repr(resolved.document.tree["calls"])
    assert tuple(check(type_of(GraphSpec), Document(plain(spec)))) == ()  # type: ignore[arg-type]


def test_a_graph_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    where = Where("run.yaml", 1, "$.graph")
    with pytest.raises(ConfigError) as caught:
        find_graph("gropo", tmp_path, where)
    problem = caught.value.problems[0]
    assert problem.where == where
    assert problem.text == f"'gropo' is neither a library graph nor the file {tmp_path}/gropo"
    assert problem.hint.startswith("did you mean 'grpo'? library graphs: ")
    with pytest.raises(ConfigError, match=r"there is no file .*/mine\.yaml"):
        find_graph("mine.yaml", tmp_path, where)


def test_a_file_that_can_not_be_read_or_is_too_new_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_graph(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 6"):
        read_graph(tmp_path / "latin.yaml")
    (tmp_path / "new.yaml").write_text("name: x\nformat: 99\n")
    with pytest.raises(ConfigError, match=r"new\.yaml:2: \$\.format: format 99 is unknown"):
        load_graph(tmp_path / "new.yaml", Document({}), {})


BASE = parse_document(GRAPH, "x")


@pytest.mark.slow
@given(MAPPINGS)
@settings(max_examples=80)
def test_anything_is_either_decoded_or_refused_with_problems(tree: dict[str, Any]) -> None:
    """The walk over the types finds what msgspec would refuse: no other error ever escapes."""
    document = merge(BASE, Document({"calls": {"train": tree, "reward": tree}, "models": tree}))
    try:
        resolved = resolve(GraphSpec, document, Document({}), {})
    except ConfigError:
        return
    msgspec.convert(resolved.document.tree, GraphSpec)
