"""The loader: places, composition, references, and every type error at once, each where it was written."""

import copy
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from realgraph.graphs.document import (
    Document,
    Dumper,
    ancestors,
    child,
    parse_document,
    parse_override,
    parse_value,
)
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.load import (
    find_graph,
    library_folder,
    library_names,
    load_graph,
    load_graph_document,
    read_graph,
    resolve,
    user_document,
)
from realgraph.graphs.merge import escape, interpolate, merge, walk
from realgraph.graphs.schema import check, defaults_of, plain, type_of
from realgraph.graphs.spec import GraphSpec
from realgraph.run_spec import RunSpec

GRAPH = """\
name: tiny
params: {lr: 1e-5, n: 4, clip: 0.2, path: null}
inputs: {prompt: group tokens, answer: group text}
models:
  actor: {trainable: true, path: "${params.path}"}
calls:
  rollout:
    kind: generate
    model: actor
    n: ${params.n}
  reward:
    kind: function
    fn: exact_match
    reads: [text, answer]
    writes: {reward: sample float32}
    args: {strict: null}
  advantage:
    kind: advantage
    steps:
      center: {by: group}
      scale: {}
  train:
    kind: train
    model: actor
    lr: ${params.lr}
    optimizer:
      weight_decay: 0.1
    loss:
      aggregate:
        kind: token_mean
      terms:
        policy:
          kind: policy_gradient
          clip:
            kind: two_sided
            low: ${params.clip}
            dual: 3.0
"""


def problems_of(text: str, *overrides: str) -> list[Problem]:
    """What the loader says about a graph text."""
    try:
        spec_of(text, *overrides)
    except ConfigError as error:
        return list(error.problems)
    return []


def spec_of(text: str, *overrides: str) -> GraphSpec:
    user = user_document(Document({}), [parse_override(override) for override in overrides])
    return load_graph_document(parse_document(text, "tiny.yaml"), user, {})[0]


def line_of(text: str, part: str) -> int:
    return 1 + next(i for i, line in enumerate(text.splitlines()) if part in line)


# --- the grammar ------------------------------------------------------------------------------------------------------

SCALARS = [
    "1e-5",
    "1E5",
    "-1.5",
    "1_000",
    "0x10",
    "010",
    "1:30",
    ".5",
    "2024-01-01",
    "on",
    "No",
    "~",
    "null",
    "",
    "'1'",
]
SCALARS += [
    "true",
    "1.",
    "-.inf",
    "+5",
    "a b",
    "[1, 2e3]",
    "{a: 1e-3}",
    "12e03",
    "1e+3",
    "0.0",
    "1_0.5",
    "abc_1e5",
]


@pytest.mark.parametrize("text", SCALARS)
def test_values_are_read_as_omegaconf_reads_them(text: str) -> None:
    theirs = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))
    assert isinstance(theirs, dict)
    assert repr(parse_document(f"value: {text}", "x").tree["value"]) == repr(theirs["value"])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text(min_size=1, max_size=6)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
MAPPINGS = st.dictionaries(KEYS, TREES, max_size=4)


@given(MAPPINGS)
@settings(max_examples=80, deadline=None)
def test_what_the_dumper_writes_the_loader_reads_and_every_value_has_a_line(tree: dict[str, Any]) -> None:
    text = yaml.dump(tree, Dumper=Dumper)
    document = parse_document(text, "x.yaml")
    assert document.tree == tree
    assert {path for path, _ in walk(document.tree, "$")} == set(document.marks)
    assert all(1 <= mark.line <= len(text.splitlines()) + 1 for mark in document.marks.values())


@given(st.lists(st.integers(0, 50) | KEYS, max_size=5))
def test_ancestors_undo_child(keys: list[str | int]) -> None:
    paths = ["$"]
    for key in keys:
        paths.append(child(paths[-1], key))
    assert list(ancestors(paths[-1])) == paths[::-1]


@pytest.mark.parametrize(
    ("text", "line", "path", "words"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "$", "YAML syntax"),
        ("a: 1\n\tb: 2\n", 2, "$", "YAML syntax"),
        ("a: 1\nb: {c: 1,\n c: 2}\n", 3, "$.b.c", "given twice: first at line 2"),
        ("- a\n", 1, "$", "expected a mapping, found a list"),
        ("a: 1\n--- \nb: 2\n", 2, "$", "YAML syntax"),
        ("a:\n  on: 1\n", 2, "$.a", "the key 'on' is not text"),
        ("a: 1\n3: 1\n", 2, "$", "the key '3' is not text"),
        ("? [1, 2]\n: 1\n", 1, "$", "the key that is a list or a mapping is not text"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "$", ""),
        ("a: 1\nb: !!python/name:os.system x\n", 2, "$.b", "could not determine a constructor"),
        ("a: &x\n  b: *x\n", 2, "$.a.b", "an alias inside its own anchor"),
        ("a: &x {<<: *x}\n", 1, "$.a", "an alias inside its own anchor"),
        ("a:\n  <<: 3\n", 2, "$.a", "'<<' merges mappings only"),
        ("a: *nowhere\n", 1, "$", "undefined alias"),
    ],
)
def test_a_broken_text_is_refused_at_its_line(text: str, line: int, path: str, words: str) -> None:
    if "os.system [" in text:  # a tag on a list is ignored: nothing is ever called
        assert parse_document(text, "x.yaml").tree == {"a": ["ls"]}
        return
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "x.yaml")
    problem = caught.value.problems[0]
    assert (problem.where, words in problem.text) == (Where("x.yaml", line, path), True), problem


def test_merge_keys_bring_in_what_is_not_written_out() -> None:
    text = "base: &b {x: 1, y: {z: 2}}\nmore: &m {x: 5, w: 6}\nuse:\n  <<: [*b, *m]\n  y: 3\nagain: *b\n"
    tree = parse_document(text, "x").tree
    assert tree["use"] == {"x": 1, "w": 6, "y": 3}
    assert tree["again"] == {"x": 1, "y": {"z": 2}}


def test_nested_aliases_can_not_blow_up() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    with pytest.raises(ConfigError, match="more than 20000 values"):
        parse_document(bomb, "x")


# --- merging ----------------------------------------------------------------------------------------------------------

VALUES = st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
LAYERS = st.recursive(  # lower-case keys hold values, the others mappings: one never takes the place of the other
    st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
    lambda inner: st.builds(dict.__or__, st.dictionaries(st.sampled_from("ABC"), inner, max_size=2), inner),
)


def marked(tree: dict[str, Any], file: str) -> Document:
    return Document(copy.deepcopy(tree), {path: Where(file, 1, path) for path, _ in walk(tree, "$")})


@given(LAYERS, LAYERS, LAYERS)
@settings(max_examples=80, deadline=None)
def test_merging_is_associative_and_the_upper_layer_wins(a: Any, b: Any, c: Any) -> None:
    low, mid, top = marked(a, "a"), marked(b, "b"), marked(c, "c")
    assert merge(merge(low, mid), top) == merge(low, merge(mid, top))
    assert merge(low, Document({})).tree == merge(Document({}), low).tree == merge(low, low).tree == a
    both = merge(low, mid)
    for path, value in walk(b, "$"):
        if not isinstance(value, dict):
            assert dict(walk(both.tree, "$"))[path] == value
            assert both.marks[path].file == "b"
    assert all(mark.file in "ab" for mark in both.marks.values())
    assert {path for path, _ in walk(both.tree, "$")} == set(both.marks)


def test_a_new_step_stands_before_the_step_that_follows_it() -> None:
    for override, order in [
        ("{overlong: {start: 2, limit: 4}, center: {}}", ["overlong", "center", "scale"]),
        ("{last: {kind: center}, scale: null, first: {kind: center}}", ["center", "last", "scale", "first"]),
        ("{a: {kind: center}, scale: {}, b: {kind: center}, center: {}}", ["b", "center", "a", "scale"]),
        ("{own: {kind: center}}", ["center", "scale", "own"]),
    ]:
        upper = parse_document(f"calls: {{advantage: {{steps: {override}}}}}", "up")
        merged = merge(parse_document(GRAPH, "low"), upper)
        tree: Any = merged.tree
        assert list(tree["calls"]["advantage"]["steps"]) == order


def test_another_kind_replaces_and_the_same_kind_merges() -> None:
    spec = spec_of(GRAPH, "calls.train.loss.terms.policy.clip={kind: stop_gradient, high: 1.0}")
    assert plain(spec.calls["train"])["loss"]["terms"]["policy"]["clip"] == {  # type: ignore[call-overload, index]
        "kind": "stop_gradient",
        "low": 1.0,
        "high": 1.0,
    }
    spec = spec_of(GRAPH, "calls.train.loss.terms.policy.clip.high=0.3")
    clip = plain(spec.calls["train"])["loss"]["terms"]["policy"]["clip"]  # type: ignore[call-overload, index]
    assert clip == {"kind": "two_sided", "low": 0.2, "high": 0.3, "dual": 3.0}


def test_null_deletes_entries_resets_fields_and_stays_where_it_is_a_value() -> None:
    tree: Any = plain(
        spec_of(
            GRAPH,
            "calls.advantage.steps.scale=null",
            "calls.train.optimizer.weight_decay=null",
            "calls.train.optimizer.max_grad_norm=null",
            "calls.train.loss.terms.policy.clip=null",
        )
    )
    assert list(tree["calls"]["advantage"]["steps"]) == ["center"]
    assert tree["calls"]["train"]["optimizer"]["weight_decay"] == 0.0
    assert tree["calls"]["train"]["optimizer"]["max_grad_norm"] is None
    assert tree["calls"]["train"]["loss"]["terms"]["policy"]["clip"]["dual"] is None
    assert tree["calls"]["reward"]["args"] == {"strict": None}
    assert tree["params"]["path"] is None


def test_a_deleted_entry_may_be_written_anew() -> None:
    spec: Any = plain(spec_of(GRAPH, "calls.advantage.steps.center=null", "calls.advantage.steps.center.by=batch"))
    assert spec["calls"]["advantage"]["steps"]["center"] == {"kind": "center", "by": "batch", "key": None}


def test_a_required_field_can_not_be_deleted() -> None:
    problem = problems_of(GRAPH, "calls.train.model=null")[0]
    assert str(problem) == "command line: $.calls.train.model: required, but not given: expected text"


# --- overrides --------------------------------------------------------------------------------------------------------


@given(st.lists(st.from_regex(r"[A-Za-z_][\w-]{0,5}", fullmatch=True), min_size=1, max_size=4), TREES)
@settings(max_examples=80, deadline=None)
def test_overrides_round_trip(keys: list[str], value: Any) -> None:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**6).removesuffix("...\n")
    document = parse_override(".".join(keys) + "=" + text)
    found: Any = document.tree
    for key in keys:
        found = found[key]
    assert found == value or (isinstance(value, float) and math.isclose(found, value))
    assert document.where("$." + ".".join(keys)).file == "command line"


@pytest.mark.parametrize("text", ["lr", "=3", "a..b=1", ".a=1", "a.=1", "lr=", "lr= ", "lr=[1", "lr=*x"])
def test_a_broken_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert caught.value.problems[0].where.file == "command line"


def test_values_of_overrides_are_typed() -> None:
    assert [parse_value(text, "x") for text in ("1e-5", "[1, a]", "null", "'1'", "on")] == [
        1e-5,
        [1, "a"],
        None,
        "1",
        True,
    ]


# --- references -------------------------------------------------------------------------------------------------------


def test_references_keep_their_type_and_see_what_was_merged() -> None:
    tree: Any = plain(spec_of(GRAPH, "params.n=7", "params.lr=2", "params.path=here"))
    assert tree["calls"]["rollout"]["n"] == 7
    assert tree["calls"]["train"]["lr"] == 2.0
    assert isinstance(tree["params"]["lr"], float)
    assert tree["models"]["actor"]["path"] == "here"


def test_references_see_defaults() -> None:
    text = GRAPH.replace("${params.lr}", "${calls.train.epochs}").replace("${params.n}", "${batch.groups}")
    document = parse_document(text, "x.yaml")
    resolved = resolve(GraphSpec, document, document, defaults_of(RunSpec))
    tree: Any = resolved.document.tree
    assert (tree["calls"]["train"]["lr"], tree["calls"]["rollout"]["n"]) == (1, 64)


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        ("${params.lrr}", "${params.lrr} leads nowhere: there is no 'lrr'", "did you mean 'lr'?"),
        ("${parms.lr}", "${parms.lr} leads nowhere: there is no 'parms'", "did you mean 'params'?"),
        ("${oc.env:HOME}", "${oc.env:HOME} is not a plain reference", "write ${params.name}"),
        ("${oc.decode:'1'}", "${oc.decode:'1'} is not a plain reference", "write ${params.name}"),
        ("a ${eval:1+1} b", "${eval:1+1} is not a plain reference", "write ${params.name}"),
        ("${params.${params.n}}", "${params.${params.n} is not a plain reference", "write ${params.name}"),
        ("${.lr}", "${.lr} is not a plain reference", "write ${params.name}"),
        ("${params.lr", "${params.lr is not a plain reference", "write ${params.name}"),
        ("???", "??? stands for a value that is still to be given", ""),
        ("${calls.train.lr}", "'${calls.train.lr}' can't be resolved: it leads round in a circle", ""),
    ],
)
def test_a_reference_that_fails_is_one_problem_at_its_line(value: str, words: str, hint: str) -> None:
    text = GRAPH.replace("lr: ${params.lr}", f'lr: "{value}"')
    found = problems_of(text)
    assert [(p.where.line, p.where.path) for p in found] == [(line_of(text, value), "$.calls.train.lr")]
    assert words in found[0].text
    assert hint in found[0].hint


@given(
    st.lists(
        st.sampled_from(["\\", "$", "{", "}", "a", "${", "${a}", "${oc.env:SECRET}", "${oc.env:", "b"]), max_size=8
    )
)
@settings(max_examples=100, deadline=None)
def test_no_text_reaches_the_environment(parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "leaked")
        resolved, problems = interpolate(Document({"x": "".join(parts), "a": 1}), {})
    assert "leaked" not in repr((resolved.tree, problems))


@given(st.lists(st.sampled_from(["\\", "$", "{", "}", "a", "${", "${a}", " ", "'"]), max_size=8).map("".join))
@settings(max_examples=100, deadline=None)
def test_escaping_is_undone_by_interpolation(text: str) -> None:
    assert interpolate(Document({"x": escape(text)}), {}) == (Document({"x": text}), ())


@given(st.text(alphabet="ab$\\{}. ", max_size=12).filter(lambda text: "${" not in text))
def test_text_without_references_is_left_alone(text: str) -> None:
    resolved, problems = interpolate(Document({"a": text, "b": [text]}), {})
    assert (resolved.tree, problems) == ({"a": text, "b": [text]}, ())


def test_an_escaped_reference_is_text() -> None:
    resolved, problems = interpolate(Document({"a": 1, "b": r"x\${a}", "c": r"\${a} ${a}"}), {})
    assert (resolved.tree["b"], resolved.tree["c"], problems) == ("x${a}", "${a} 1", ())


# --- every type error, with its place ---------------------------------------------------------------------------------

MISTAKES = [
    ("n: ${params.n}", "n: 0", "$.calls.rollout.n", "expected a whole number >= 1, got 0", ""),
    ("n: ${params.n}", "n: 2.0", "$.calls.rollout.n", "expected a whole number >= 1, got 2.0", "write 2"),
    ("n: ${params.n}", "n: true", "$.calls.rollout.n", "expected a whole number >= 1, got true", ""),
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
def test_each_mistake_has_its_place_and_its_mend(right: str, wrong: str, path: str, words: str, hint: str) -> None:
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
    from realgraph.reference import reachable

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
@settings(max_examples=80, deadline=None)
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


@given(MAPPINGS)
@settings(max_examples=80, deadline=None)
def test_anything_is_either_decoded_or_refused_with_problems(tree: dict[str, Any]) -> None:
    """The walk over the types finds what msgspec would refuse: no other error ever escapes."""
    document = merge(BASE, Document({"calls": {"train": tree, "reward": tree}, "models": tree}))
    try:
        resolved = resolve(GraphSpec, document, Document({}), {})
    except ConfigError:
        return
    msgspec.convert(resolved.document.tree, GraphSpec)
