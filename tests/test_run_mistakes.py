"""Mistakes in a run file, its data and its model: each is refused with its place, all of them at once."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from realgraph.commands.check import check_command
from realgraph.graphs.errors import OTHER_WORDS, Where
from realgraph.reference.reference import generated_files
from realgraph.run.running import claim, prepare
from realgraph.run_file.compose import check_run
from realgraph.run_file.local_data import probe_data
from tests.run_texts import ROOT, RUN, place, problems_of, refused, write_model

__all__ = ["place"]


# --- what is refused, and where ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "path", "text", "hint"),
    [
        ("graph: grpo", "graph: gropo", "$.graph", "'gropo' is neither a library graph nor the file", "mean 'grpo'?"),
        ("graph: grpo", "grpah: grpo", "$.grpah", "unknown key 'grpah'", "did you mean 'graph'?"),
        ("graph: grpo", "graph: [grpo]", "$.graph", "expected text, got a list", "library graphs: generate, grpo"),
        ("graph: grpo", "graph: ${name}", "$.graph", "expected the name of a graph, or a file", "library graphs"),
        ("graph: grpo", "steps: 3", "$.steps", "given twice", ""),
        ("steps: 3", "stesp: 3", "$.stesp", "unknown key 'stesp'", "did you mean 'steps'?"),
        ("steps: 3", "steps: 0", "$.steps", "expected a whole number >= 1, got 0", ""),
        ("steps: 3", "staleness: 1.5", "$.staleness", "expected a whole number >= 0 and <= 1,000,000, got 1.5", ""),
        ("steps: 3", "overdue: maks", "$.overdue", "expected one of allow, drop, mask, wait", "did you mean 'mask'?"),
        ("steps: 3", "format: 7", "$.format", "format 7 is unknown: this version reads formats 1 to 1", "newer"),
        ("steps: 3", "seed: ${oc.env:SEED}", "$.seed", "${oc.env:SEED} is not a plain reference", ""),
        ("lr: 2e-6", "lrr: 2e-6", "$.params.lrr", "the graph grpo has no parameter 'lrr'", "did you mean 'lr'?"),
        ("lr: 2e-6", "learning_rate: 2e-6", "$.params.learning_rate", "has no parameter", "did you mean 'lr'?"),
        ("lr: 2e-6", "epsilon: 0.2", "$.params.epsilon", "no parameter", "did you mean 'clip_high' and 'clip_low'?"),
        ("steps: 3", "max-steps: 3", "$.max-steps", "unknown key 'max-steps'", "did you mean 'steps'?"),
        ("path: model}", "model_path: model}", "$.models.actor.model_path", "unknown key", "did you mean 'path'?"),
        ("groups: 4", "train_batch_size: 4", "$.batch.train_batch_size", "unknown key", "did you mean 'groups'?"),
        ("lr: 2e-6", "lr: fast", "$.params.lr", "expected a number, as the graph's default", ""),
        ("lr: 2e-6", "lr: ${graph}", "$.params.lr", "expected a number, as the graph's default", ""),
        ("reward: {fn", "rewrad: {fn", "$.calls.rewrad", "the graph grpo has no call 'rewrad'", "mean 'reward'?"),
        ("fn: ", "fun: ", "$.calls.reward.fun", "unknown key 'fun' of kind function", "did you mean 'fn'?"),
        ("actor: {path", "actr: {path", "$.models.actr", "the graph grpo has no role 'actr'", "did you mean 'actor'?"),
        ("path: model}", "paths: model}", "$.models.actor.paths", "unknown key 'paths'", "did you mean 'path'?"),
        ("path: model}", "path: ./modle}", "$.models.actor.path", "there is no model './modle'", "or a Hub id such as"),
        ("path: model}", "trainable: true}", "$.models.actor", "the weights of 'actor' have no source", "path"),
        ("steps: 3", "launch: {kind: hosts, listen: here}", "$.launch.listen", "'here' is no address", "10.0.0.1:7000"),
        ("steps: 3", "launch: {kind: hosts, listen: 'n:0'}", "$.launch.listen", "'n:0' is no address", "10.0.0.1:7000"),
        ("steps: 3", "launch: {kind: ray, address: n}", "$.launch.address", "'n' is no address", "10.0.0.1:7000"),
        (
            "path: data/train.jsonl",
            "path: data/trian.jsonl",
            "$.data.path",
            "there is no data set",
            "or a Hub id such as",
        ),
        ("path: data/train.jsonl", "split: train", "$.data.path", "required, but not given: expected text", ""),
        (
            "prompt: question",
            "promt: question",
            "$.data.columns.promt",
            "has no input 'promt'",
            "did you mean 'prompt'?",
        ),
        ("prompt: question", "prompt: questoin", "$.data.columns.prompt", "no column 'questoin'", "mean 'question'?"),
        ("groups: 4", "groups: 40", "$.batch.groups", "the data set has 10 rows", "at most 10"),
        ("groups: 4", "expected_new_tokens: 17", "$.batch.expected_new_tokens", "a sample has at most 16", ""),
        ("steps: 3", "groups: 3", "$.groups", "unknown key 'groups'", "it belongs to `batch`"),
        ("steps: 3", "temperature: 3", "$.temperature", "unknown key", "did you mean 'params.temperature'?"),
        ("steps: 3", "lr: 3", "$.lr", "unknown key 'lr'", "did you mean 'params.lr'?"),
        ("steps: 3", "learning_rate: 3", "$.learning_rate", "unknown key", "in params: did you mean 'lr'?"),
        ("steps: 3", "train: {lr: 3}", "$.train", "unknown key 'train'", "did you mean 'calls.train'?"),
        ("groups: 4", "max_running: 4", "$.batch.max_running", "unknown key 'max_running'", "it belongs to `rollout`"),
        (
            "steps: 3",
            "rollout: {interrupt: kep_kv}",
            "$.rollout.interrupt",
            "one of keep_kv, recompute, wait",
            "'keep_kv'?",
        ),
        ("steps: 3", "rollout: {max_running: 0}", "$.rollout.max_running", "a whole number >= 1 or null, got 0", ""),
        ("steps: 3", "allocation: {trian: {dp: 2}}", "$.allocation.trian", "no call 'trian'", "did you mean 'train'?"),
        ("steps: 3", "allocation: {train: {dq: 2}}", "$.allocation.train.dq", "unknown key 'dq'", "known: "),
        ("steps: 3", "eval: {call: rewrd}", "$.eval.call", "'rewrd' is no call of the graph", "did you mean 'reward'?"),
        ("steps: 3", "eval: {every: 2}", "$.eval", "have no test split", "give eval.data"),
        (
            "steps: 3",
            "eval: {data: {path: data, columns: {prompt: q}}}",
            "$.eval.data.columns.prompt",
            "no column 'q'",
            "",
        ),
        ("steps: 3", "eval: {n: 2, k: [1, 4], temperature: 1}", "$.eval.k", "pass@4 needs at least 4", "eval.n to 4"),
        ("steps: 3", "eval: {n: 4}", "$.eval.n", "greedy decoding gives the same text 4 times", "temperature"),
        ("graph: grpo", "graph: run.yaml", "$.graph", "a run file can't be its own graph", "name another file"),
        ("steps: 3", "cluster: {nodes: 0}", "$.cluster.nodes", "expected a whole number >= 1 or null, got 0", ""),
        ("steps: 3", "cluster: {kind: H100-SMX}", "$.cluster.kind", "unknown device kind 'H100-SMX'", "'H100-SXM'?"),
        (
            "steps: 3",
            "cluster: {kind: H100-SXM, devices: 8, more: [{nodes: 1, kind: a100}]}",
            "$.cluster.more[0].kind",
            "unknown device kind 'a100'",
            "did you mean ",
        ),
        (
            "steps: 3",
            "constraints: {share: [[trian, rollout]]}",
            "$.constraints.share[0]",
            "'trian' is not a call of the graph",
            "did you mean 'train'?",
        ),
        ("steps: 3", "constraints: {share: [[train, reward]]}", "$.constraints.share[0]", "'reward' holds no dev", ""),
        ("steps: 3", "constraints: {share: [[train, ref_logp]]}", "$.constraints.share[0]", "switched off by its", ""),
        (
            "steps: 3",
            "constraints: {forbid: {rolout: [{dp: 2}]}}",
            "$.constraints.forbid.rolout",
            "'rolout' is not a call of the graph",
            "did you mean 'rollout'?",
        ),
    ],
)
def test_each_mistake_of_a_run_file_has_its_place(
    place: Path, right: str, wrong: str, path: str, text: str, hint: str
) -> None:
    run = RUN.replace(right, wrong)
    assert run != RUN
    (place / "run.yaml").write_text(run)
    found = refused(place)
    here = [problem for problem in found if problem.where.path == path]
    assert len(here) == 1, found
    assert text in here[0].text
    assert hint in here[0].hint
    given_at = [i for i, line in enumerate(run.splitlines(), 1) if wrong in line]
    if not here[0].text.startswith("required") and path != "$.models.actor":
        assert here[0].where.line == given_at[-1]
        assert here[0].where.file == str(place / "run.yaml")


def test_words_of_other_tools_stand_for_names_that_there_are() -> None:
    texts = [*generated_files().values(), *(file.read_text() for file in (ROOT / "graphs" / "library").glob("*.yaml"))]
    names = set(re.findall(r"\w+", " ".join(texts)))
    assert OTHER_WORDS.keys() <= names
    for ours, theirs in OTHER_WORDS.items():
        assert ours not in theirs.split()


def test_held_out_data_are_read_as_the_training_data(place: Path) -> None:
    run = RUN.replace("steps: 3", "steps: 3\neval: {every: 1, data: {path: data, limit: 2}}")
    (place / "run.yaml").write_text(run)
    checked = check_run(place / "run.yaml")
    assert checked.run.eval is not None
    held = checked.run.eval.data
    assert held is not None and held.limit == 2 and checked.run.data.limit is None
    assert held.columns == checked.run.data.columns == {"prompt": "question"}
    (place / "run.yaml").write_text(run.replace("limit: 2", "columns: {answer: answer, prompt: answer}"))
    own = check_run(place / "run.yaml").run.eval
    assert own is not None and own.data is not None and own.data.columns["prompt"] == "answer"


def test_a_graph_file_in_place_of_a_run_file_is_told_so(place: Path) -> None:
    (place / "run.yaml").write_text((ROOT / "graphs/library/sft.yaml").read_text())
    (problem,) = refused(place)
    assert "this is a graph file" in problem.text
    assert "realgraph init --graph" in problem.hint


def test_a_csv_file_without_a_header_has_no_hint_that_breaks_off(place: Path) -> None:
    (place / "data" / "train.csv").write_text("")
    (place / "run.yaml").write_text(RUN.replace("train.jsonl", "train.csv").replace("{prompt: question}", "{}"))
    hints = {problem.hint for problem in refused(place) if "no column" in problem.text}
    assert hints == {"map it: data.columns.prompt: <column>", "map it: data.columns.answer: <column>"}


def test_empty_data_are_told_so(place: Path) -> None:
    (place / "data" / "train.jsonl").write_text("")
    (problem,) = refused(place)
    assert (problem.where.path, problem.text) == ("$.data.path", "the data set is empty")


def test_a_folder_of_splits_is_read_by_the_check_as_by_the_run(place: Path) -> None:
    run = RUN.replace("data/train.jsonl", "data").replace("steps: 3", "steps: 3\neval: {every: 1}")
    (place / "run.yaml").write_text(run)
    (place / "data" / "test.jsonl").write_text('{"q": "1+1=", "answer": "2"}\n' * 90)
    checked = check_run(place / "run.yaml")  # the columns are those of the training rows, and so is their number
    assert checked.facts.n_rows == 10
    (problem,) = refused(place, "data.split=dev")
    assert (problem.where.path, problem.hint) == ("$.data.path", "the folder has: test, train")
    (place / "data" / "test.jsonl").unlink()
    (problem,) = refused(place)
    assert "no test split" in problem.text


@pytest.mark.parametrize(
    ("files", "said"),
    [((), "the folder holds no .jsonl, "), (("a.csv", "b.jsonl"), "CSV and JSON lines files side by")],
)
def test_a_folder_that_is_no_data_set_is_refused(place: Path, files: tuple[str, ...], said: str) -> None:
    (place / "more").mkdir()
    for name in files:
        (place / "more" / name).write_text("question,answer\n")
    (place / "run.yaml").write_text(RUN.replace("data/train.jsonl", "more"))
    (problem,) = refused(place)
    assert problem.where.path == "$.data.path"
    assert problem.text.startswith(f"{place / 'more'}: {said}")


def test_mistakes_of_all_sorts_come_at_once(place: Path) -> None:
    overrides = ["models.actor.path=./none", "allocation.trian.dp=1", "params.minibatches=3", "data.columns.prmpt=x"]
    paths = [problem.where.path for problem in refused(place, *overrides)]
    wanted = ["$.allocation.trian", "$.data.columns.prmpt", "$.models.actor.path", "$.calls.train.minibatches"]
    assert sorted(paths) == sorted(wanted)


def test_a_temperature_of_0_says_where_decoding_is_greedy(place: Path) -> None:
    (problem,) = [p for p in refused(place, "params.temperature=0") if p.where.path == "$.calls.train.temperature"]
    assert problem.text == "expected a number > 0, got 0.0"
    assert "greedy decoding is `temperature: 0` of a generate call" in problem.hint
    assert "write 0" not in problem.hint
    assert problem.hint.endswith("its value comes from params.temperature, command line")


def test_a_rule_about_a_reference_names_the_value_behind_it(place: Path) -> None:
    problem = refused(place, "params.minibatches=3")[0]
    assert problem.where.path == "$.calls.train.minibatches"
    assert problem.hint.endswith("its value comes from params.minibatches, command line")


def broken_model(folder: Path, name: str) -> None:
    match name:
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
        case "list config":
            (folder / "config.json").write_text("[]")
        case "own code":
            (folder / "config.json").write_text('{"auto_map": {"AutoModel": "x.Y"}}')
        case "pickled":
            (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        case "no weights":
            (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("override", "path", "text"),
    [
        ("allocation.train.schedule=zero_bubble", "$.allocation.train.schedule", "expected one of 1f1b, interleaved"),
        ("allocation.rollout.kv_cache=float8", "$.allocation.rollout.kv_cache", "unknown key 'kv_cache'"),
        (
            "constraints.forbid={train: [{schedule: zero_bubble}]}",
            "$.constraints.forbid.train[0].schedule",
            "expected one of 1f1b, interleaved",
        ),
    ],
)
def test_what_no_engine_does_is_no_choice_of_a_pin(place: Path, override: str, path: str, text: str) -> None:
    (problem,) = refused(place, override)
    assert problem.where.path == path and problem.text.startswith(text)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("no config", "has no readable config.json: No such file or directory", "save_pretrained"),
        ("bad config", "config.json is not JSON", ""),
        ("list config", "config.json is not a JSON object", ""),
        ("own code", "brings its own Python code (auto_map in config.json)", "transformers has itself"),
        ("pickled", "has only pickled weights (pytorch_model.bin), which can run code", "safe_serialization=True"),
        ("no weights", "has no weights", ".safetensors"),
    ],
)
def test_a_model_folder_that_is_unsafe_or_incomplete_is_refused(place: Path, name: str, text: str, hint: str) -> None:
    broken_model(place / "model", name)
    problem = refused(place)[0]
    assert problem.where == Where(str(place / "run.yaml"), 2, "$.models.actor.path")
    assert text in problem.text
    assert hint in problem.hint


def test_a_reward_model_without_one_score_is_refused_before_anything_starts(place: Path) -> None:
    scores = [
        f"models.judge={{path: {place / 'model'}, head: score}}",
        "calls.points={kind: inference, model: judge, output: scores, writes: [points]}",
    ]
    weights, tensors = place / "model" / "model.safetensors", {"model.norm.weight": np.ones(8, np.float32)}
    save_file(tensors, weights)
    (problem,) = refused(place, *scores)
    assert problem.where.path == "$.models.judge.path" and "have no score head" in problem.text
    check_run(place / "run.yaml", [*scores, "models.judge.init=actor"])
    save_file({**tensors, "score.weight": np.ones((1, 8), np.float32)}, weights)
    check_run(place / "run.yaml", scores)
    save_file({**tensors, "score.weight": np.ones((2, 8), np.float32)}, weights)
    (problem,) = refused(place, *scores)
    assert "gives 2 numbers, and a score head gives one" in problem.text and "num_labels=1" in problem.hint


def test_a_role_that_is_off_needs_no_model(place: Path) -> None:
    check_run(place / "run.yaml", ["models.ref.path=model"])
    write_model(place / "other")
    broken_model(place / "other", "pickled")
    override = f"models.ref.path={place / 'other'}"
    check_run(place / "run.yaml", [override])
    assert "pickled" in refused(place, override, "params.kl_coef=0.1")[0].text


# --- local data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1, 3, 100])
def test_rows_and_columns_are_those_of_the_files(tmp_path: Path, limit: int | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = Where()
    (tmp_path / "a.jsonl").write_text('{"q": 1, "a": 2}\n\n{"q": 3, "a": 4}\n{"q": 5, "a": 6}')
    (tmp_path / "b.jsonl").write_text('{"q": 1, "a": 2}\n')
    (tmp_path / "notes.txt").write_text("x\n")
    pq.write_table(pa.table({"q": [1, 2, 3, 4], "a": [1, 2, 3, 4]}), tmp_path / "c.parquet")
    for path, n_rows in [("a.jsonl", 3), ("*.jsonl", 4), ("c.parquet", 4)]:
        data = probe_data(str(tmp_path / path), limit, where)
        assert (data.columns, data.n_rows) == (("q", "a"), min(n_rows, limit or n_rows))
    (tmp_path / "c.parquet").unlink()
    assert probe_data(str(tmp_path), limit, where).n_rows == min(4, limit or 4)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x.jsonl", b"{oops\n", "x.jsonl:1 is not JSON"),
        ("x.jsonl", b"\n[1, 2]\n", "x.jsonl:2 is not a JSON object"),
        ("x.jsonl", b"\xff\xfe\n", "x.jsonl:1 is not JSON"),
        ("x.parquet", b"PAR", "x.parquet can't be read"),
    ],
)
def test_data_that_can_not_be_read_names_file_and_line(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    where = Where("run.yaml", 4, "$.data.path")
    problem = problems_of(lambda: probe_data(str(tmp_path / name), None, where))[0]
    assert problem.where == where
    assert text in problem.text


# --- variables that functions name ------------------------------------------------------------------------------------


def test_a_variable_that_is_not_set_is_refused_with_its_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a secret value")
    monkeypatch.delenv("OTHER_JUDGE_KEY", raising=False)
    text = RUN.replace("args: {strict: true}", "args: {strict: true}, env: [JUDGE_KEY, OTHER_JUDGE_KEY, JUGDE_KEY]")
    (place / "run.yaml").write_text(text)
    for command in (lambda: check_command(place / "run.yaml"), lambda: prepare(place / "run.yaml", (), None)):
        other, close = problems_of(command)
        assert (other.where.line, other.where.path) == (11, "$.calls.reward.env[1]")
        assert other.text == "the environment variable 'OTHER_JUDGE_KEY' is not set"
        assert close.hint == "did you mean 'JUDGE_KEY'?"


def test_the_value_of_a_variable_is_written_nowhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a secret value")
    text = RUN.replace("args: {strict: true}", "args: {strict: true}, env: [JUDGE_KEY]")
    (place / "run.yaml").write_text(text)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    write_model(place / "full", **sizes, num_key_value_heads=2, vocab_size=64, max_position_embeddings=256)
    changes = [f"outputs.dir={place / 'out'}", f"models.actor.path={place / 'full'}", "cluster.kind=cpu"]
    prepared = prepare(place / "run.yaml", changes, None)
    claim(prepared)
    written = [path.read_text() for path in (place / "out").rglob("*") if path.is_file()]
    assert any("JUDGE_KEY" in text for text in written)
    assert not any("a secret value" in text for text in written)
