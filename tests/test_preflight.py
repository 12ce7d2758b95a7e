"""The look at the first rows: what it tells, and that what is wrong is found before anything starts."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("transformers")

from huggingface_hub import constants

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.facts import Facts
from realgraph.graphs.spec import GraphSpec
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.plan.plan import Hashes, Plan
from realgraph.runtime.data import hub
from realgraph.runtime.data.data import DataSet
from realgraph.runtime.data.tokenize import load_tokenizer
from realgraph.runtime.job.job import BatchSpec, DataSpec, EvalSpec, Job
from realgraph.runtime.models.weights import resolve
from realgraph.runtime.preflight.preflight import preflight, refuse_machine
from tests.data_sets import CHATML, PLAIN, WHOLE, make_tokenizer, write

CLUSTER = Cluster(1, 2, "cpu", 2**30, 2**30, 1e10, 1e10, 1e10, 1e10, 1e10)


def make_job(folder: Path, calls: dict[str, Any], rows: list[dict[str, Any]], **data: Any) -> Job:
    """A graph that generates from `prompt` and scores with `calls`."""
    PLAIN.save_pretrained(str(folder / "model"))  # type: ignore[attr-defined]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = msgspec.convert(
        {
            "name": "test",
            "inputs": {"prompt": "group tokens", "answer": "group text"},
            "models": {"actor": {"path": str(folder / "model")}},
            "calls": {"rollout": {"kind": "generate", "model": "actor", "n": 2}, **calls},
        },
        GraphSpec,
    )
    graph = compile_graph(spec, lambda path: Where(path=path), Facts())
    return Job(
        name="test",
        graph=graph,
        plan=Plan({}, {}, Hashes("", "", "")),
        cluster=CLUSTER,
        data=DataSpec(str(folder / "a.jsonl"), **data),
        batch=BatchSpec(groups=1),
        steps=1,
        seed=0,
        run_dir=str(folder / "run"),
        user_dir=str(folder),
    )


ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(12)]


def reward(fn: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "function", "fn": fn, "reads": ["text", "answer"], "writes": {"reward": "sample float32"}} | fields


def test_the_first_rows_and_the_reward_are_shown(tmp_path: Path) -> None:
    keep = {
        "kind": "function",
        "fn": "reward_spread",
        "over": "group",
        "reads": ["reward"],
        "writes": {"keep": "group bool"},
    }
    lines = preflight(make_job(tmp_path, {"reward": reward("exact_match"), "filter": keep}, ROWS))
    text = "\n".join(lines)
    assert "12 rows" in text
    assert "first: '0+0='" in text
    assert "reward: exact_match: reward 1 on '0', 0 on '', 0 on 'I do not know.'" in text
    assert "filter: reward_spread: keep True" in text


def test_a_prompt_that_is_rendered_already_is_told(tmp_path: Path) -> None:
    turn = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for prompt, chat, told in ((turn, None, True), (turn, False, False), ("hello", None, False)):
        job = make_job(tmp_path, {"reward": reward("exact_match")}, [{"prompt": prompt, "answer": "1"}], chat=chat)
        make_tokenizer(CHATML).save_pretrained(str(tmp_path / "model"))  # type: ignore[attr-defined]
        text = "\n".join(preflight(job))
        assert ("  prompt: texts hold '<|im_start|>', and become a user's turn" in text) is told


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_function_of_a_group_is_tried_on_as_many_samples_as_a_group_has(tmp_path: Path, n: int) -> None:
    (tmp_path / f"sized_{n}.py").write_text(
        "def centred(reward, text):\n"
        f"    assert len(reward) == len(text) == {n}\n"
        "    return [r - sum(reward) for r in reward]\n"
    )
    group = {"kind": "function", "over": "group"}
    calls = {
        "reward": reward("exact_match"),
        "centre": {
            **group,
            "fn": f"sized_{n}:centred",
            "reads": ["reward", "text"],
            "writes": {"centred": "sample float32"},
        },
        "again": {**group, "fn": "best_of", "reads": ["reward"], "writes": {"best": "sample bool"}},
    }
    rollout = {"rollout": {"kind": "generate", "model": "actor", "n": n}}
    lines = preflight(make_job(tmp_path, {**rollout, **calls}, ROWS))
    assert sum(line.startswith("centre: ") for line in lines) == 2
    assert "reward: exact_match: reward 1 on '0', 0 on '', 0 on 'I do not know.'" in lines


def test_a_reward_that_fails_names_the_row_and_the_text(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(text, answer):\n    return float(text) == float(answer)\n")
    with pytest.raises(ConfigError) as error:
        preflight(make_job(tmp_path, {"reward": reward("mine:score")}, ROWS))
    said = str(error.value)
    assert "a.jsonl:1: $: reward: mine:score on sample 1: ValueError: could not convert string to float: ''" in said
    assert "(text: '')" in said
    assert "hint: on_error: score" in said
    lines = preflight(make_job(tmp_path, {"reward": reward("mine:score", on_error="score")}, ROWS))
    assert "2 failed and got error_value" in lines[-1]


PROMPTS = """
def sample(text, prompt, prompt_ids):
    assert isinstance(text, str) and prompt in ("0+0=", "1+1="), prompt
    assert all(type(token) is int for token in prompt_ids) and prompt_ids, prompt_ids
    return 1.0

def group(prompt, prompt_ids, reward):
    return [sample("", prompt, prompt_ids)] * len(reward)

def batch(prompt, prompt_ids, reward):
    return [sample("", *both) for both in zip(prompt, prompt_ids, strict=True)]

def text_only(prompt):
    return sample("", prompt, [1])
"""


def test_a_prompt_reaches_functions_as_text_and_as_ids_where_asked(tmp_path: Path) -> None:
    (tmp_path / "prompts.py").write_text(PROMPTS)
    both = {"reads": ["prompt", "reward"], "ids": ["prompt"]}
    calls = {
        "reward": reward("prompts:sample", reads=["text", "prompt"], ids=["prompt"]),
        "b": reward("prompts:group", **both, over="group") | {"writes": {"b": "sample float32"}},
        "c": reward("prompts:batch", **both, over="batch") | {"writes": {"c": "sample float32"}},
        "d": reward("prompts:text_only", reads=["prompt"]) | {"writes": {"d": "sample float32"}},
    }
    lines = preflight(make_job(tmp_path, calls, ROWS))
    assert sum("prompts:" in line and " 1 on ''" in line for line in lines) == 2 * len(calls), lines


def test_a_function_that_is_not_there_is_told_by_its_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        preflight(make_job(tmp_path, {"reward": reward("absent:score")}, ROWS))
    assert "$.calls.reward.fn: reward: can't load 'absent:score': ModuleNotFoundError" in str(error.value)


def test_prompts_that_are_all_too_long_and_bad_rows_stop_it(tmp_path: Path) -> None:
    calls = {"reward": reward("exact_match")}
    with pytest.raises(ConfigError) as error:
        preflight(make_job(tmp_path, calls, ROWS, max_prompt_tokens=1))
    assert "the first 8 rows are all too long" in str(error.value)
    with pytest.raises(ConfigError) as error:
        preflight(make_job(tmp_path, calls, [*ROWS[:3], {"prompt": "1"}]))
    assert "a.jsonl:4: $.answer: this row lacks the column" in str(error.value)


def test_some_prompts_that_are_too_long_are_told(tmp_path: Path) -> None:
    rows = [{"prompt": "what is it you know? " * 9, "answer": "1"}, *ROWS]
    lines = preflight(make_job(tmp_path, {"reward": reward("exact_match")}, rows, max_prompt_tokens=9))
    assert any("1 of the first 8 rows are too long and are left out" in line for line in lines)


@pytest.mark.parametrize(
    ("nodes", "kind", "n_gpus", "told"),
    [
        (2, "cpu", 0, "the plan is for 2 hosts, and launch.kind local starts all workers on this one"),
        (1, "H100-SXM", 1, "the plan is for 8 x H100-SXM, and this machine has 1 NVIDIA GPUs"),
        (1, "H100-SXM", 8, ""),
        (1, "cpu", 0, ""),
    ],
)
def test_a_plan_for_another_machine_is_not_run(tmp_path: Path, nodes: int, kind: str, n_gpus: int, told: str) -> None:
    cluster = msgspec.structs.replace(CLUSTER, nodes=nodes, kind=kind, devices_per_node=8)
    job = msgspec.structs.replace(make_job(tmp_path, {"reward": reward("exact_match")}, ROWS), cluster=cluster)
    if not told:
        refuse_machine(job, n_gpus)
        return
    with pytest.raises(ConfigError) as error:
        refuse_machine(job, n_gpus)
    assert told in str(error.value)


def test_a_hub_that_is_out_of_reach_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound, but it does not listen: nothing answers there
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.out_of_reach.cache_clear()
        try:
            began = time.monotonic()
            with pytest.raises(ConfigError) as tokenizer:
                load_tokenizer("nobody/nothing")
            with pytest.raises(ConfigError) as model:
                resolve("nobody/nothing")
            assert time.monotonic() - began < 3 * hub.REACH_SECONDS
        finally:
            hub.out_of_reach.cache_clear()
    for error in (tokenizer, model):
        assert "127.0.0.1 can't be reached: Connection refused" in str(error.value)
        assert "hint: where there is a network: hf download nobody/nothing" in str(error.value)


def test_a_model_folder_without_a_tokenizer_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="this folder has no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config.json": {"vocab_size": 20}}, r"\$\.models\.actor\.path: the data have the token \d+, and the vocab"),
        ({"generation_config.json": {"eos_token_id": "</s>"}}, r"generation_config\.json: \$: eos_token_id is '</s>'"),
    ],
)
def test_a_model_that_does_not_fit_its_tokens_is_told(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    job = make_job(tmp_path, {"reward": reward("exact_match")}, ROWS)
    for name, content in change.items():
        (tmp_path / "model" / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        preflight(job)


def test_a_stop_that_could_never_be_is_told(tmp_path: Path) -> None:
    job = make_job(tmp_path, {"reward": reward("exact_match")}, ROWS)
    calls = {**job.graph.calls, "rollout": msgspec.structs.replace(job.graph.calls["rollout"], stop=("</s>\n",))}
    job = msgspec.structs.replace(job, graph=msgspec.structs.replace(job.graph, calls=calls))
    with pytest.raises(ConfigError, match=r"\$\.calls\.rollout\.stop\[0\]: '</s>\\n' holds the special token"):
        preflight(job)


def test_a_tokenizer_without_an_end_or_a_template_is_told(tmp_path: Path) -> None:
    bare: Any = make_tokenizer()
    bare.eos_token = None
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so"}]
    cases = (
        ({"prompt": "hello", "response": " so"}, r"a\.jsonl:1: \$\.response: .* no end-of-sequence token"),
        ({"messages": chat}, r"a\.jsonl:1: \$\.messages: the tokenizer has no chat template"),
    )
    for content, said in cases:
        data = DataSet(DataSpec(write(tmp_path / "a.jsonl", [content])), WHOLE, bare)
        with pytest.raises(ConfigError, match=said):
            data.row(0)


def test_held_out_prompts_of_the_test_split_are_cut_as_those_of_training(tmp_path: Path) -> None:
    made = make_job(tmp_path, {}, ROWS, too_long="truncate_left", max_prompt_tokens=4, limit=5)
    job = msgspec.structs.replace(made, eval=EvalSpec(every=1))
    assert job.held_out == msgspec.structs.replace(job.data, split="test", limit=None)
    assert msgspec.structs.replace(made, eval=EvalSpec(every=0)).held_out is None
