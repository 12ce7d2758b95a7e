"""Graphs for tests: plain trees as YAML would give them, hypothesis strategies over them, and one break per rule."""

import copy
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

from realgraph.graphs.errors import Where
from realgraph.graphs.facts import Facts
from realgraph.graphs.spec import GraphSpec

Tree = dict[str, Any]
DELETE = "<delete>"


def where(path: str) -> Where:
    """A place without a file: tests compare paths."""
    return Where(path=path)


def spec_of(tree: Tree) -> GraphSpec:
    """Decode a tree; entries of steps and terms take their names as kinds, as the loader does it."""
    tree = copy.deepcopy(tree)
    for call in tree["calls"].values():
        for entries in (call.get("steps", {}), call.get("loss", {}).get("terms", {})):
            for name, entry in entries.items():
                if entry is not None:
                    entry.setdefault("kind", name)
    return msgspec.convert(tree, GraphSpec)


def change(tree: Tree, changes: dict[str, Any]) -> Tree:
    """A copy of `tree` with dotted paths set, or deleted."""
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        if value == DELETE:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return tree


# --- trees ------------------------------------------------------------------------------------------------------------


def rl_tree(temperature: float = 1.0, n: int = 4) -> Tree:
    """Reinforcement learning with everything: reference, critic, KL in the loss."""
    return {
        "name": "rl",
        "inputs": {"prompt": "group tokens", "answer": "group text"},
        "models": {
            "actor": {"trainable": True, "path": "models/actor"},
            "ref": {"init": "actor"},
            "critic": {"trainable": True, "head": "value", "init": "actor"},
        },
        "calls": {
            "rollout": {"kind": "generate", "model": "actor", "n": n, "temperature": temperature},
            "reward": {
                "kind": "function",
                "fn": "my_rewards:score",
                "reads": ["text", "answer"],
                "writes": {"reward": "sample float32"},
            },
            "ref_logp": {
                "kind": "inference",
                "model": "ref",
                "output": "logprobs",
                "writes": ["ref_logprobs"],
                "temperature": temperature,
            },
            "values": {"kind": "inference", "model": "critic", "output": "values", "writes": ["values"]},
            "advantage": {
                "kind": "advantage",
                "steps": {"gae": {"gamma": 1.0, "lam": 0.95}, "center": {"by": "batch"}, "scale": {"by": "batch"}},
            },
            "train": {
                "kind": "train",
                "model": "actor",
                "temperature": temperature,
                "loss": {
                    "terms": {
                        "policy": {"kind": "policy_gradient", "off_policy": {"kind": "decoupled"}},
                        "kl": {"to": "ref_logprobs", "coef": 0.1},
                    }
                },
            },
            "train_critic": {"kind": "train", "model": "critic", "loss": {"terms": {"value": {}}}},
        },
    }


def sft_tree() -> Tree:
    """Supervised fine-tuning."""
    return {
        "name": "sft",
        "inputs": {"tokens": "sample tokens", "mask": "token bool"},
        "models": {"actor": {"trainable": True, "path": "models/actor"}},
        "calls": {"train": {"kind": "train", "model": "actor", "loss": {"terms": {"cross_entropy": {}}}}},
    }


def sft_beside(**terms: Tree) -> Tree:
    """A train call of the actor on each row's own sequence, beside what is sampled."""
    return {"kind": "train", "model": "actor", "samples": "data", "loss": {"terms": terms or {"cross_entropy": {}}}}


def dpo_tree() -> Tree:
    """Direct preference optimisation on pairs of the data."""
    tree = change(sft_tree(), {"name": "dpo", "models.ref": {"init": "actor"}})
    ref = {"kind": "inference", "model": "ref", "output": "logprobs", "writes": ["ref_logprobs"]}
    loss = {"terms": {"preference": {"beta": 0.1}}, "aggregate": {"kind": "pair_mean"}}
    return change(tree, {"calls.ref_logp": ref, "calls.train.loss": loss})


def online_dpo_tree() -> Tree:
    """The same on pairs that the actor samples."""
    tree = change(dpo_tree(), {"name": "online_dpo", "inputs": {"prompt": "group tokens"}})
    return change(tree, {"calls.rollout": {"kind": "generate", "model": "actor", "n": 2}})


def reward_model_tree() -> Tree:
    """A reward model from pairs of the data."""
    loss = {"terms": {"pairwise_score": {}}, "aggregate": {"kind": "pair_mean"}}
    return change(sft_tree(), {"name": "rm", "models.actor.head": "score", "calls.train.loss": loss})


def judge_tree(n: int = 4) -> Tree:
    """An actor, its greedy responses as a baseline, and a frozen judge that reads each sample."""
    return {
        "name": "judge",
        "inputs": {"prompt": "group tokens", "answer": "group text"},
        "models": {"actor": {"trainable": True, "path": "models/actor"}, "judge": {"path": "models/judge"}},
        "calls": {
            "rollout": {"kind": "generate", "model": "actor", "n": n},
            "greedy": {"kind": "generate", "model": "actor", "temperature": 0.0},
            "ask": _function(reads={"text": "rollout.text"}, writes={"question": "sample text"}),
            "judge": {"kind": "generate", "model": "judge", "reads": ["question"], "temperature": 0.0},
            "reward": _function(reads={"text": "judge.text"}, writes={"reward": "sample float32"}),
            "baseline": _function(
                reads={"text": "greedy.text", "answer": "answer"}, over="group", writes={"baseline": "group float32"}
            ),
            "advantage": {
                "kind": "advantage",
                "reads": ["reward"],
                "steps": {"center": {"by": "key", "key": "baseline"}, "return": {}},
            },
            "train": {
                "kind": "train",
                "model": "actor",
                "samples": "rollout",
                "loss": {"terms": {"policy": {"kind": "policy_gradient", "off_policy": {"kind": "decoupled"}}}},
            },
        },
    }


def debate_tree(n: int = 4) -> Tree:
    """Two trained actors: the second answers the first, and each is trained on its own samples."""
    reward = "sample float32"
    policy = {"terms": {"policy": {"kind": "policy_gradient", "advantage": "pro_advantages"}}}
    return {
        "name": "debate",
        "inputs": {"prompt": "group tokens"},
        "models": {"pro": {"trainable": True, "path": "models/pro"}, "con": {"trainable": True, "path": "models/con"}},
        "calls": {
            "first": {"kind": "generate", "model": "pro", "n": n},
            "ask": _function(reads={"text": "first.text"}, writes={"question": "sample text"}),
            "second": {"kind": "generate", "model": "con", "reads": ["question"]},
            "score": _function(
                reads={"one": "first.text", "other": "second.text"}, writes={"pro_reward": reward, "con_reward": reward}
            ),
            "pro_gain": {"kind": "advantage", "reads": ["pro_reward"], "writes": ["pro_advantages"], "steps": {}},
            "con_gain": {"kind": "advantage", "reads": ["con_reward"], "writes": ["con_advantages"], "steps": {}},
            "pro_train": {"kind": "train", "model": "pro", "loss": policy},
            "con_train": {
                "kind": "train",
                "model": "con",
                "loss": {"terms": {"policy": {"kind": "policy_gradient", "advantage": "con_advantages"}}},
            },
        },
    }


def _function(**fields: Any) -> Tree:
    return {"kind": "function", "fn": "m:f"} | fields


TREES: dict[str, Callable[[], Tree]] = {
    "judge_tree": judge_tree,
    "debate_tree": debate_tree,
    "rl_tree": rl_tree,
    "sft_tree": sft_tree,
    "dpo_tree": dpo_tree,
    "online_dpo_tree": online_dpo_tree,
    "reward_model_tree": reward_model_tree,
}


# --- random graphs ----------------------------------------------------------------------------------------------------

_FLOAT_KEYS = ("group float32", "sample float32", "sample int64", "sample bool", "sample text", "sample json")


@st.composite
def _rl_algorithms(draw: st.DrawFn) -> Tree:
    """An RL graph with a random advantage, loss, and set of roles."""
    temperature = draw(st.sampled_from([0.7, 1.0, 1.3]))
    tree = rl_tree(temperature, draw(st.integers(2, 16)))
    critic, kl_loss, kl_reward = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    calls = tree["calls"]
    steps: Tree = {}
    if draw(st.booleans()):
        steps["overlong"] = {"start": 10, "limit": 20}
    if kl_reward:
        coef = draw(st.sampled_from([0.05, {"init": 0.05, "target": 6.0}]))
        steps["kl_penalty"] = {"to": "ref_logprobs", "coef": coef}
    if critic:
        steps["gae"] = {}
    elif draw(st.booleans()):
        steps["return"] = {"gamma": 0.99}
    steps["center"] = {"by": draw(st.sampled_from(["group", "leave_one_out", "batch"]))}
    if draw(st.booleans()):
        steps["scale"] = {"by": draw(st.sampled_from(["group", "batch"]))}
    calls["advantage"]["steps"] = steps
    if not critic:
        del calls["values"], calls["train_critic"], tree["models"]["critic"]
    if not kl_loss:
        del calls["train"]["loss"]["terms"]["kl"]
    if not (kl_loss or kl_reward):
        del calls["ref_logp"], tree["models"]["ref"]
    policy = calls["train"]["loss"]["terms"]["policy"]
    policy["ratio"] = draw(st.sampled_from(["token", "sequence", "none"]))
    policy["clip"] = draw(st.sampled_from([{"kind": "none"}, {"kind": "two_sided"}, {"kind": "stop_gradient"}]))
    policy["off_policy"] = {"kind": draw(st.sampled_from(["truncated", "decoupled", "masked"]))}
    if draw(st.booleans()):
        calls["train"]["loss"]["terms"]["entropy"] = {"coef": 0.01}
    return tree


@st.composite
def _extras(draw: st.DrawFn, tree: Tree, filters: bool = True) -> Tree:
    """The graph with random functions and inferences hung on its keys, and its calls in a random file order."""
    tree = copy.deepcopy(tree)
    keys = [key for key, text in tree["inputs"].items() if text.startswith("group")]
    generates = [name for name, call in tree["calls"].items() if call["kind"] == "generate"]
    keys += ["text", "finished"] if len(generates) == 1 else [f"{name}.text" for name in generates]
    early = set(keys)  # there before a batch is made
    for i in range(draw(st.integers(0, 5))):
        reads = draw(st.lists(st.sampled_from(keys), max_size=4, unique=True)) if keys else []
        text = draw(st.sampled_from(_FLOAT_KEYS))
        over = draw(st.sampled_from(["group", "batch"] if text.startswith("group") else ["sample", "group", "batch"]))
        in_time = over != "batch" and early.issuperset(reads)
        keeps = filters and in_time and "keep" not in keys
        of = draw(st.sampled_from(["group", "sample"])) if over == "group" else "sample"
        writes = {f"key_{i}": text} | ({"keep": f"{of} bool"} if keeps else {})
        keys += writes
        early |= set(writes) if in_time else set()
        words = {key.replace(".", "_"): key for key in reads} if len(generates) > 1 else reads
        tree["calls"][f"extra_{i}"] = {"kind": "function", "fn": "m:f", "reads": words, "writes": writes, "over": over}
    for i in range(draw(st.integers(0, 2))):
        head, output = draw(st.sampled_from([("lm", "logprobs"), ("value", "values"), ("score", "scores")]))
        tree["models"][f"judge_{i}"] = {"path": f"models/judge_{i}", "head": head}
        call = {"kind": "inference", "model": f"judge_{i}", "output": output, "writes": [f"judged_{i}"]}
        tree["calls"][f"judge_call_{i}"] = call
    order = draw(st.permutations(list(tree["calls"])))
    return change(tree, {"calls": {name: tree["calls"][name] for name in order}})


def trees() -> st.SearchStrategy[Tree]:
    """Random valid graphs."""
    fixed = st.sampled_from(
        [sft_tree(), dpo_tree(), online_dpo_tree(), reward_model_tree(), judge_tree(), judge_tree(1), debate_tree()]
    )
    return st.one_of(_rl_algorithms(), _rl_algorithms(), fixed).flatmap(_extras)


def rl_trees() -> st.SearchStrategy[Tree]:
    """Random valid graphs that hold the whole of `rl_tree`."""
    made = st.builds(rl_tree, st.sampled_from([0.7, 1.0, 1.3]), st.integers(2, 16))
    return made.flatmap(lambda tree: _extras(tree, filters=False))


# --- one break per rule -----------------------------------------------------------------------------------------------


class Break(msgspec.Struct, frozen=True):
    """Changes that turn a valid graph into one that exactly one rule refuses: of the tree, and of the run's facts."""

    changes: dict[str, Any] = msgspec.field(default_factory=dict)
    facts: Facts = msgspec.field(default_factory=Facts)
    base: Callable[[], Tree] = rl_tree


BREAKS: dict[str, Break] = {
    "no_calls": Break({"calls": {}, "models": {}}),
    "switch_problems": Break({"models.ref.when": "false"}),
    "plain_name": Break({"calls.log-it": _function(reads=["text"])}),
    "key_type_text": Break({"calls.reward.writes.reward": "sample float23"}),
    "missing_producer": Break({"calls.reward.reads": ["text", "answr"]}),
    "duplicate_producer": Break({"calls.again": _function(reads=["text"], writes={"reward": "sample float32"})}),
    "cycle": Break({"calls.reward.reads": ["text", "advantages"]}),
    "key_type": Break({"calls.reward.writes.reward": "sample text"}),
    "key_meaning": Break({"calls.train.loss.terms.kl.to": "values"}),
    "keep_type": Break({"calls.filter": _function(over="group", reads=["reward"], writes={"keep": "sample int32"})}),
    "late_prompt": Break({"calls.ask.over": "batch"}, base=judge_tree),
    "leading_prompt": Break(
        {
            "calls.rollout.reads": ["made"],
            "calls.greedy": DELETE,
            "calls.baseline": DELETE,
            "calls.advantage.steps.center": DELETE,
            "calls.make": _function(reads=["prompt"], over="group", writes={"made": "group tokens"}),
        },
        base=judge_tree,
    ),
    "later_samples": Break({"calls.judge.n": 2}, base=judge_tree),
    "unknown_samples": Break({"calls.train.samples": "rollouts"}, base=judge_tree),
    "ambiguous_samples": Break({"calls.train.samples": DELETE}, base=judge_tree),
    "data_sequences": Break({"calls.sft": sft_beside(cross_entropy={"key": "advantages"})}),
    "mixed_samples": Break({"calls.con_gain.samples": "first"}, base=debate_tree),
    "input_shape": Break({"inputs.score": "sample float32"}),
    "call_shape": Break({"calls.ref_logp.writes": ["ref_logprobs", "more"]}),
    "unknown_role": Break({"calls.ref_logp.model": "reff"}),
    "frozen_trained": Break({"models.actor.trainable": False}),
    "trainable_untrained": Break({"models.ref.trainable": True}),
    "policy_not_sampled": Break({"calls.rollout.model": "ref"}),
    "head_mismatch": Break({"models.ref.head": "score"}),
    "own_tokenizer": Break({"calls.ref_logp.tokenizer": "own"}),
    "init_unknown": Break({"models.ref.init": "actr"}),
    "model_without_path": Break({"models.actor.path": None}, Facts(groups=8)),
    "ema_rate": Break({"models.actor.ema_rate": 0.9}),
    "routing_replay": Break({"models.critic.routing_replay": True}),
    "optimizer_disagreement": Break(
        {
            "calls.polish": {
                "kind": "train",
                "model": "actor",
                "optimizer": {"eps": 1e-6, "weight_decay": 0.1},
                "loss": {"terms": {"cross_entropy": {}}},
            }
        }
    ),
    "function_name": Break({"calls.reward.fn": "exact_mach"}),
    "function_arguments": Break({"calls.reward.fn": "format_match", "calls.reward.reads": ["text"]}),
    "function_level": Break({"calls.filter": _function(reads=["reward"], writes={"share": "group float32"})}),
    "function_environment": Break({"calls.reward.env": ["JUDGE_KEY=secret"]}),
    "function_ids": Break({"calls.reward.ids": ["answer"]}),
    "few_samples": Break(
        {"calls.filter": _function(reads=["reward"], writes={"keep": "sample bool"}) | {"min_samples": 99}}
    ),
    "group_of_one": Break({"calls.rollout.n": 1, "calls.advantage.steps.center.by": "group"}),
    "two_returns": Break({"calls.advantage.steps.return": {}}),
    "reward_after_return": Break({"calls.advantage.steps.kl_penalty": {"to": "ref_logprobs"}}),
    "overlong_after_baseline": Break(
        {"calls.advantage.steps": {"center": {"by": "group"}, "overlong": {"start": 10, "limit": 20}, "gae": {}}}
    ),
    "center_key": Break({"calls.advantage.steps.center": {"by": "key"}}),
    "overlong_limits": Break({"calls.advantage.steps": {"overlong": {"start": 30, "limit": 20}, "gae": {}}}),
    "adaptive_horizon": Break(
        {
            "calls.advantage.steps": {
                "kl_penalty": {"to": "ref_logprobs", "coef": {"init": 0.1, "target": 6.0, "horizon": 10}},
                "gae": {},
            }
        },
        Facts(groups=64),
    ),
    "greedy_sampling": Break({"calls.rollout.temperature": 0.0}),
    "behaviour_temperature": Break({"calls.rollout.temperature": 0.5}),
    "truncated_sampling": Break({"calls.rollout.top_p": 0.9}),
    "reference_temperature": Break({"calls.ref_logp.temperature": 0.5}),
    "empty_loss": Break({"calls.train_critic.loss.terms": {}}),
    "pair_aggregate": Break({"calls.train.loss.aggregate": {"kind": "pair_mean"}}),
    "pair_size": Break({"calls.rollout.n": 4}, base=online_dpo_tree),
    "unknown_input": Break(facts=Facts(data_columns={"promt": "question"})),
    "missing_column": Break(
        facts=Facts(data_columns={"prompt": "question", "answer": "anser"}, columns=("question", "answer"))
    ),
    "small_data": Break(facts=Facts(n_rows=10, groups=64)),
    "uneven_minibatches": Break({"calls.train.minibatches": 7}, Facts(groups=64)),
    "stale_uncorrected": Break({"calls.train.loss.terms.policy.off_policy": {"kind": "ignore"}}, Facts(staleness=2)),
    "empty_mask": Break({"calls.train.loss.terms.policy.off_policy": {"kind": "masked", "low": 2.0}}),
    "stale_without_cause": Break(facts=Facts(staleness=1), base=sft_tree),
    "surplus_without_cause": Break(facts=Facts(surplus=16), base=sft_tree),
}
