"""Two GPUs, over NCCL: training, generation and whole runs under every axis are those of one."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import Completion, OwnWeights, RolloutLimits
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.parallel.groups import LayoutRanks
from tests import tiny
from tests.equivalence.comparing import check
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import Case, train
from tests.ranks import RankProcesses, joined
from tests.rollouts import assert_exact, requests
from tests.runs import GRPO, finish, home, merged, records, write_run

__all__ = ["home"]

KIND = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
LIMITS = RolloutLimits(max_running=6, max_cache_tokens=240, prefill_tokens=64)
REPLICAS = {
    "tp2": Layout(DeviceMesh(0, 2), tp=2),
    "pp2": Layout(DeviceMesh(0, 2), pp=2),
    "ep2": Layout(DeviceMesh(0, 2), dp=2, ep=2),
}
TRAINED = [
    ("qwen3", "rl", "dp2"),
    ("qwen3", "rl", "fsdp2"),
    ("qwen3", "rl", "tp2"),
    ("gemma2", "sft", "tp2"),
    ("qwen3 deep", "rl", "pp2"),
    ("llama deep", "rl", "pp2 twice"),
    ("qwen3", "rl", "cp2"),
    ("mistral", "value", "cp2"),
    ("qwen3_moe", "rl", "ep2"),
    ("mixtral", "sft", "ep2 fsdp2"),
    ("qwen3_moe", "balanced", "ep2 cp2"),
]
SAMPLED = [("tp2", "qwen3"), ("tp2", "gemma2"), ("pp2", "llama"), ("ep2", "qwen3_moe"), ("tp2", "mixtral")]


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    layouts = [LAYOUTS[name] for _, _, name in TRAINED]
    processes = RankProcesses(2, [*layouts, *REPLICAS.values()], kind=KIND)
    yield processes
    processes.close()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("model", "loss", "layout"), TRAINED)
def test_training_on_two_gpus_is_that_of_one(
    two: RankProcesses, models: Path, model: str, loss: str, layout: str, recompute: Any
) -> None:
    case = Case(model, loss, "float32", LAYOUTS[layout], recompute)
    one = train(LayoutRanks.alone(torch.device(KIND, 0)), case.alone, models)
    assert one is not None
    check(case, two.run(train, case, models), one, 1e-4)


def generated(everybody: LayoutRanks, folder: Path, layout: Layout, role: ModelRole) -> dict[int, Completion] | None:
    """The samples of a replica, on its head."""
    groups, wanted = joined[0].of_layout(layout), requests(random.Random(7), 8, longest=14, groups_of=2)
    weights = OwnWeights(str(folder), everybody.device)
    engine = open_rollout(role, weights, LIMITS, lambda tokens: "", threading.Event().set, groups)
    done: dict[int, Completion] = {}
    if groups.heads:
        own = wanted[groups.dp.rank :: groups.dp.size]
        engine.submit(own)
        while len(done) < len(own):
            done |= {completion.id: completion for completion in engine.take(30.0)}
        engine.pause()
        engine.dismiss()
    else:
        engine.pause()
        engine.follow()
    everybody.mesh.barrier()
    assert engine.close(10.0)
    return done if groups.heads else None


@pytest.mark.parametrize(("layout", "kind"), SAMPLED)
def test_samples_of_two_gpus_have_the_log_probabilities_of_one_process(
    two: RankProcesses, tmp_path: Path, layout: str, kind: str
) -> None:
    folder = tiny.save(tmp_path / kind, kind)
    role = ModelRole(path="x", dtype="float32")
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = [one for one in two.run(generated, folder, REPLICAS[layout], role) if one is not None]
    wanted = {request.id: request for request in requests(random.Random(7), 8, longest=14, groups_of=2)}
    drawn = {number: completion for one in found for number, completion in one.items()}
    assert drawn.keys() == wanted.keys()
    for number, completion in drawn.items():
        assert_exact(module, wanted[number], completion, within=1e-3)


@pytest.mark.parametrize(
    "axes", [{"dp": 2}, {"dp": 2, "sharding": "fsdp"}, {"tp": 2}, {"pp": 2}], ids=lambda axes: "-".join(axes)
)
@pytest.mark.parametrize("graph", ["grpo", "remax"])
def test_whole_runs_on_two_gpus_train_on_what_their_policy_drew(home: Path, graph: str, axes: dict[str, Any]) -> None:
    """The gate at each update compares log-probabilities of engines and trainers. ReMax generates by two calls, whose
    engines are cut over the same GPUs."""
    own: dict[str, Any] = GRPO
    calls = ["rollout", "train"]
    if graph == "remax":
        own = {"graph": "remax", "params": {"reward_fn": "rewards:score", "lr": 3.0e-3, "group_size": 2}}
        calls = ["rollout", "greedy", "train"]
    sampled = {name: value for name, value in axes.items() if name != "sharding"}
    allocation = {name: {"devices": 2, **(axes if name == "train" else sampled)} for name in calls}
    name = f"{graph}-{'-'.join(axes)}"
    run = merged({"cluster": {"kind": "auto"}, "steps": 4, "allocation": allocation}, {"checkpoint": {"every": 2}})
    finish(home, "run", str(write_run(home, name, own, run)), name=name)
    assert [record["step"] for record in records(home / name)] == [0, 1, 2, 3]
