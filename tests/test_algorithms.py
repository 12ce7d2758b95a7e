"""Algorithms as users write them, each really run: overrides of the library, the README's graph, pairs, stale data.

What can be known of a step without running it again is checked against its metrics.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.runs import BASE, finish, home, numbers, records, write_run

pytest.importorskip("torch")
__all__ = ["home"]

ROOT = Path(__file__).parent.parent
FUNCTIONS = """
import asyncio, json
from pathlib import Path

def score(text: str, answer: str) -> float:
    return sum(map(int, text)) % 7 / 7 if text.isdigit() else 0.0

async def slow_score(text: str, answer: str) -> float:
    await asyncio.sleep(0.002)
    return score(text, answer)

def scores(text: list[str], answer: list[str]) -> list[float]:
    return [score(*pair) for pair in zip(text, answer)]

def noted(text: str, tokens: list[int]) -> float:
    line = {"tokens": tokens, "reward": score(text, "")}
    with (Path(__file__).parent / "seen.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
    return line["reward"]

def scaled(batch, running, factor):
    return running * factor

def entropy_like(batch, outputs, weight):
    return weight * outputs.logprobs * batch.key("advantages")
"""
GRPO: dict[str, Any] = {
    "graph": "grpo",
    "steps": 2,
    "params": {"group_size": 4, "lr": 3.0e-3},
    "calls": {"reward": {"fn": "users:score"}},
}
_RAN: dict[str, Path] = {}


def ran(home: Path, name: str, *parts: dict[str, Any], overrides: tuple[str, ...] = ()) -> Path:
    """The directory of a run of this name, run once."""
    if name not in _RAN:
        (home / "users.py").write_text(FUNCTIONS)
        finish(home, "run", str(write_run(home, name, *parts)), *overrides, name=name)
        _RAN[name] = home / name
    return _RAN[name]


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [record["metrics"] for record in records(folder)]


def neighbours() -> dict[str, tuple[str, ...]]:
    """The overrides that the head of grpo.yaml gives for each algorithm, for samples of 4 tokens."""
    head = (ROOT / "graphs/library/grpo.yaml").read_text().partition("format: 1")[0]
    table = head.partition("runs them):\n")[2].partition("# A new step")[0]
    lines = [line.removeprefix("#") for line in table.splitlines()]
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        named = re.match(r"   (\S.*?)  +(.*)", line)
        name, rest = (named[1], named[2]) if named else (name, line.strip())
        found[name] = f"{found.get(name, '')} {rest}"
    texts = {name: text.replace("1024", "4").replace("768", "2") for name, text in found.items()}
    return {name: tuple(shlex.split(text)) for name, text in texts.items()}


NEIGHBOURS = neighbours()


def test_the_head_of_grpo_names_what_the_readme_promises() -> None:
    assert NEIGHBOURS.keys() == {"Dr. GRPO", "DAPO", "GSPO", "RLOO", "REINFORCE++", "LitePPO", "CISPO"}
    promised = " ".join((ROOT / "README.md").read_text().split())
    assert "DAPO, Dr.GRPO, GSPO, RLOO, REINFORCE++, CISPO and LitePPO are overrides of `grpo`" in promised


@pytest.mark.slow
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_neighbour_of_grpo_trains(home: Path, name: str) -> None:
    slug = re.sub(r"\W", "_", name)
    steps = steps_of(ran(home, slug, GRPO, overrides=NEIGHBOURS[name]))
    assert len(steps) == 2
    for step in steps:
        assert step["train/grad_norm"] > 0
        assert step["train/ratio"] == pytest.approx(1.0, abs=1e-6)  # one optimizer step a batch: it is on-policy
        if name in ("DAPO", "LitePPO", "REINFORCE++"):  # with a ratio of 1 the loss is minus the mean advantage
            assert step["train/loss"] == pytest.approx(-step["advantage/advantage"], abs=1e-5)
    if name == "DAPO":
        # Groups of equal rewards were sampled, left out, and made up for; the penalty came before the baseline.
        assert all(step["batch/groups"] == 8 for step in steps)
        assert sum(step["batch/dropped_groups"] for step in steps) > 0
        assert all(step["advantage/overlong"] > 0 and abs(step["advantage/advantage"]) < 0.5 for step in steps)
        assert all(step["advantage/equal_groups"] == 0 for step in steps)
    if name == "REINFORCE++":
        assert abs(steps[0]["advantage/kl"]) < 1e-6 < steps[1]["advantage/kl"]
        assert steps[0]["advantage/advantage"] == pytest.approx(0.0, abs=1e-6)


def test_the_algorithm_of_the_readme_runs_as_it_stands(home: Path) -> None:
    blocks = re.findall(r"```(?:yaml|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    files = {re.match(r"# (\S+?)[:,]", block)[1]: block for block in blocks if re.match(r"# \S+?[:,]", block)}  # type: ignore[index]
    assert {"rloo.yaml", "my_rewards.py", "run.yaml"} <= files.keys()
    for name, text in files.items():
        (home / name).write_text(text)
    here = ["models.actor.path=model", "data.columns.prompt=prompt", "eval.data.columns.prompt=prompt", "steps=2"]
    finish(home, "run", "run.yaml", *here, "batch.max_new_tokens=4", "outputs.dir=readme", name="readme")
    steps = steps_of(home / "readme")
    assert [step["batch/samples"] for step in steps] == [512, 512]
    assert all(0 <= step["reward/reward"] <= 1 for step in steps)


@pytest.mark.slow
def test_a_function_may_be_async_or_take_the_batch_at_once(home: Path) -> None:
    one = numbers(ran(home, "sync", GRPO))
    for name, call in {"async": {"fn": "users:slow_score"}, "whole": {"fn": "users:scores", "over": "batch"}}.items():
        other = numbers(ran(home, name, GRPO, {"calls": {"reward": call}}))
        for step, metrics in one.items():
            assert other[step] == pytest.approx(metrics, rel=1e-4, abs=1e-5), name


def test_a_step_and_a_term_of_ones_own(home: Path) -> None:
    own = {
        "advantage": {"steps": {"half": {"kind": "apply", "fn": "users:scaled", "args": {"factor": 0.5}}}},
        "train": {
            "loss": {
                "terms": {
                    "more": {
                        "kind": "apply",
                        "fn": "users:entropy_like",
                        "reads": ["advantages"],
                        "args": {"weight": 0.1},
                    }
                }
            }
        },
    }
    plain, mine = steps_of(ran(home, "sync", GRPO))[0], steps_of(ran(home, "own", GRPO, {"calls": own}))[0]
    assert mine["advantage/advantage_abs"] == pytest.approx(plain["advantage/advantage_abs"] / 2, rel=1e-5)
    assert mine["train/loss"] == pytest.approx(mine["train/policy_loss"] + mine["train/more_loss"], abs=1e-6)
    assert abs(mine["train/more_loss"]) > 1e-4


HELD: dict[str, Any] = {"params": {"kl_coef": 0.05}, "runtime": {"verify_weights": 1}}
FOLLOWING: dict[str, Any] = {**HELD, "models": {"ref": {"ema_rate": 0.5}}}


def test_a_reference_that_follows_stays_nearer(home: Path) -> None:
    still = steps_of(ran(home, "still", GRPO, HELD))
    follows = steps_of(ran(home, "follows", GRPO, FOLLOWING))
    assert still[0]["train/kl"] == follows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < follows[1]["train/kl"] < still[1]["train/kl"]
    for step in (still[1], follows[1]):
        assert step["train/loss"] == pytest.approx(step["train/policy_loss"] + step["train/kl_loss"], abs=1e-6)
        assert step["train/kl_loss"] == pytest.approx(0.05 * step["train/kl"], rel=0.2)  # means of samples, of tokens


def test_a_reference_follows_in_another_layout_too(home: Path) -> None:
    """Its average moves by parts, which come from where they lie."""
    whole = steps_of(ran(home, "follows", GRPO, FOLLOWING))
    layouts = {"train": {"devices": 2, "tp": 2}, "ref_logp": {"devices": 2, "sharding": "fsdp"}}
    apart = steps_of(ran(home, "follows_apart", GRPO, FOLLOWING, {"allocation": layouts}))
    plan = json.loads((home / "follows_apart/plan.json").read_text())["allocations"]
    assert (plan["train"]["layout"]["tp"], plan["ref_logp"]["layout"]["sharding"]) == (2, "fsdp")
    for ours, theirs in zip(apart, whole, strict=True):
        assert ours["train/kl"] == pytest.approx(theirs["train/kl"], rel=1e-3, abs=1e-6)
    assert whole[-1]["train/kl"] > 0


PAIRS = {
    "dpo": """
name: dpo
inputs: {tokens: sample tokens, mask: token bool}
models: {actor: {trainable: true}, ref: {init: actor}}
calls:
  ref_logp: {kind: inference, model: ref, output: logprobs, writes: [ref_logprobs]}
  train: {kind: train, model: actor, lr: 3.0e-3, loss: {aggregate: {kind: pair_mean}, terms: {preference: {beta: 0.1}}}}
""",
    "rm": """
name: rm
inputs: {tokens: sample tokens, mask: token bool}
models: {actor: {trainable: true, head: score}}
calls:
  train: {kind: train, model: actor, lr: 3.0e-3, loss: {aggregate: {kind: pair_mean}, terms: {pairwise_score: {}}}}
""",
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_a_better_and_a_worse_answer(home: Path, name: str) -> None:
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    pairs = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": r["answer"] + "0"} for r in rows]
    (home / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (home / f"{name}-graph.yaml").write_text(PAIRS[name])
    data = {key: value for key, value in BASE["data"].items() if key != "columns"} | {"path": "pairs.jsonl"}
    file = write_run(home, name, {"graph": f"{name}-graph.yaml", "steps": 4})
    file.write_text(json.dumps({**json.loads(file.read_text()), "data": data}))
    finish(home, "run", str(file), name=name)
    steps = steps_of(home / name)
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)  # nothing is preferred yet: log 2
    assert steps[-1]["train/loss"] < 0.68
    assert all(step["batch/samples"] == 16 and step["batch/groups"] == 8 for step in steps)


def test_a_run_keeps_to_the_staleness_of_its_plan(home: Path) -> None:
    """A synchronous plan under a bound of three steps: nothing is generated ahead."""
    file = write_run(home, "fresh", GRPO, {"staleness": 3, "steps": 4})
    plan = home / "fresh-plan.json"
    finish(home, "plan", str(file), "staleness=0", "--brief", "--out", str(plan), name="fresh-plan")
    finish(home, "run", str(file), "--plan", str(plan), name="fresh")
    assert [step["staleness/max"] for step in steps_of(home / "fresh")] == [0.0] * 4


def test_the_losses_of_terms_add_up_to_the_loss(home: Path) -> None:
    """Also where groups of equal rewards were left out of the passes: they count as zeros in both."""
    steps = steps_of(ran(home, "Dr__GRPO", GRPO, overrides=NEIGHBOURS["Dr. GRPO"]))
    assert max(step["train/skipped"] for step in steps) > 0
    for step in steps:
        assert step["train/policy_loss"] == pytest.approx(step["train/loss"], rel=1e-5)


@pytest.mark.parametrize("scored", [True, False])
def test_a_run_that_only_generates_writes_every_sample(home: Path, scored: bool) -> None:
    name = f"samples-{scored}"
    params = {"n": 2, "reward_fn": "users:score" if scored else ""}
    data = {"shuffle": False, **({} if scored else {"columns": None})}
    folder = ran(home, name, {"graph": "generate", "steps": 2, "params": params, "data": data})
    files = sorted((folder / "samples").iterdir())
    lines = sorted((json.loads(line) for file in files for line in file.read_text().splitlines()), key=_sample)
    assert [_sample(line) for line in lines] == [(group, place) for group in range(2 * 8) for place in range(2)]
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["prompt"] == rows[line["group"]]["prompt"]
        assert 1 <= line["new_tokens"] <= 4
        assert len(line["text"]) <= line["new_tokens"] - line["finished"]  # special tokens have no text
        if scored:
            assert line["answer"] == rows[line["group"]]["answer"]
            text = line["text"]
            assert line["reward"] == pytest.approx(sum(map(int, text)) % 7 / 7 if text.isdigit() else 0.0)
    if scored:
        means = [step["reward/reward"] for step in steps_of(folder)]
        assert sum(line["reward"] for line in lines) / len(lines) == pytest.approx(sum(means) / 2, rel=1e-5)


def _sample(line: dict[str, Any]) -> tuple[int, int]:
    return int(line["group"]), int(line["sample"])


def test_a_step_of_grpo_is_what_the_formula_says(home: Path) -> None:
    """Loss, gradient norm and entropy of one step by plain transformers, from the tokens that a reward function saw."""
    import torch
    from transformers import AutoModelForCausalLM

    call = {"fn": "users:noted", "reads": ["text", "tokens"]}
    metrics = steps_of(ran(home, "formula", GRPO, {"steps": 1, "calls": {"reward": call}}))[0]
    seen = [json.loads(line) for line in (home / "seen.jsonl").read_text().splitlines()]
    # The look at the first rows calls the function too, with texts that neither end nor are as long as a sample.
    samples = [sample for sample in seen if len(sample["tokens"]) == 10 or sample["tokens"][-1] == 12]
    groups: dict[tuple[int, ...], list[Any]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample["tokens"][:6]), []).append(sample)
    assert [len(group) for group in groups.values()] == [4] * 8
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    losses, entropies = [], []
    for group in groups.values():
        rewards = torch.tensor([sample["reward"] for sample in group], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group, advantages, strict=True):
            tokens = torch.tensor(sample["tokens"])
            table = model(tokens[None]).logits[0, 5:-1].log_softmax(-1)
            chosen = table.gather(1, tokens[6:, None]).squeeze(1)
            losses.append(-(torch.exp(chosen - chosen.detach()) * advantage).mean())
            if rewards.max() > rewards.min():  # groups of equal rewards are left out of the passes
                entropies.append(-(table.exp() * table).sum(-1).detach())
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["train/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
    assert metrics["reward/reward"] == pytest.approx(sum(s["reward"] for s in samples) / 32, rel=1e-5)
