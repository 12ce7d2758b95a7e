"""Graphs that generate more than once, for the Scheduler's tests: of a shape, by the checker itself."""

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import Graph
from tests.shapes import Shape
from tests.strategies import DELETE, Tree, change, debate_tree, judge_tree, rl_tree, sft_beside, spec_of, where

GENERATING = ["judge", "debate", "retry", "beside"]


def retry_tree(n: int) -> Tree:
    """A second try of the actor after a function's feedback: only this one is trained on."""
    tree = judge_tree(n)
    again = {"kind": "generate", "model": "actor", "reads": ["question"]}
    changes = {
        "calls.judge": again,
        "calls.train.samples": "judge",
        "calls.reward.reads": {"text": "judge.text", "first": "rollout.text"},
    }
    return change(tree, changes | {"models": {"actor": tree["models"]["actor"]}})


def beside_tree(n: int) -> Tree:
    """A call that trains on a sequence of each row, beside one that trains on samples."""
    away = dict.fromkeys(("models.critic", "calls.values", "calls.train_critic", "calls.advantage.steps.gae"), DELETE)
    return change(rl_tree(n=n), {**away, "calls.sft": sft_beside()})


def generating_graph(shape: Shape) -> Graph:
    """The graph of a shape whose algorithm is one of GENERATING."""
    makers = {"judge": judge_tree, "debate": debate_tree, "retry": retry_tree, "beside": beside_tree}
    tree = makers[shape.algorithm](shape.n)
    debate = shape.algorithm == "debate"
    train, reward = ("pro_train", "pro_reward") if debate else ("train", "reward")
    reference = {"kind": "inference", "model": "ref", "output": "logprobs", "writes": ["ref_logprobs"]}
    init = "pro" if debate else "actor"
    changes: Tree = {
        "models.ref": {"init": init},
        "calls.ref_logp": reference,
        f"calls.{train}.loss.terms.kl": {"to": "ref_logprobs", "coef": 0.1},
        f"calls.{train}.minibatches": shape.minibatches,
        f"calls.{train}.epochs": shape.epochs,
    }
    if shape.filtered:
        writes = {"keep": "sample bool" if shape.varied else "group bool"}
        keep = {"kind": "function", "fn": "m:f", "over": "group", "reads": [reward], "writes": writes}
        early = {"debate": "first.text", "beside": "text"}.get(shape.algorithm, "rollout.text")
        # now of a score that comes after all calls, now of the first samples alone, while others are being made
        changes["calls.filter"] = keep if shape.two_stage else keep | {"reads": {"text": early}}
    return compile_graph(spec_of(change(tree, changes)), where, Facts())
