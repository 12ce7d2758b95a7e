"""Compilation: what a checked graph promises, over random graphs and the library."""

from importlib.resources import files
from typing import cast

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.errors import ConfigError
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import INPUT, Edge, Graph
from realgraph.graphs.spec import Train
from realgraph.graphs.yaml.catalogue import library
from tests.strategies import DELETE, Tree, change, dpo_tree, rl_tree, sft_tree, spec_of, trees, where


def graph_of(tree: Tree, facts: Facts | None = None) -> Graph:
    return compile_graph(spec_of(tree), where, facts or Facts())


@pytest.mark.slow
@settings(max_examples=400)
@given(trees())
def test_every_read_has_a_producer_before_it(tree: Tree) -> None:
    graph = graph_of(tree)
    assert set(graph.calls) == set(tree["calls"])
    done: set[str] = {INPUT}
    for name in graph.calls:
        for key in graph.reads[name]:
            assert graph.keys[key].producer in done
            assert name in graph.keys[key].consumers
        for key in graph.writes[name]:
            assert graph.keys[key].producer == name
        done.add(name)


@settings(max_examples=100)
@given(trees(), st.integers(0, 5))
def test_edges_say_what_reads_and_training_imply(tree: Tree, staleness: int) -> None:
    trains = any(call["kind"] == "train" for call in tree["calls"].values())
    facts = Facts(staleness=staleness if trains and "rollout" in tree["calls"] else 0)
    graph = graph_of(tree, facts)
    pairs = {(graph.keys[key].producer, name, key) for name in graph.calls for key in graph.reads[name]}
    data = {(edge.producer, edge.consumer, key) for edge in graph.edges for key in edge.keys}
    assert data == {pair for pair in pairs if pair[0] != INPUT}
    for edge in graph.edges:
        if edge.role:
            generates = tree["calls"][edge.consumer]["kind"] == "generate"
            assert isinstance(graph.calls[edge.producer], Train)
            assert graph.role(edge.producer) == graph.role(edge.consumer) == edge.role
            assert edge.distance == (1 + facts.staleness if generates else 1)
        else:
            assert edge.keys
            assert edge.distance == 0


@settings(max_examples=100)
@given(trees())
def test_the_files_order_stays_where_it_can(tree: Tree) -> None:
    graph = graph_of(tree)
    sorted_tree = change(tree, {"calls": {name: tree["calls"][name] for name in graph.calls}})
    assert tuple(graph_of(sorted_tree).calls) == tuple(graph.calls)


@settings(max_examples=50)
@given(trees())
def test_a_graph_travels_as_json(tree: Tree) -> None:
    graph = graph_of(tree)
    assert msgspec.json.decode(msgspec.json.encode(graph), type=Graph) == graph


@settings(max_examples=50)
@given(trees())
def test_without_problems_without_side_effects(tree: Tree) -> None:
    spec = spec_of(tree)
    before = msgspec.json.encode(spec)
    assert compile_graph(spec, where, Facts()) == compile_graph(spec, where, Facts())
    assert msgspec.json.encode(spec) == before


def test_train_reads_what_its_loss_needs() -> None:
    graph = graph_of(rl_tree())
    assert graph.reads["train"] == ("tokens", "mask", "advantages", "behaviour_logprobs", "versions", "ref_logprobs")
    assert graph.reads["train_critic"] == ("tokens", "mask", "returns", "values", "versions")
    assert graph.reads["advantage"] == ("reward", "tokens", "mask", "values")
    assert graph.writes["advantage"] == ("advantages", "returns")
    assert graph_of(sft_tree()).reads["train"] == ("tokens", "mask")


def test_an_apply_term_reads_outputs_of_the_model_without_a_producer() -> None:
    term = {"apply": {"fn": "m:f", "reads": ["logprobs", "reward"]}}
    graph = graph_of(change(rl_tree(), {"calls.train.loss.terms": term}))
    assert graph.reads["train"] == ("tokens", "mask", "reward", "versions")


def test_a_role_switched_off_takes_calls_terms_and_steps_along() -> None:
    kl_off = {"models.ref.when": 0.0, "calls.train.loss.terms.kl.coef": 0.0}
    graph = graph_of(change(rl_tree(), kl_off | {"calls.advantage.steps.kl_penalty": DELETE}))
    assert set(graph.calls) == {"rollout", "reward", "values", "advantage", "train", "train_critic"}
    train = graph.calls["train"]
    assert isinstance(train, Train)
    assert tuple(train.loss.terms) == ("policy",)
    assert "ref" not in graph.models
    graph = graph_of(change(rl_tree(), {"models.critic.when": False}))
    assert "gae" not in msgspec.to_builtins(graph.calls["advantage"])["steps"]
    assert graph.writes["advantage"] == ("advantages",)


def test_a_kl_asked_for_and_switched_off_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        graph_of(change(rl_tree(), {"models.ref.when": False}))
    (problem,) = refused.value.problems
    assert str(problem) == (
        "$.calls.train.loss.terms.kl.to: no call writes 'ref_logprobs', which the term 'kl' reads\n"
        "  hint: the call 'ref_logp' would write it, but models.ref.when switches it off"
    )


def test_a_column_that_is_no_input_yet_is_told_to_be_made_one() -> None:
    with pytest.raises(ConfigError) as refused:
        graph_of(change(rl_tree(), {"calls.reward.reads": ["text", "answer", "data_source"]}))
    (problem,) = refused.value.problems
    assert problem.text == "no call writes 'data_source', which the call 'reward' reads"
    assert problem.hint.startswith("a column of the data is an input: inputs: {data_source: group text}")


@pytest.mark.parametrize("off", [False, 0, 0.0, "", None])
def test_what_switches_off(off: object) -> None:
    tree = change(rl_tree(), {"calls.extra": {"kind": "function", "fn": "m:f", "when": off}})
    assert "extra" not in graph_of(tree).calls


def test_init_gives_a_role_its_path() -> None:
    graph = graph_of(change(rl_tree(), {"models.actor.revision": "main", "models.old": {"init": "critic"}}))
    assert {name: (role.path, role.revision) for name, role in graph.models.items()} == dict.fromkeys(
        ("actor", "ref", "critic", "old"), ("models/actor", "main")
    )
    own = graph_of(change(rl_tree(), {"models.critic.path": "models/critic"}))
    assert own.models["critic"].path == "models/critic"


def test_inputs_that_nobody_reads_are_not_asked_for() -> None:
    tree = change(rl_tree(), {"inputs.spare": "group text"})
    assert [key.name for key in graph_of(tree, Facts(columns=("prompt", "answer"))).inputs] == ["prompt", "answer"]


def test_two_training_calls_of_a_role_follow_each_other() -> None:
    polish = {"kind": "train", "model": "actor", "loss": {"terms": {"cross_entropy": {}}}}
    edges = [edge for edge in graph_of(change(rl_tree(), {"calls.polish": polish})).edges if edge.role == "actor"]
    assert edges == [Edge("train", "polish", role="actor"), Edge("polish", "rollout", role="actor", distance=1)]


def test_a_moving_average_follows_the_training_of_its_role() -> None:
    edges = graph_of(change(rl_tree(), {"models.ref.ema_rate": 0.99})).edges
    assert Edge("train", "ref_logp", role="ref", distance=1) in edges
    assert not [edge for edge in graph_of(rl_tree()).edges if edge.role == "ref"]


_RL_ONLY = {"calls.train_critic": DELETE, "calls.values": DELETE, "models.critic": DELETE}
_STEPS, _POLICY = "calls.advantage.steps", "calls.train.loss.terms.policy"
_AGGREGATE, _TERMS = "calls.train.loss.aggregate", "calls.train.loss.terms"
_DYNAMIC = {"kind": "function", "fn": "reward_spread", "over": "group", "reads": ["reward"]}
_TEACHER = {"kind": "inference", "model": "ref", "output": "logprobs", "writes": ["teacher_logprobs"]}
ALGORITHMS: dict[str, Tree] = {
    "grpo": {_STEPS: {"center": {}, "scale": {}}},
    "gspo": {_STEPS: {"center": {}, "scale": {}}, f"{_POLICY}.ratio": "sequence"},
    "dapo": {
        _STEPS: {"overlong": {"start": 10, "limit": 20}, "center": {}, "scale": {}},
        f"{_POLICY}.clip": {"kind": "two_sided", "low": 0.2, "high": 0.28},
        "calls.dynamic": _DYNAMIC | {"writes": {"keep": "group bool"}},
    },
    "dr_grpo": {_STEPS: {"center": {}, "scale": None}, _AGGREGATE: {"kind": "constant", "length": 128}},
    "rloo": {_STEPS: {"center": {"by": "leave_one_out"}}, f"{_POLICY}.clip": {"kind": "none"}},
    "reinforce_plus_plus": {
        _STEPS: {
            "kl_penalty": {"to": "ref_logprobs"},
            "return": {},
            "center": {"by": "batch"},
            "scale": {"by": "batch"},
        },
    },
    "baseline_key": {
        "calls.guess": {"kind": "function", "fn": "m:f", "reads": ["prompt"], "writes": {"guess": "sample float32"}},
        _STEPS: {"center": {"by": "key", "key": "guess"}},
    },
    "cispo": {_STEPS: {"center": {}, "scale": {}}, f"{_POLICY}.clip": {"kind": "stop_gradient"}},
    "lite_ppo": {_STEPS: {"center": {}, "scale": {"by": "batch"}}, _AGGREGATE: {"kind": "token_mean"}},
    "distillation": {
        "calls.teacher": _TEACHER,
        _TERMS: {"distill": {"teacher": "teacher_logprobs"}},
        "calls.advantage": DELETE,
        "calls.reward": DELETE,
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_known_algorithms_are_a_few_changes_away(name: str) -> None:
    assert graph_of(change(rl_tree(), _RL_ONLY | ALGORITHMS[name])).calls


def test_samples_per_group() -> None:
    assert graph_of(rl_tree(n=7)).samples_per_group == 7
    assert graph_of(dpo_tree()).samples_per_group == 2
    assert graph_of(sft_tree()).samples_per_group == 1


def test_semantics_of_log_probabilities() -> None:
    tree = change(rl_tree(temperature=0.7), {"calls.rollout.top_k": 5, "calls.train.loss.terms.policy.ratio": "none"})
    keys = graph_of(tree).keys
    behaviour, ref = keys["behaviour_logprobs"].type.logprobs, keys["ref_logprobs"].type.logprobs
    assert behaviour is not None
    assert ref is not None
    assert (behaviour.role, behaviour.temperature, behaviour.behaviour, behaviour.truncated) == (
        "actor",
        0.7,
        True,
        True,
    )
    assert (ref.role, ref.temperature, ref.behaviour, ref.truncated) == ("ref", 0.7, False, False)


# --- the library ------------------------------------------------------------------------------------------------------


def library_graph(name: str, **params: object) -> Graph:
    """A library graph with params overridden; read here without the loader, so that each is tested alone."""
    tree = yaml.safe_load((files("realgraph") / "graphs" / "library" / f"{name}.yaml").read_text("utf-8"))
    assert params.keys() <= tree["params"].keys()
    return graph_of(cast(Tree, _substituted(tree, tree["params"] | params)))


def _substituted(value: object, params: Tree) -> object:
    match value:
        case dict():
            return {key: _substituted(item, params) for key, item in value.items()}
        case list():
            return [_substituted(item, params) for item in value]
        case str() if value.startswith("${params."):
            return params[value.removeprefix("${params.").removesuffix("}")]
        case _:
            return value


@pytest.mark.parametrize("name", library())
def test_library_graphs_compile_as_they_are(name: str) -> None:
    assert library_graph(name).name == name
    assert library()[name]


def test_library_is_whole() -> None:
    assert set(library()) >= {"sft", "grpo", "ppo", "raft", "generate"}


@pytest.mark.parametrize(
    ("name", "params", "calls"),
    [
        ("grpo", {"kl_coef": 0.1}, "rollout reward ref_logp advantage train"),
        ("grpo", {"kl_coef": 0.0}, "rollout reward advantage train"),
        ("ppo", {}, "rollout reward ref_logp values advantage train_actor train_critic"),
        ("ppo", {"kl_coef": 0.0}, "rollout reward values advantage train_actor train_critic"),
        (
            "ppo",
            {"reward_fn": "", "reward_model": "rm"},
            "rollout score ref_logp values advantage train_actor train_critic",
        ),
        ("raft", {"group_size": 3}, "rollout reward select train"),
        ("generate", {"reward_fn": ""}, "rollout"),
        ("sft", {"epochs": 2}, "train"),
    ],
)
def test_library_parameters(name: str, params: Tree, calls: str) -> None:
    assert list(library_graph(name, **params).calls) == calls.split()


def test_ppo_needs_exactly_one_reward() -> None:
    with pytest.raises(ConfigError, match="no call writes 'reward'"):
        library_graph("ppo", reward_fn="")
    with pytest.raises(ConfigError, match="'reward' is written twice"):
        library_graph("ppo", reward_model="rm")
