"""Evaluations of graphs that generate nothing: the loss of held-out rows, as transformers has it, in every layout."""

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from realgraph.graphs.functions import KEEP
from realgraph.graphs.graph import Graph
from realgraph.graphs.maths import CrossEntropy, Loss, Preference
from realgraph.graphs.spec import Function, Inference, Train
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import Plan, Turn
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Execute, Reallocate
from tests.runs import finish, home, merged, records, write_run
from tests.schedulers import check_evaluations, run_by_copies
from tests.shapes import Shape, build_graph, job_of, plan_of
from tests.simulated_rollouts import N_EVAL_ROWS
from tests.simulator import Simulator

__all__ = ["home"]

N_ROWS = 21  # of which the last one is too long; not a multiple of the groups of a step, nor of the ranks
SFT: dict[str, Any] = {
    "graph": "sft",
    "params": {"lr": 3.0e-3},
    "data": {"columns": {"prompt": "prompt", "response": "answer", "answer": None}},
    "steps": 4,
    "checkpoint": {"every": 1},
    "eval": {"every": 2, "data": {"path": "held_out.jsonl"}},
}
DPO = """
name: dpo
inputs: {tokens: sample tokens, mask: token bool}
models: {actor: {trainable: true}, ref: {init: actor}}
calls:
  ref_logp: {kind: inference, model: ref, output: logprobs, writes: [ref_logprobs]}
  train:
    kind: train
    model: actor
    lr: 3.0e-3
    loss: {aggregate: {kind: pair_mean}, terms: {preference: {beta: 0.1, ref: ref_logprobs}}}
"""

PAIRS: dict[str, Any] = {"graph": "dpo.yaml", "params": None, "data": {"path": "pairs.jsonl", "columns": None}}
WEIGHED = """
name: weighed
inputs: {tokens: sample tokens, mask: token bool, level: group float32}
models: {actor: {trainable: true}}
calls:
  filter: {kind: function, fn: "weights:keep", over: group, reads: [level], writes: {keep: group bool}}
  weigh: {kind: function, fn: "weights:weigh", reads: [level], writes: {weight: sample float32}}
  train: {kind: train, model: actor, lr: 1.0e-3, loss: {terms: {cross_entropy: {key: weight}}}}
"""
WEIGHTS = """
def keep(level: float) -> bool:
    return level != 1.0

def weigh(level: float) -> float:
    return level / 4
"""


def held_out(home: Path, *, pairs: bool) -> list[dict[str, str]]:
    """Rows in `held_out.jsonl`, and in `pairs.jsonl` such to train on; returns those that are not too long."""
    lines = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in lines]
    if pairs:
        rows = [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1] + "7"} for row in rows
        ]
    for name, chosen in (("held_out", rows[: N_ROWS - 1]), ("pairs", rows[N_ROWS:])):
        longer = [{**rows[0], "prompt": "1+1+1+" + rows[0]["prompt"]}] if name == "held_out" else []
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen + longer))
    return rows[: N_ROWS - 1]


def logprobs(folder: Path, prompt: str, response: str) -> torch.Tensor:
    """The log-probabilities of a response's tokens and the end, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([*start, *tokenizer(response)["input_ids"], tokenizer.eos_token_id])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0].double()
    found = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    return found[len(start) - 1 :]


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of evaluations by their step."""
    return {record["step"]: record["metrics"] for record in records(folder, "eval")}


def expected_sft(folder: Path, rows: list[dict[str, str]]) -> float:
    """The mean negative log-likelihood of all response tokens."""
    return -float(torch.cat([logprobs(folder, row["prompt"], row["answer"]) for row in rows]).mean())


@pytest.mark.slow
def test_the_loss_of_fine_tuning_is_that_of_transformers_and_the_least_is_best(home: Path) -> None:
    rows = held_out(home, pairs=False)
    write_run(home, "tuned", SFT)
    folder = finish(home, "run", "tuned.yaml", name="tuned").folder
    found = evaluations(folder)
    assert sorted(found) == [0, 2, 4]
    for step, metrics in found.items():
        model = home / "model" if step == 0 else folder / "checkpoints" / f"step-{step:06d}" / "actor"
        if model.exists():
            nll = expected_sft(model, rows)
            assert metrics["loss"] == pytest.approx(nll, abs=1e-5)
            assert metrics["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
        assert metrics["skipped"] == pytest.approx(1 / N_ROWS)
    losses = {step: metrics["loss"] for step, metrics in found.items()}
    assert losses[4] < losses[0], "it has learnt nothing"
    best = [record["step"] for record in records(folder, "eval") if record["best"]]
    assert best[-1] == min(losses, key=losses.__getitem__)
    alone = finish(
        home, "eval", "tuned.yaml", "--checkpoint", str(folder / "checkpoints" / "step-000004"), name="alone"
    )
    assert f"loss {losses[4]:.4g}" in alone.output()


@pytest.mark.slow
def test_evaluations_change_nothing_of_what_is_trained(home: Path) -> None:
    held_out(home, pairs=False)
    write_run(home, "with", SFT)
    write_run(home, "without", SFT, {"eval": None})
    losses = [
        [record["metrics"]["train/loss"] for record in records(finish(home, "run", f"{name}.yaml", name=name).folder)]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == SFT["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("pin", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2, "sharding": "fsdp"}])
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_every_layout_has_the_loss_of_one_process(home: Path, algorithm: str, pin: dict[str, Any]) -> None:
    held_out(home, pairs=algorithm == "dpo")
    (home / "dpo.yaml").write_text(DPO)
    run = SFT if algorithm == "sft" else merged(SFT, PAIRS)
    names = [f"{algorithm}-{'-'.join(pin)}-{n}" for n in (1, 2)]
    write_run(home, names[0], run, {"cluster": {"devices": 1}})
    write_run(home, names[1], run, {"allocation": {"train": {"devices": 2, **pin}}})
    one, other = (evaluations(finish(home, "run", f"{name}.yaml", name=name).folder) for name in names)
    assert one.keys() == other.keys() == {0, 2, 4}
    for metrics in (one[0], other[0]) if algorithm == "dpo" else ():
        del metrics["accuracy"]  # before the first step all margins are 0, but for rounding
    for step, metrics in one.items():
        assert other[step] == pytest.approx(metrics, rel=1e-4, abs=1e-5), step
    assert one[4]["loss"] < one[0]["loss"]
    if algorithm == "dpo":
        assert one[0]["loss"] == pytest.approx(math.log(2)) and one[0]["margin"] == pytest.approx(0, abs=1e-6)
        assert one[4]["accuracy"] > 0.5


@pytest.mark.slow
def test_a_checkpoint_is_compared_with_the_reference_of_its_run(home: Path) -> None:
    held_out(home, pairs=True)
    (home / "dpo.yaml").write_text(DPO)
    write_run(home, "pairs", merged(SFT, PAIRS))
    folder = finish(home, "run", "pairs.yaml", name="pairs").folder
    loss = evaluations(folder)[4]["loss"]
    last = str(folder / "checkpoints" / "step-000004")
    assert f"loss {loss:.4g}" in finish(home, "eval", "pairs.yaml", "--checkpoint", last, name="compared").output()


@pytest.mark.slow
def test_functions_filter_and_weigh_held_out_rows(home: Path) -> None:
    (home / "weighed.yaml").write_text(WEIGHED)
    (home / "weights.py").write_text(WEIGHTS)
    rows = held_out(home, pairs=False)
    levels = [float(n % 4) for n in range(len(rows))]
    for name in ("levels", "held_out"):
        lines = [json.dumps({**row, "level": level}) for row, level in zip(rows, levels, strict=True)]
        (home / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    run = {"graph": "weighed.yaml", "params": None, "data": {"path": "levels.jsonl"}, "steps": 1}
    write_run(home, "weighed_run", merged(SFT, run))
    found = evaluations(finish(home, "run", "weighed_run.yaml", name="weighed_run").folder)
    kept = [(row, level / 4) for row, level in zip(rows, levels, strict=True) if level > 1]  # of weight 0: not counted
    parts = [-weight * logprobs(home / "model", row["prompt"], row["answer"]) for row, weight in kept]
    assert found[0]["loss"] == pytest.approx(float(torch.cat(parts).mean()), abs=1e-5)
    assert found.keys() == {0, 1} and found[0]["skipped"] == 0


# --- the Scheduler ----------------------------------------------------------------------------------------------------


def pairs_graph() -> Graph:
    """Rows that a function filters, and numbers of the trained role and of its reference."""
    train = Train(model="actor", loss=Loss(terms={"term": Preference()}), minibatches=2)
    return build_graph(
        [
            ("ref_logp", Inference("ref", "logprobs", ("ref_logprobs",)), ("tokens",), ("ref_logprobs",)),
            ("old_logp", Inference("actor", "logprobs", ("logp",)), ("tokens",), ("logp",)),
            ("filter", Function("m:f", ("text",), {KEEP: "group"}, over="group"), ("tokens",), (KEEP,)),
            ("shape", Function("shape", over="group"), ("logp", "ref_logprobs"), ("shaped",)),
            ("train", train, ("tokens", "mask", "ref_logprobs", "shaped"), ()),
            ("again", Train(model="critic", loss=Loss(terms={"term": CrossEntropy()})), ("tokens", "mask"), ()),
        ],
        ("tokens", "mask"),
        2,
    )


def apart(plan: Plan, name: str) -> Plan:
    """The plan with a call on the first device alone, by its own copy of the weights."""
    own = plan.allocations[name]
    moved = msgspec.structs.replace(own, layout=msgspec.structs.replace(own.layout, mesh=DeviceMesh(0, 1), dp=1, tp=1))
    orders = {device: tuple(turn for turn in order if turn.call != name) for device, order in plan.orders.items()}
    orders[0] = (Turn(name), *orders[0])
    return msgspec.structs.replace(plan, allocations={**plan.allocations, name: moved}, orders=orders)


def simulated(seed: int) -> Simulator:
    rng, graph = random.Random(seed), pairs_graph()
    shape = Shape("dpo", n_workers=2, split=seed % 2 == 0, groups=2, eval_every=1 + seed % 2, seed=seed, steps=3)
    job = job_of(shape, apart(plan_of(shape, graph), "old_logp"), graph)
    scheduler = Scheduler(job, range(shape.n_workers), 1000, None, N_EVAL_ROWS)
    return Simulator(shape, rng, scheduler, graph=graph)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_goes_once_through_every_train_call_by_the_newest_weights(seed: int) -> None:
    simulator = simulated(seed)
    check_evaluations(simulator, 1 + seed % 2)
    moved = [send for send in simulator.log if isinstance(send.command, Reallocate)]
    assert moved, "the copy of `old_logp` has kept its first weights"
    seen = [send.command for send in simulator.log if isinstance(send.command, Execute) and send.command.held_out]
    assert {command.call for command in seen} == {"filter", "ref_logp", "old_logp", "shape", "train", "again"}


@pytest.mark.parametrize("seed", range(4))
def test_an_evaluation_in_hand_is_part_of_the_schedulers_image(seed: int) -> None:
    simulator = simulated(seed)
    assert run_by_copies(simulator) > 10
