"""The samples of runs that only generate: a line has what every call wrote, on whatever devices the calls ran."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.facts import Facts
from realgraph.graphs.functions import GATHERED
from realgraph.graphs.graph import Edge, Graph
from realgraph.graphs.keys import KeyType
from realgraph.runtime.job.samples import shown_name, with_gathering
from realgraph.runtime.master.records import drop_repeated
from tests.runs import finish, home, records, write_run
from tests.strategies import Tree, spec_of, where

__all__ = ["home"]

CALLS: dict[str, dict[str, Any]] = {
    "rollout": {"kind": "generate", "model": "actor", "reads": ["prompt"], "n": 2},
    "length": {
        "kind": "function",
        "fn": "length",
        "reads": {"text": "rollout.text"},
        "writes": {"size": "sample float32"},
    },
    "question": {
        "kind": "function",
        "fn": "fill_template",
        "reads": {"prompt": "prompt", "text": "rollout.text"},
        "args": {"template": "{prompt}{text}"},
        "writes": {"question": "sample text"},
    },
    "judge": {"kind": "generate", "model": "other", "reads": ["question"], "temperature": 0, "max_new_tokens": 3},
    "score": {"kind": "inference", "model": "rm", "output": "scores", "writes": ["score"], "samples": "rollout"},
    "ranks": {
        "kind": "function",
        "fn": "ranking:ranks",
        "over": "batch",
        "reads": ["score"],
        "writes": {"rank": "sample int32"},
    },
}
RANKING = """
def ranks(score):
    order = sorted(range(len(score)), key=lambda i: -score[i])
    return [order.index(i) for i in range(len(score))]
"""


def tree(calls: dict[str, dict[str, Any]] = CALLS) -> Tree:
    models = {"actor": {}, "other": {}, "rm": {"head": "score"}}
    used = {call.get("model") for call in calls.values()}
    return {
        "name": "scoring",
        "inputs": {"prompt": "group tokens", "answer": "group text"},
        "models": {role: {"path": role, **settings} for role, settings in models.items() if role in used},
        "calls": calls,
    }


def compiled(calls: dict[str, dict[str, Any]]) -> Graph:
    return compile_graph(spec_of(tree(calls)), where, Facts())


def test_what_other_workers_may_have_is_copied_to_those_that_write() -> None:
    graph = with_gathering(compiled(CALLS))
    name, call = list(graph.calls.items())[-1]
    assert (name, call.fn) == ("samples", GATHERED)  # type: ignore[union-attr]
    assert graph.reads[name] == ("judge.text", "judge.finished", "score", "rank")
    assert graph.writes[name] == tuple(f"samples.{key}" for key in graph.reads[name])
    assert [shown_name(graph, graph.keys[key]) for key in graph.writes[name]] == list(graph.reads[name])
    assert {graph.keys[key].type for key in graph.writes[name]} == {KeyType("sample", "json")}
    assert all(name in graph.keys[key].consumers for key in graph.reads[name])
    assert graph.edges[-3:] == (
        Edge("judge", name, ("judge.text", "judge.finished")),
        Edge("score", name, ("score",)),
        Edge("ranks", name, ("rank",)),
    )


def test_a_call_of_that_name_keeps_it() -> None:
    calls = {"samples" if name == "score" else name: call for name, call in CALLS.items()}
    assert list(with_gathering(compiled(calls)).calls)[-2:] == ["ranks", "samples_"]


def test_where_all_is_with_the_samples_nothing_is_added() -> None:
    graph = compiled({name: CALLS[name] for name in ("rollout", "length")})
    assert with_gathering(graph) is graph


@pytest.mark.slow
def test_lines_have_the_same_values_wherever_the_calls_run(home: Path) -> None:
    (home / "ranking.py").write_text(RANKING)
    (home / "scoring.yaml").write_text(json.dumps(tree()))
    config = AutoConfig.from_pretrained(home / "model", num_labels=1)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(home / "rm")
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.save_pretrained(home / "rm")
    models = {"actor": {"path": "model"}, "other": {"path": "model"}, "rm": {"path": "rm"}}
    base = {
        "graph": "scoring.yaml",
        "models": models,
        "steps": 3,
        "data": {"columns": {"prompt": "prompt", "answer": "answer"}},
    }
    one, other = {"first": 0, "devices": 1}, {"first": 1, "devices": 1}
    both = {"first": 0, "devices": 2}
    places = {
        "together": {"rollout": one, "judge": one, "score": one},
        "apart": {"rollout": one, "judge": other, "score": other},
        "over": {"rollout": both, "judge": other, "score": both},
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name, allocation in places.items():
        finish(home, "run", str(write_run(home, name, base, {"allocation": allocation})), name=name)
        lines = [
            json.loads(line) for file in (home / name / "samples").iterdir() for line in file.read_text().splitlines()
        ]
        found[name] = sorted(lines, key=lambda line: (line["group"], line["sample"]))
        assert len(lines) == 3 * 8 * 2
        assert all("samples/seconds" in record["metrics"] for record in records(home / name))
    assert len({line["score"] for line in found["together"]}) > 24
    for line in found["together"]:
        assert line["question"] == line["prompt"] + line["rollout.text"]
        assert not [key for key in line if key.startswith("samples.")]
    for place in range(3):  # of each step all ranks are given once
        assert sorted(line["rank"] for line in found["together"][16 * place : 16 * place + 16]) == list(range(16))
    for name in ("apart", "over"):
        for line, same in zip(found[name], found["together"], strict=True):
            assert line | {"score": same["score"]} == same
            assert line["score"] == pytest.approx(same["score"], abs=1e-4)


def test_lines_of_what_is_made_again_are_removed_and_all_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "worker-0.jsonl"
    lines = [b'{"group":%d,"sample":%d}\n' % (group, sample) for group in (0, 2, 1, 4, 3) for sample in range(2)]
    file.write_bytes(b"".join([*lines[:4], b"no line of ours\n", *lines[4:], b'{"group":0,"sam']))
    file.chmod(0o600)
    drop_repeated(file, 4, frozenset({1}))
    kept = [*lines[:4], b"no line of ours\n", *lines[8:]]
    assert file.read_bytes() == b"".join(kept) and file.stat().st_mode & 0o777 == 0o600
    before = file.stat().st_ino
    drop_repeated(file, 4, frozenset({1}))
    assert file.stat().st_ino == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_a_run_that_goes_on_has_each_sample_once(home: Path) -> None:
    """After a kill: steps 3 to 6 are made again, of which the files have lines."""
    base = {"graph": "generate", "params": {"n": 2}, "steps": 6, "checkpoint": {"every": 2, "keep": 9}}
    finish(home, "run", str(write_run(home, "generated", base)), name="generated")
    samples, checkpoints = home / "generated/samples", home / "generated/checkpoints"
    whole = {file.name: file.read_bytes() for file in samples.iterdir()}
    for step in (4, 6):
        shutil.rmtree(checkpoints / f"step-{step:06d}")
    with (samples / "worker-1.jsonl").open("ab") as file:
        file.write(b'{"group":')
    finish(home, "run", "--resume", str(home / "generated"), name="generated")
    assert {file.name: file.read_bytes() for file in samples.iterdir()} == whole
