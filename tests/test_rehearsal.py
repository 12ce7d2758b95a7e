"""Rehearsals: a plan of a cluster runs here at toy width with the numbers of one process; what differs is seen."""

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open

from realgraph.commands.rehearse import rehearse_command
from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.spec import Function, ModelRole, Train
from realgraph.planner.costs.memory.memory import expert_copies, trained_copy
from realgraph.planner.inputs.model_configs import known_models, load_model_spec
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.options.calls import microbatches_of
from realgraph.planner.plan.codec import plan_from_json, plan_to_json
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Turn
from realgraph.rehearsal.compare import compared, too_old
from realgraph.rehearsal.functions import ask
from realgraph.rehearsal.models import CHARACTERS, ToyModel, toy_config, write_toy_model, write_toy_models
from realgraph.rehearsal.observer import StepsSeen
from realgraph.rehearsal.order import misordered
from realgraph.rehearsal.rows import made_rows
from realgraph.rehearsal.run import ASK, toy_run
from realgraph.rehearsal.scale import ToyScale, scale_of
from realgraph.rehearsal.sizes import TOLERANCE, Counted, toy_excess
from realgraph.rehearsal.texts import real_rows
from realgraph.rehearsal.tokenizer import write_tokenizer
from realgraph.run.planning import plan_for
from realgraph.run.requests import request_for
from realgraph.run_file.compose import check_run
from realgraph.runtime.master.observer import Span
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.parallel.cuts import is_expert, is_fixed, layout_boxes
from realgraph.runtime.train.microbatch import balance
from tests import tiny
from tests.runs import start
from tests.traces import parent_of, title_of

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
RUN: dict[str, Any] = {
    "graph": "ppo",
    "models": {"actor": {"path": "model", "dtype": "bfloat16"}},
    "data": {"path": "nowhere/prompts", "max_prompt_tokens": 512, "system": "Think."},
    "batch": {"groups": 64, "max_new_tokens": 1024},
    "cluster": {"nodes": 2, "devices": 2, "kind": "H100-SXM"},
    "steps": 300,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run of a model of which only the config is here, on data that are nowhere, for GPUs that are not here."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return tmp_path / "run.yaml"


def fork_servers_of(pid: int) -> list[int]:
    """The fork servers of a run, which `tests.forked` starts: what they start has their title for a moment."""
    others = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [one for one in others if title_of(one) == "realgraph fork server" and parent_of(parent_of(one)) == pid]


@pytest.mark.slow
def test_the_plan_of_a_cluster_runs_here_with_the_numbers_of_one_process(file: Path) -> None:
    """On two nodes of eight devices, tensor parallel where that is asked for."""
    asked = ["cluster.devices=8", "allocation.rollout={first: 8, devices: 8}"]
    asked += ["allocation.train_actor={first: 0, devices: 8, tp: 2}", "allocation.train_critic={first: 8, devices: 8}"]
    running = start(file.parent, "rehearse", str(file), *asked, "--keep", str(file.parent / "kept"))
    servers, deadline = set[int](), time.monotonic() + 300.0
    while running.process.is_alive() and time.monotonic() < deadline:
        servers.update(fork_servers_of(running.pid))
        time.sleep(0.2)
    assert running.wait(1.0) == 0, running.output()
    assert len(servers) == 1  # for the models, the plan's processes and the one process
    said = running.output()
    assert "16 processes here in the place of 16 x H100-SXM" in said
    assert "numbers are those of one process" in said
    assert "train_actor/grad_norm" in said and "differs" not in said
    assert re.search(r"rollout +weights moved +([\d,]+) +\1 *\n", said)
    far = re.search(r"rollout +weights between nodes +([\d,]+) +\1 *\n", said)
    assert far is not None and far[1] != "0"  # workers of the other node get new weights over the route between nodes
    assert re.search(r"train_actor +optimizer +[\d,]+ +[\d,]+ *\n", said)
    trace = (file.parent / "kept/planned/trace.json").read_text()
    assert "train_actor" in trace
    plan = plan_from_json((file.parent / "kept/planned/plan.json").read_text(), "plan")
    assert plan.allocations["train_actor"].layout.tp == 2


@pytest.mark.slow
def test_the_plan_of_a_judge_on_servers_runs_here_on_embedded_engines(file: Path) -> None:
    """Synchronously, so that all numbers are compared: a question that is longer than toy prompts has a toy one."""
    run = {**RUN, "graph": "judge", "cluster": {"devices": 4, "kind": "H100-SXM"}}
    run["models"] = {**RUN["models"], "judge": {"path": "model", "dtype": "bfloat16"}}
    run["rollout"] = {"engine": "sglang", "python": sys.executable}
    run["allocation"] = {"rollout": {"first": 2, "devices": 1}, "judge": {"first": 3, "devices": 1}}
    file.write_text(yaml.safe_dump(run))
    running = start(file.parent, "rehearse", str(file))
    assert running.wait(300.0) == 0, running.output()
    said = running.output()
    assert "embedded engines generate here in the place of SGLang servers" in said
    assert "numbers are those of one process" in said and "differs" not in said
    assert re.search(r"2 +reward/reward +(\S+) +\1 *\n", said)
    assert re.search(r"rollout +weights moved +([\d,]+) +\1 *\n", said)


@pytest.mark.slow
def test_calls_that_generate_by_turns_on_one_device_keep_the_order_of_their_plan(file: Path) -> None:
    file.write_text(yaml.safe_dump({**RUN, "graph": "remax", "cluster": {"devices": 2, "kind": "H100-SXM"}}))
    running = start(file.parent, "rehearse", str(file))
    assert running.wait(300.0) == 0, running.output()
    assert "numbers are those of one process" in running.output()


def test_a_plan_file_is_rehearsed_and_one_that_can_not_be_is_refused_at_its_place(file: Path, tmp_path: Path) -> None:
    checked = check_run(file, (), weights=False)
    plan = json.loads(plan_to_json(plan_for(checked, request_for(checked))))
    plan["allocations"]["train_actor"]["layout"]["tp"] = 3
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match=r"train_actor\.layout.*\n?.*tp 3 does not divide 8 attention heads"):
        rehearse_command(file, (), tmp_path / "plan.json", None)


def test_a_folder_that_is_there_is_not_written_over(file: Path) -> None:
    with pytest.raises(ConfigError, match="can't be made: File exists"):
        rehearse_command(file, (), None, file.parent / "model")


def test_the_runs_own_data_and_tokenizer_are_taken_where_they_are_here(file: Path, tmp_path: Path) -> None:
    """Rows in order, those that are too long left out; each prompt as long as it comes to, of its last tokens."""
    write_tokenizer(tmp_path / "model", CHARACTERS + "$#", "$", "#")
    prompts = ["abcdefgh" * 8, "a" * 600, "xyz", "b" * 512]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"question": p, "answer": "7"}) + "\n" for p in prompts))
    data = [f"data.path={tmp_path}/data.jsonl", "data.columns={prompt: question}", "data.system=null", "batch.groups=4"]
    checked = check_run(file, data, weights=False)
    scale = ToyScale(512, 1024, 428, 4, 4, 16)  # 1/96
    rows = real_rows(checked.run.data, checked.graph, scale, 3)
    assert [row["prompt"] for row in rows] == ["gh", "yz", "bbbbb"]
    assert all(row.get("answer", "7") == "7" for row in rows)
    assert real_rows(check_run(file, (), weights=False).run.data, checked.graph, scale, 3) == []


def test_the_runs_own_pairs_and_answers_become_toy_ones(file: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model", CHARACTERS + "$#", "$", "#")
    row = {"prompt": "abcd" * 24, "response": "efgh" * 48}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    run = {**RUN, "graph": "sft", "models": {"actor": {"path": "model"}}, "data": {"path": "data.jsonl"}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(run))
    checked = check_run(tmp_path / "sft.yaml", ["batch.groups=1"], weights=False)
    (toy,) = real_rows(checked.run.data, checked.graph, ToyScale(512, 1024, 428, 1, 1, 16), 3)
    assert toy["prompt"] == "cd"
    assert toy["response"] == "h"  # of two tokens, the last of which is the end of the sequence


def test_a_prompt_that_a_function_writes_becomes_a_short_one(file: Path, tmp_path: Path) -> None:
    models = "models={judge: {path: model, dtype: bfloat16}}"
    checked = check_run(file, ("graph=judge", models), weights=False)
    request = request_for(checked)
    toy = toy_run(checked, scale_of(request, plan_for(checked, request)), tmp_path).checked
    question = toy.graph.calls["question"]
    assert isinstance(question, Function)
    assert question.fn == ASK and question.args == {"length": toy.run.data.max_prompt_tokens}
    assert [ask(length=3, prompt="ab", text=text) for text in ("", "c", "cdef")] == ["ab", "abc", "def"]
    assert ask(length=3, prompt="", text="") == "0"


def test_a_sequence_beside_the_samples_becomes_a_toy_one(file: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model", CHARACTERS + "$#", "$", "#")
    row = {"prompt": "abcd" * 24, "response": "efgh" * 48, "answer": "7"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    sft = {"kind": "train", "model": "actor", "samples": "data", "loss": {"terms": {"cross_entropy": {}}}}
    run = {**RUN, "graph": "grpo", "models": {"actor": {"path": "model"}}, "data": {"path": "data.jsonl"}}
    (tmp_path / "beside.yaml").write_text(yaml.safe_dump({**run, "calls": {"sft": sft}}))
    checked = check_run(tmp_path / "beside.yaml", ["batch.groups=1"], weights=False)
    (toy,) = real_rows(checked.run.data, checked.graph, ToyScale(512, 1024, 428, 1, 1, 16), 3)
    assert toy == {"prompt": "cd", "response": "h", "answer": "7"}
    (made,) = made_rows(checked.graph, 1, 4, 4, 0)
    assert made.keys() == toy.keys()


def test_bytes_that_differ_from_what_is_predicted_are_seen() -> None:
    assert Counted("train", "samples moved", 7).alike
    assert Counted("rollout", "weights moved", 100, 100).alike
    assert not Counted("rollout", "weights moved", 101, 100).alike
    assert [Counted("train", "weights", n, 100, 0.02).alike for n in (97, 98, 102, 103)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("kind", "tp", "dp", "ep"),
    [
        ("qwen3_moe", 4, 1, 2),
        ("qwen3_moe", 2, 2, 2),
        ("qwen3_moe", 4, 1, 4),
        ("qwen3_moe", 2, 4, 1),
        ("gpt_oss", 4, 1, 2),
        ("gpt_oss", 2, 2, 1),
        ("deepseek_v3", 4, 1, 2),
        ("deepseek_v3", 2, 2, 1),
        ("gemma2", 4, 2, 1),
    ],
)
def test_bytes_of_a_toy_model_are_the_planners_but_for_what_tensor_parallel_ranks_hold_whole(
    tmp_path: Path, kind: str, tp: int, dp: int, ep: int
) -> None:
    """Experts may have more holders than the rest, so that what lies whole weighs more among the moments."""
    write_toy_model(tmp_path, toy_config(tiny.config(kind).to_dict(), 17, 1.0), 0)
    with safe_open(tmp_path / "model.safetensors", "numpy") as tensors:
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    shapes = {name: shape for name, shape in shapes.items() if not is_fixed(name)}
    model, role = load_model_spec(str(tmp_path), Where(), tmp_path), ModelRole(trainable=True)
    layout = Layout(mesh=DeviceMesh(0, tp * dp), tp=tp, dp=dp, ep=ep)
    planned = trained_copy(model, role, layout)
    for divided, predicted in ((False, planned.weights), (True, planned.optimizer // 2)):
        held = 0
        for boxes in layout_boxes(shapes, layout, (model, "lm")).values():
            parts = {name: (expert_copies(layout) if is_expert(name) else dp) if divided else 1 for name in boxes}
            rows = [math.ceil(box.shape[0] / parts[name]) / box.shape[0] * box.numel for name, box in boxes.items()]
            held = max(held, round(4 * sum(rows)))
        tolerance = TOLERANCE + toy_excess(shapes, (model, "lm"), layout, divided=divided)
        assert Counted("train", "bytes", held, predicted, tolerance).alike
        assert not Counted("train", "bytes", held, round(predicted * (1 - tolerance - TOLERANCE)), tolerance).alike


@pytest.mark.parametrize("trained", [False, True])
def test_a_frozen_role_that_scores_gets_a_model_with_a_score_head(tmp_path: Path, trained: bool) -> None:
    """A role that learns one starts without."""
    toy = toy_config(QWEN3, 13, 0.01)
    write_toy_models(msgspec.msgpack.encode([ToyModel(str(tmp_path), toy, 0, scores=not trained)]))
    role = ModelRole(path=str(tmp_path), head="score", dtype="float64", trainable=trained)
    score = build(role, str(tmp_path), Start(torch.device("cpu"))).network.score.weight
    assert bool(score.any()) is not trained


def test_a_device_that_does_not_keep_the_plans_order_is_seen(file: Path) -> None:
    checked = check_run(file, (), weights=False)
    plan = plan_for(checked, request_for(checked))
    turns = [turn.call for turn in plan.orders[0] if turn.call in plan.allocations]
    seen, wrong = StepsSeen(), StepsSeen()
    for i, call in enumerate(turns):
        seen.observe(Span(0, call, 0, float(i), i + 0.5))
        wrong.observe(Span(0, call, 0, float(-i), 0.5))
    one = replace(plan, orders={0: tuple(replace(turn, offset=0) for turn in plan.orders[0])})
    assert list(misordered(one, seen, 1)) == []
    (text,) = misordered(one, wrong, 1)
    assert text == f"device 0 ran {', '.join(reversed(turns))}; its plan is {', '.join(turns)}"


@pytest.mark.parametrize("offset", [-1, 0])
def test_where_a_session_stands_still_while_others_run_is_no_order(file: Path, offset: int) -> None:
    """One that generates beside others, among calls of its step or of the one before. The other calls keep theirs."""
    checked = check_run(file, (), weights=False)
    plan = plan_for(checked, request_for(checked))
    stream = checked.graph.generates[0]
    first, second = [name for name in plan.allocations if name != stream][:2]
    one = replace(plan, orders={0: (Turn(stream), Turn(first, offset), Turn(second, offset))})
    for order, n_wrong in (((first, stream, second, stream), 0), ((stream, second, stream, first), 1)):
        seen = StepsSeen()
        for i, call in enumerate(order):
            seen.observe(Span(0, call, 0, float(i), i + 0.5))
        assert len(list(misordered(one, seen, 1, {stream}))) == n_wrong
        assert list(misordered(one, seen, 1))


def test_what_differs_is_seen() -> None:
    one = [{"train/loss": 1.0, "train/entropy": 2.0, "train/seconds": 3.0}, {"train/loss": 2.0}]
    other = [{"train/loss": 1.0 + 1e-8, "train/entropy": 9.0, "train/seconds": 9.0}, {"train/loss": 2.1}]
    assert [row.alike for row in compared(one, other, 2)] == [True, False]
    assert [row.alike for row in compared(one, other, 1)] == [True]
    assert [row.alike for row in compared(one, [{}, {}], 1)] == [False]
    assert [row.alike for row in compared(one[:1], other, 2)] == [True, False]


def test_of_an_asynchronous_plan_sizes_are_compared_and_samples_over_the_bound_seen() -> None:
    one = [{"train/loss": 1.0, "batch/groups": 1.0, "staleness/max": 0.0}, {"staleness/max": 2.0}]
    other = [{"train/loss": 2.0, "batch/groups": 1.0, "staleness/max": 0.0}]
    assert [(row.metric, row.alike) for row in compared(one, other, 1, asynchronous=True)] == [("batch/groups", True)]
    assert not all(row.alike for row in compared(one, other, 1))
    assert too_old(one, 2) == ()
    assert too_old(one, 1) == ("samples of step 2 lag 2 steps behind",)


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen/Qwen3-8B", "meta-llama/Llama-2-70b-hf", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b"),
        *("openai/gpt-oss-20b", "moonshotai/Moonlight-16B-A3B", "deepseek-ai/DeepSeek-R1"),
    ],
)
def test_a_toy_model_has_the_structure_of_its_model(name: str) -> None:
    real = spec_from_config(known_models()[name], Where())
    toy = spec_from_config(toy_config(known_models()[name], 25, 0.01), Where())
    same = (
        "architecture",
        "layers",
        "heads",
        "kv_heads",
        "tied",
        "qk_norm",
        "experts",
        "experts_per_token",
        "expert_layers",
    )
    assert [getattr(toy, field) for field in same] == [getattr(real, field) for field in same]
    assert toy.hidden % 2 == real.hidden % 2
    assert toy.vocab % 64 == real.vocab % 64
    assert toy.n_params() < real.n_params() / 500


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 512), st.data())
def test_as_many_micro_batches_hold_a_step_as_in_the_run(
    prompt: int, response: int, groups: int, data: st.DataObject
) -> None:
    mean = data.draw(st.floats(1, prompt + response))
    scale = ToyScale(prompt, response, mean, groups, data.draw(st.integers(1, groups)))
    assert 2 <= scale.sample <= max(26, 4)
    tokens = data.draw(st.integers(prompt + response, 64 * (prompt + response)))
    real = groups * mean / tokens
    held = scale.microbatch(tokens, scale.sample) / scale.sample  # whole samples
    assert held >= 1
    assert held == 1 or abs(scale.toy_groups / real - held) <= 0.5 + 1 / scale.sample + 1e-9 * held
    assert scale.cache(tokens, scale.sample) >= scale.sample


@pytest.mark.parametrize("config", ["ppo_llama3_8b_2x8h100", "gsm8k_grpo_qwen3_1.7b_8xh100"])
def test_a_rank_has_the_micro_batches_of_the_plan(config: str) -> None:
    """As many in each optimizer step as the planner counts, where samples have the length that most of them have."""
    checked = check_run(Path(f"configs/{config}.yaml"), (), weights=False)
    request = request_for(checked)
    plan = plan_for(checked, request)
    scale = scale_of(request, plan)
    for name, allocation in plan.allocations.items():
        call = request.graph.calls[name]
        if allocation.max_tokens_per_microbatch is None:
            continue
        steps = call.minibatches if isinstance(call, Train) else 1
        n_samples = scale.toy_groups * request.workload.samples_per_group // (allocation.layout.dp * steps)
        limit = scale.microbatch(allocation.max_tokens_per_microbatch, scale.sample)
        planned = microbatches_of(request, name, allocation, request.cluster)
        assert len(balance([scale.sample] * n_samples, limit)) == planned, name
