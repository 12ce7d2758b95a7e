"""A plan that the planner calls valid runs: drawn graphs, models, clusters, pins and constraints, each plan followed
for two steps by one process a device, with the numbers of one device, or with samples as old as is allowed."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError
from realgraph.run.planning import plan_for
from realgraph.run.requests import request_for
from realgraph.run_file.compose import check_run
from tests import tiny
from tests.runs import finish, merged

SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much)
EXAMPLES = 2 if settings().derandomize else 40  # a run each, and its like on one device
TWIN = {  # a second trained role beside the policy
    "models": {"twin": {"init": "actor", "trainable": True, "dtype": "float32"}},
    "calls": {
        "train_twin": {
            "kind": "train",
            "model": "twin",
            "lr": 1e-3,
            "minibatches": 1,
            "loss": {"aggregate": {"kind": "token_mean"}, "terms": {"cross_entropy": {}}},
        }
    },
}
GRAPHS: dict[str, dict[str, Any]] = {
    "ppo": {"graph": "ppo", "params": {"minibatches": 2}},
    "grpo": {"graph": "grpo", "params": {"group_size": 2, "kl_coef": 0.05}, "batch": {"groups": 4}},
    "two trained roles": merged({"graph": "grpo", "params": {"group_size": 2}, "batch": {"groups": 4}}, TWIN),
    "sft": {"graph": "sft", "params": {"minibatches": 2}},
}
CALLS = {
    "ppo": ("train_actor", "rollout", "train_critic", "values", "ref_logp"),
    "grpo": ("train", "rollout", "ref_logp"),
    "two trained roles": ("train", "train_twin", "rollout"),
    "sft": ("train",),
}
KINDS = ("qwen3", "qwen3_moe", "gpt_oss", "llama", "gemma2")
CLUSTERS = ((2, 2), (1, 4), (1, 2), (2, 4), (1, 8), (1, 1), (3, 2))  # nodes, devices of each
WAYS = ("tp", "pp", "cp", "dp")
_numbers = count()


@st.composite
def pins(draw: st.DrawFn, call: str, cluster: tuple[int, int], kind: str) -> dict[str, Any]:
    """A mesh, and each factor 2 of its size to one axis; the rest may go together or not: what can't, the planner
    refuses."""
    generates, trains = call == "rollout", call.startswith("train")
    size = draw(st.sampled_from([n for n in (4, 2, 8, 1) if n <= cluster[0] * cluster[1]]))
    pin: dict[str, Any] = {"devices": size, "tp": 1, "pp": 1, "cp": 1, "dp": 1}
    for _ in range(size.bit_length() - 1):
        pin[draw(st.sampled_from([way for way in WAYS if way != "cp" or not generates]))] *= 2
    if kind in ("qwen3_moe", "gpt_oss") and pin["dp"] * pin["tp"] * pin["cp"] % 2 == 0:
        pin["ep"] = draw(st.sampled_from((2, 1)))
    if draw(st.booleans()):
        pin["residency"] = draw(st.sampled_from(("offloaded", "resident")))
    if not generates and draw(st.booleans()):
        pin["sharding"] = draw(st.sampled_from(("fsdp", "replicated")))
    if trains and draw(st.booleans()):
        pin["recompute"] = draw(st.sampled_from(("selective", "full", "none")))
    if trains and pin["pp"] == 2 and draw(st.booleans()):
        pin |= {"schedule": "interleaved", "chunks": 2}
    return pin


@st.composite
def run_files(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """The model's architecture and the run."""
    name, kind = draw(st.sampled_from(tuple(GRAPHS))), draw(st.sampled_from(KINDS))
    nodes, devices = cluster = draw(st.sampled_from(CLUSTERS))
    pinned = draw(st.lists(st.sampled_from(CALLS[name]), min_size=1, max_size=3, unique=True))
    bounds: dict[str, Any] = {}
    if draw(st.integers(0, 3)) == 0:
        bounds["share"] = [draw(st.permutations(CALLS[name]))[:2]] if len(CALLS[name]) > 1 else []
    if draw(st.integers(0, 3)) == 0:
        bounds["offload"] = False
    if nodes * devices > 2 and draw(st.integers(0, 3)) == 0:
        bounds["reserve"] = 1
    accelerator: dict[str, Any] = draw(
        st.sampled_from(({"kind": "H100-SXM"}, {"kind": "cpu", "memory_gb": 8, "host_memory_gb": 64}))
    )
    run = {
        "models": {"actor": {"path": "model", "dtype": "float32"}},
        "data": {"path": "nowhere/prompts", "max_prompt_tokens": 12},
        "batch": {"groups": 8, "max_new_tokens": 12, "max_tokens_per_microbatch": draw(st.sampled_from((48, 24)))},
        "cluster": {"nodes": nodes, "devices": devices, **accelerator},
        "staleness": 0 if name == "sft" else draw(st.sampled_from((0, 1, 2))),
        "overdue": draw(st.sampled_from(("wait", "mask", "drop"))),
        "allocation": {call: draw(pins(call, cluster, kind)) for call in pinned},
        "constraints": bounds,
        "steps": 100,
    }
    return kind, merged(run, GRAPHS[name])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only their shapes are read."""
    home = tmp_path_factory.mktemp("shapes")
    for kind in KINDS:
        shape = {"num_hidden_layers": 4} | ({"layer_types": None} if kind == "gemma2" else {})
        (home / kind / "model").mkdir(parents=True)
        (home / kind / "model" / "config.json").write_text(tiny.config(kind, **shape).to_json_string())
    return home


@pytest.mark.slow
@settings(max_examples=EXAMPLES, suppress_health_check=SLOW)
@given(drawn=run_files())
def test_a_plan_that_the_planner_makes_runs_with_the_numbers_of_one_device(
    models: Path, drawn: tuple[str, dict[str, Any]]
) -> None:
    kind, run = drawn
    file = models / kind / f"run-{next(_numbers)}.yaml"
    file.write_text(json.dumps(run))  # JSON is YAML
    checked = check_run(file, (), weights=False)
    try:
        plan_for(checked, request_for(checked))
    except ConfigError:
        assume(False)  # refused before anything runs
    finish(file.parent, "rehearse", str(file), name=file.stem)
