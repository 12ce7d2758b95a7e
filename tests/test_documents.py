"""YAML documents: the grammar and its places, merging of layers, overrides of the command line, references."""

import copy
import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.spec import GraphSpec
from realgraph.graphs.yaml.document import (
    Document,
    Dumper,
    ancestors,
    child,
    parse_document,
    parse_override,
    parse_value,
)
from realgraph.graphs.yaml.load import resolve
from realgraph.graphs.yaml.merge import escape, interpolate, merge, walk
from realgraph.graphs.yaml.schema import defaults_of, plain
from realgraph.run_file.run_spec import RunSpec
from tests.graph_texts import GRAPH, KEYS, MAPPINGS, TREES, line_of, problems_of, spec_of

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


@given(MAPPINGS)
@settings(max_examples=80)
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
        ("a:\n  1.5: 1\n", 2, "$.a", "the key '1.5' is not text"),
        ("a: 1\n3: 1\n", 2, "$", "the key '3' is not text"),
        ("? [1, 2]\n: 1\n", 1, "$", "the key that is a list or a mapping is not text"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "$", ""),
        ("a: 1\nb: !!python/name:os.system x\n", 2, "$.b", "is not a plain value"),
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


def test_words_for_true_and_false_are_names_where_they_are_keys() -> None:
    tree = parse_document('eval: {on: engine, "off": no}\n', "x").tree
    assert tree == {"eval": {"on": "engine", "off": False}}


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
@settings(max_examples=80)
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


def test_launch_of_another_kind_replaces() -> None:
    hosts = parse_document("launch: {kind: hosts, listen: '10.0.0.1:7000', join_seconds: 5}", "low")
    for upper, wanted in (
        ("launch: {kind: local}", {"kind": "local"}),
        ("launch: {kind: hosts, join_seconds: 9}", {"kind": "hosts", "listen": "10.0.0.1:7000", "join_seconds": 9}),
    ):
        assert merge(hosts, parse_document(upper, "up")).tree["launch"] == wanted


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


def test_an_upper_layer_deletes_what_a_lower_one_of_the_users_added() -> None:
    more = "calls.more={kind: inference, model: judge, output: logprobs, writes: [more]}"
    added = (more, "models.judge={init: actor}")
    assert "more" in spec_of(GRAPH, *added).calls
    left = spec_of(GRAPH, *added, "calls.more=null", "models.judge=null")
    assert (list(left.calls), list(left.models)) == (["rollout", "reward", "advantage", "train"], ["actor"])
    again = spec_of(GRAPH, *added, "calls.more=null", more)
    assert "more" in again.calls
    (problem,) = problems_of(GRAPH, *added, "calls.moer=null")
    assert (problem.where.path, problem.hint) == ("$.calls.moer", "known: advantage, reward, rollout, train")
    (problem,) = problems_of(GRAPH, *added, "calls.more=null")
    assert problem.where.path == "$.models.judge"
    assert "models.judge=null" in problem.hint


def test_a_deleted_entry_may_be_written_anew() -> None:
    spec: Any = plain(spec_of(GRAPH, "calls.advantage.steps.center=null", "calls.advantage.steps.center.by=batch"))
    assert spec["calls"]["advantage"]["steps"]["center"] == {"kind": "center", "by": "batch", "key": None}


def test_a_required_field_can_not_be_deleted() -> None:
    problem = problems_of(GRAPH, "calls.train.model=null")[0]
    assert str(problem) == "command line: $.calls.train.model: required, but not given: expected text"


# --- overrides --------------------------------------------------------------------------------------------------------


@given(st.lists(st.from_regex(r"[A-Za-z_][\w-]{0,5}", fullmatch=True), min_size=1, max_size=4), TREES)
@settings(max_examples=80)
def test_overrides_round_trip(keys: list[str], value: Any) -> None:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**6).removesuffix("...\n")
    document = parse_override(".".join(keys) + "=" + text)
    found: Any = document.tree
    for key in keys:
        found = found[key]
    assert found == value or (isinstance(value, float) and math.isclose(found, value))
    assert document.where("$." + ".".join(keys)).file == "command line"
    assert parse_override("$." + ".".join(keys) + "=" + text) == document  # as messages have the path


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
        ("${params.lrr}", "${params.lrr} refers to nothing: there is no 'lrr'", "did you mean 'lr'?"),
        ("${parms.lr}", "${parms.lr} refers to nothing: there is no 'parms'", "did you mean 'params'?"),
        ("${oc.env:HOME}", "${oc.env:HOME} is not a plain reference", "write ${params.name}"),
        ("${oc.decode:'1'}", "${oc.decode:'1'} is not a plain reference", "write ${params.name}"),
        ("a ${eval:1+1} b", "${eval:1+1} is not a plain reference", "write ${params.name}"),
        ("${params.${params.n}}", "${params.${params.n} is not a plain reference", "write ${params.name}"),
        ("${.lr}", "${.lr} is not a plain reference", "write ${params.name}"),
        ("${params.lr", "${params.lr is not a plain reference", "write ${params.name}"),
        ("???", "??? stands for a value that is still to be given", ""),
        ("${calls.train.lr}", "'${calls.train.lr}' can't be resolved: it refers to itself", ""),
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
@settings(max_examples=100)
def test_no_text_reaches_the_environment(parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "leaked")
        resolved, problems = interpolate(Document({"x": "".join(parts), "a": 1}), {})
    assert "leaked" not in repr((resolved.tree, problems))


@given(st.lists(st.sampled_from(["\\", "$", "{", "}", "a", "${", "${a}", " ", "'"]), max_size=8).map("".join))
@settings(max_examples=100)
def test_escaping_is_undone_by_interpolation(text: str) -> None:
    assert interpolate(Document({"x": escape(text)}), {}) == (Document({"x": text}), ())


@given(st.text(alphabet="ab$\\{}. ", max_size=12).filter(lambda text: "${" not in text))
def test_text_without_references_is_left_alone(text: str) -> None:
    resolved, problems = interpolate(Document({"a": text, "b": [text]}), {})
    assert (resolved.tree, problems) == ({"a": text, "b": [text]}, ())


def test_an_escaped_reference_is_text() -> None:
    resolved, problems = interpolate(Document({"a": 1, "b": r"x\${a}", "c": r"\${a} ${a}"}), {})
    assert (resolved.tree["b"], resolved.tree["c"], problems) == ("x${a}", "${a} 1", ())


def test_a_path_without_quotes_finds_the_place_of_an_odd_name() -> None:
    document = parse_document('a:\n  "b c":\n    x: 1\n  "d.e\\"":\n    - 2\n  "b": 3\n', "x.yaml")
    assert document.where("$.a.b c.x") == Where("x.yaml", 3, '$.a["b c"].x')
    assert document.where("$.a.b c.nothing") == Where("x.yaml", 2, '$.a["b c"].nothing')
    assert document.where('$.a.d.e"[0]') == Where("x.yaml", 5, '$.a["d.e\\""][0]')
    assert document.where("$.a.b`t") == Where("x.yaml", 1, "$.a.b`t")
