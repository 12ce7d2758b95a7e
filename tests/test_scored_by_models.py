"""Evaluations whose samples models score: a reward model, a judge that writes, and functions of what these give."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import GENERATED
from realgraph.graphs.maths import Loss, PolicyGradient
from realgraph.graphs.spec import Advantage, Generate, Inference, Train
from realgraph.run_file.compose import check_run
from realgraph.runtime.job.evaluations import scoring_of
from realgraph.runtime.job.job import EvalSpec
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Evaluate, Execute
from tests.generating import GENERATING, generating_graph
from tests.run_texts import place, refused
from tests.runs import BASE, finish, home, merged, records, write_run
from tests.schedulers import check_evaluations, run_by_copies
from tests.shapes import Shape, build_graph, job_of
from tests.simulated_rollouts import N_EVAL_ROWS
from tests.simulator import Simulator

__all__ = ["home", "place"]

EVAL = {"every": 2, "data": {**BASE["data"], "path": "test.jsonl"}}
PPO: dict[str, Any] = {
    "graph": "ppo",
    "models": {"reward_model": {"path": "rm"}},
    "params": {"reward_fn": "", "reward_model": "rm", "actor_lr": 3.0e-3, "minibatches": 2, "group_size": 2},
    "eval": EVAL,
    "steps": 2,
    "checkpoint": {"every": 2},
}
JUDGE: dict[str, Any] = {
    "graph": "judge",
    "models": {"judge": {"path": "model"}},
    "params": {"lr": 3.0e-3, "group_size": 4, "judge_tokens": 3},
    "calls": {"question": {"fn": "judging:ask"}, "reward": {"fn": "judging:read"}},
    "eval": merged(EVAL, {"threshold": 0.4}),
    "steps": 2,
    "checkpoint": {"every": 2},
}
FUNCTIONS = """
def ask(prompt: str, text: str, template: str) -> str:
    return f"{text[:2]}+{text[-2:]}="

def read(text: str, low: float, high: float) -> float:
    return sum(int(character) for character in text if character.isdigit()) % 7 / 7
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"cluster": {"devices": 1}},
    "both": {"allocation": {name: {"first": 0, "devices": 2, "dp": 2} for name in ("LEAD", "OTHER", "TRAIN")}},
    "apart": {
        "allocation": {
            "LEAD": {"first": 0, "devices": 1},
            "TRAIN": {"first": 0, "devices": 1},
            "OTHER": {"first": 1, "devices": 1},
        }
    },
    "tensor": {"allocation": {name: {"devices": 2, "tp": 2} for name in ("LEAD", "OTHER", "TRAIN")}},
    "asynchronous": {
        "staleness": 1,
        "allocation": {
            "LEAD": {"first": 0, "devices": 1},
            "TRAIN": {"first": 1, "devices": 1},
            "OTHER": {"first": 1, "devices": 1},
        },
    },
}
NAMES = {"ppo": ("rollout", "score", "train_actor"), "judge": ("rollout", "judge", "train")}


def run_of(home: Path, graph: str, layout: str, *parts: dict[str, Any], name: str = "") -> Path:
    """A finished run."""
    (home / "judging.py").write_text(FUNCTIONS)
    write_reward_model(home)
    name = name or f"{graph}-{layout}"
    file = write_run(home, name, PPO if graph == "ppo" else JUDGE, LAYOUTS[layout], *parts)
    text = file.read_text()
    for part, call in zip(("LEAD", "OTHER", "TRAIN"), NAMES[graph], strict=True):
        text = text.replace(f'"{part}"', f'"{call}"')
    run = json.loads(text)
    if graph == "judge":
        del run["data"]["columns"]["answer"], run["eval"]["data"]["columns"]["answer"]
    file.write_text(json.dumps(run))
    finish(home, "run", str(file), name=name)
    return home / name


def write_reward_model(home: Path) -> None:
    """`rm`: a model with a score head."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    if not (home / "rm").exists():
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(home / "model", num_labels=1, pad_token_id=None)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(home / "rm")
        tokenizer: Any = AutoTokenizer.from_pretrained(home / "model")
        tokenizer.save_pretrained(home / "rm")


class Reference:
    """Greedy samples and scores, by transformers."""

    def __init__(self, home: Path, actor: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(home / "model")
        self.models = [
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (actor, home / "model")
        ]
        self.scorer = AutoModelForSequenceClassification.from_pretrained(home / "rm", dtype=torch.float32)
        lines = (home / "test.jsonl").read_text().splitlines()
        self.prompts = [self.tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]

    def sampled(self, prompt: list[int], n: int, by: int = 0) -> list[int]:
        """The tokens after a prompt, the end included."""
        ids = list(prompt)
        while len(ids) < len(prompt) + n:
            with torch.no_grad():
                ids.append(int(self.models[by](torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == self.tokenizer.eos_token_id:
                break
        return ids

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def scores(self, graph: str) -> list[float]:
        """The score of every held-out prompt's sample."""
        found = []
        for prompt in self.prompts:
            ids = self.sampled(prompt, BASE["batch"]["max_new_tokens"])
            if graph == "ppo":
                with torch.no_grad():
                    hidden = self.scorer.model(torch.tensor([ids])).last_hidden_state
                    found.append(float(self.scorer.score(hidden)[0, -1, 0]))
                continue
            answer = self.text(ids[len(prompt) :])
            question = self.tokenizer(f"{answer[:2]}+{answer[-2:]}=")["input_ids"]
            verdict = self.text(self.sampled(question, 3, by=1)[len(question) :])
            found.append(sum(int(character) for character in verdict if character.isdigit()) % 7 / 7)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("graph", ["ppo", "judge"])
def test_the_scores_are_those_of_transformers_in_every_layout(home: Path, graph: str, layout: str) -> None:
    folder = run_of(home, graph, layout)
    found = {record["step"]: record for record in records(folder, "eval")}
    assert sorted(found) == [0, 2]
    for step, actor in ((0, home / "model"), (2, folder / "checkpoints" / "step-000002" / "actor")):
        expected, metrics = Reference(home, actor).scores(graph), found[step]["metrics"]
        assert metrics["reward"] == pytest.approx(sum(expected) / len(expected), abs=1e-5), step
        if graph == "judge":
            assert metrics["accuracy"] == sum(score >= 0.4 for score in expected) / len(expected)
        else:
            assert "accuracy" not in metrics, "what is a right score of a reward model?"
    better = found[2]["metrics"]["reward"] > found[0]["metrics"]["reward"]
    assert found[2]["best"] == better if graph == "ppo" else found[0]["best"]


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_by_the_reward_model_of_its_run(home: Path) -> None:
    several = {"eval": {"n": 3, "temperature": 1.0, "threshold": 0.0, "k": [1, 3]}}
    folder = run_of(home, "ppo", "one", several, name="several")
    metrics = {record["step"]: record["metrics"] for record in records(folder, "eval")}[2]
    assert metrics["pass@1"] == pytest.approx(metrics["accuracy"])
    assert 0 <= metrics["pass@1"] <= metrics["pass@3"] <= 1
    last = str(folder / "checkpoints" / "step-000002")
    output = finish(home, "eval", "several.yaml", "--checkpoint", last, name="alone").output()
    assert f"reward {metrics['reward']:.4g}" in output, output


# --- the Scheduler ----------------------------------------------------------------------------------------------------


def simulated(seed: int, algorithm: str = "") -> Simulator:
    rng = random.Random(seed)
    shape = Shape(
        algorithm or rng.choice(["ppo", *GENERATING]),
        n_workers=4,
        split=rng.random() < 0.5,
        groups=2,
        minibatches=2,
        staleness=rng.choice([0, 0, 1, 2]),
        eval_every=1 + seed % 2,
        interrupt=rng.choice(["recompute", "keep_kv", "wait"]),
        scored_by=rng.choice(["scores", "shape"]),
        moves=rng.random() < 0.5,
        seed=seed,
        steps=3,
    )
    graph = generating_graph(shape) if shape.algorithm in GENERATING else None
    job = job_of(shape, graph=graph)
    return Simulator(shape, rng, Scheduler(job, range(4), 1000, None, N_EVAL_ROWS), graph=graph)


@pytest.mark.parametrize("seed", range(40))
def test_each_sample_is_judged_once_by_the_newest_weights_and_nothing_is_left(seed: int) -> None:
    """The simulated workers check the rest: weights, places of keys, samples."""
    simulator = simulated(seed)
    check_evaluations(simulator, 1 + seed % 2)
    parts = [send.command for send in simulator.log if isinstance(send.command, Evaluate)]
    models = {name for name, call in simulator.graph.calls.items() if isinstance(call, Generate | Inference)}
    scored = simulator.scheduler._program.judging.after
    assert {command.part for command in parts} == ({"draw", "judge"} if models & {*scored} else {"all"})


@pytest.mark.parametrize("seed", range(8))
def test_an_evaluation_in_hand_is_part_of_the_schedulers_image(seed: int) -> None:
    simulator = simulated(seed, "ppo" if seed % 2 else "judge")
    assert run_by_copies(simulator) > 10


def scored_graph(shape: Shape) -> Graph:
    """A reward model scores; engines have devices of their own."""
    behaviour = ("tokens", "mask", "behaviour_logprobs", "versions")
    train = Train(model="actor", loss=Loss(terms={"term": PolicyGradient()}))
    return build_graph(
        [
            ("rollout", Generate("actor", n=shape.n), ("prompt",), tuple(GENERATED)),
            ("scores", Inference("judge", "scores", ("score",)), ("tokens",), ("score",)),
            ("advantage", Advantage({}), ("score", "tokens", "mask"), ("advantages",)),
            ("train", train, (*behaviour, "advantages"), ()),
        ],
        ("prompt",),
        shape.n,
    )


@pytest.mark.parametrize("part", ["draw", "scores", "judge"])
def test_an_engine_that_is_lost_spoils_what_it_draws_and_takes_along_what_it_has_drawn(part: str) -> None:
    shape = Shape(n_workers=8, split=True, staleness=1, eval_every=1, scored_by="scores", steps=3)
    graph = scored_graph(shape)
    scheduler = Scheduler(job_of(shape, graph=graph), range(8), 1000, None, N_EVAL_ROWS)
    simulator = Simulator(shape, random.Random(1), scheduler, graph=graph)
    while not any(_is_part(send.command, part) for send in simulator.log):
        assert simulator.run(simulator.n_events + 1) is None
    victim = next(send.worker for send in simulator.log if isinstance(send.command, Evaluate))
    simulator.lose(victim)
    halt = simulator.run()
    assert halt is not None
    if part == "draw":
        assert halt.error is None, "the others draw again"
    else:
        assert halt.error is not None and f"worker {victim} was lost" in halt.reason


def _is_part(command: object, part: str) -> bool:
    match command:
        case Evaluate():
            return command.part == part
        case Execute(held_out=True):
            return command.call == part
        case _:
            return False


# --- refusals ---------------------------------------------------------------------------------------------------------

BY_MODEL = """
graph: ppo
params: {reward_fn: "", reward_model: model}
models: {actor: {path: model}, reward_model: {path: model}}
data: {path: data/train.jsonl, columns: {prompt: question}}
batch: {groups: 4}
eval: {every: 2, data: {path: data/train.jsonl, columns: {prompt: question}}}
"""


@pytest.mark.parametrize(
    ("overrides", "path", "text", "hint"),
    [
        (["eval.call=ref_logp"], "$.eval.call", "'ref_logp' writes no number a sample", "name a call that can: score"),
        (["eval.call=scores"], "$.eval.call", "'scores' is no call of the graph", "did you mean 'score'?"),
        (["staleness=1", "eval.on=engine"], "$.eval.on", "'score' scores by what models compute", "leave eval.on out"),
    ],
)
def test_what_can_not_score_or_not_meanwhile_is_refused(
    place: Path, overrides: list[str], path: str, text: str, hint: str
) -> None:
    (place / "run.yaml").write_text(BY_MODEL)
    problems = [one for one in refused(place, *overrides) if one.where.path.startswith("$.eval")]
    (problem,) = problems
    assert problem.where.path == path
    assert text in problem.text and hint in problem.hint


def test_what_writes_the_reward_of_an_advantage_scores_by_default(place: Path) -> None:
    weights = {"model.norm.weight": np.ones(8, np.float32), "score.weight": np.ones((1, 8), np.float32)}
    save_file(weights, place / "model" / "model.safetensors")
    (place / "run.yaml").write_text(BY_MODEL)
    assert scoring_of(check_run(place / "run.yaml", ()).graph, EvalSpec()).call == "score"
