"""Roles with another tokenizer: found before weights are loaded, or read the same conversation in their own tokens."""

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.facts import Facts
from realgraph.graphs.spec import GraphSpec
from realgraph.runtime.data.own_tokens import OwnTokens
from realgraph.runtime.job.sample_ids import sample_id
from realgraph.runtime.preflight.same_tokens import check_tokenizers, difference
from realgraph.runtime.scheduler.groups.ledger import Group
from realgraph.runtime.scheduler.placement import Batch
from realgraph.runtime.scheduler.program import CallPlan
from realgraph.runtime.wire.protocol import Sample
from tests import tiny
from tests.data_sets import CHATML, LLAMA3, PLAIN, TOOLS, make_tokenizer
from tests.runs import BASE, finish, home, records, write_run

__all__ = ["home"]

OTHER = make_tokenizer(LLAMA3, corpus=["zwei und drei sind fünf, und 46 ist die Antwort 12 34\n"] * 9)
ACTOR, RM = {"trainable": False, "path": "ACTOR"}, {"head": "score", "path": "RM"}
ROLLOUT = {"kind": "generate", "model": "actor", "n": 4}
SCORE = {"kind": "inference", "model": "rm", "output": "scores", "writes": ["score"], "tokenizer": "own"}
SCORED: dict[str, Any] = {
    "name": "scored",
    "inputs": {"prompt": "group tokens", "answer": "group text"},
    "models": {"actor": ACTOR, "rm": RM},
    "calls": {"rollout": ROLLOUT, "score": SCORE},
}


def changed(tokenizer: Any, change: Any) -> Any:
    """The tokenizer with its file changed."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    change(content)
    from tokenizers import Tokenizer as RawTokenizer

    maker: Any = PreTrainedTokenizerFast
    return maker(tokenizer_object=RawTokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>")


# --- comparing ---------------------------------------------------------------------------------------------------


def test_tokenizers_of_the_same_tokens_are_the_same() -> None:
    """Another end of sequence, another template, further tokens at the end: each token still means the same."""
    for other in (make_tokenizer(CHATML), make_tokenizer(eos="<s>"), make_tokenizer(bos=True)):
        assert difference(PLAIN, other) == ""
    more: Any = make_tokenizer()
    more.add_tokens(["<think>"])
    padded: Any = make_tokenizer()
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert difference(PLAIN, more) == difference(padded, PLAIN) == ""
    said = difference(more, PLAIN)
    assert "1 of 381 tokens differ" in said.replace(f"{len(more.get_vocab())}", "381")
    assert "'<think>' here and none there" in said


@pytest.mark.parametrize("what", ["vocabulary", "ids", "merges", "normaliser", "special"])
def test_tokenizers_that_read_otherwise_differ(what: str) -> None:
    def change(content: dict[str, Any]) -> None:
        model, vocabulary = content["model"], content["model"]["vocab"]
        a, b = list(vocabulary)[-2:]
        match what:
            case "ids":
                vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
            case "merges":
                model["merges"] = model["merges"][:20]
            case "normaliser":
                content["normalizer"] = {"type": "Lowercase"}
            case "special":
                content["added_tokens"][2]["content"] = "<|other|>"

    other = OTHER if what == "vocabulary" else changed(PLAIN, change)
    assert difference(PLAIN, other)
    assert ("cut otherwise" in difference(PLAIN, other)) == (what in ("merges", "normaliser", "special"))


def graph_of(tmp_path: Path, tokenizers: dict[str, Any], **score: Any) -> Any:
    spec = json.loads(json.dumps(SCORED))
    for role, tokenizer in tokenizers.items():
        folder = tmp_path / role
        folder.mkdir()
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        spec["models"][role]["path"] = str(folder)
    spec["calls"]["score"] |= score
    return compile_graph(msgspec.convert(spec, GraphSpec), lambda path: Where(path=path), Facts())


def test_a_role_of_another_tokenizer_is_refused_with_both_and_the_fix(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, {"actor": PLAIN, "rm": OTHER}, tokenizer="shared")
    with pytest.raises(ConfigError) as error:
        check_tokenizers(graph, PLAIN, ["hello"])
    said = str(error.value)
    assert f"$.calls.score.model: 'rm' ({tmp_path / 'rm'}) has another tokenizer than that of its tokens" in said
    assert str(tmp_path / "actor") in said
    assert "hint: write `tokenizer: own` in calls.score" in said
    spec = msgspec.structs.replace(graph.calls["score"], output="logprobs")
    with pytest.raises(ConfigError, match="hint: take a model of the same family"):
        check_tokenizers(msgspec.structs.replace(graph, calls={**graph.calls, "score": spec}), PLAIN, [])


@pytest.mark.parametrize(("rm", "fields"), [(OTHER, {}), (make_tokenizer(CHATML), {"tokenizer": "shared"})])
def test_a_role_that_reads_what_it_knows_is_taken(tmp_path: Path, rm: Any, fields: dict[str, Any]) -> None:
    assert check_tokenizers(graph_of(tmp_path, {"actor": PLAIN, "rm": rm}, **fields), PLAIN, ["hello"]) == []


def test_weights_without_a_tokenizer_are_told(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, {"actor": PLAIN, "rm": None}, tokenizer="shared")
    (line,) = check_tokenizers(graph, PLAIN, [])
    assert line.startswith("rm: no tokenizer lies with ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models.rm.trainable": True}, "'rm' is trained, on the tokens of the role that generates"),
        ({"calls.rollout": None, "inputs.tokens": "sample tokens"}, "samples of the data, which have no text"),
        ({"calls.score.output": "values", "models.rm.head": "value"}, "would give values of tokens of its own"),
    ],
)
def test_what_no_own_tokenizer_can_do_is_refused(changes: dict[str, Any], said: str) -> None:
    spec: dict[str, Any] = json.loads(json.dumps(SCORED))
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    with pytest.raises(ConfigError, match=said):
        compile_graph(msgspec.convert(spec, GraphSpec), lambda path: Where(path=path), Facts())


# --- cutting -----------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 12+34?"}]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, TOOLS])
@pytest.mark.parametrize("prompt", ["what is 12+34?", CHAT])
def test_a_conversation_is_rendered_by_the_roles_own_template(template: str, prompt: Any) -> None:
    tokenizer: Any = make_tokenizer(template)
    tools = [{"name": "add"}]
    found = OwnTokens("rm", tokenizer).tokens(prompt, "it is 46", finished=True, tools=tools)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    whole = [*messages, {"role": "assistant", "content": "it is 46"}]
    assert found == tokenizer.apply_chat_template(whole, return_dict=False, tools=tools)
    assert ("add" in tokenizer.decode(found)) == (template == TOOLS)


def test_without_a_template_a_plain_prompt_goes_on() -> None:
    own = OwnTokens("rm", make_tokenizer(bos=True))
    texts = [own.tokenizer.decode(own.tokens("12+34=", "46", finished=finished)) for finished in (True, False)]
    assert texts == ["<s>12+34=46</s>", "<s>12+34=46"]
    with pytest.raises(ValueError, match="the prompt is a chat, and the tokenizer of 'rm' has no chat template"):
        own.tokens(CHAT, "46", finished=True)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_balanced_by_the_lengths_that_the_role_reads(seed: int) -> None:
    rng = random.Random(seed)
    groups = []
    for number in range(rng.randint(1, 9)):
        group = Group(number, 0, 0)
        sizes = [(rng.randint(1, 50), rng.randint(1, 50)) for _ in range(3)]
        group.samples = tuple(Sample(sample_id(number, i), a, own_tokens=(b,)) for i, (a, b) in enumerate(sizes))
        groups.append(group)
    batch = Batch(0, groups, seed=1)
    ranks = ((0,), (1,), (2,))
    for own in (-1, 0):
        samples = [one for group in groups for one in group.samples]
        lengths = {one.sample: one.own_tokens[0] if own == 0 else one.n_tokens for one in samples}
        call = CallPlan("score", "inference", "rm", {"": ("tokens",)}, (), (0, 1, 2), ranks, own=own)
        batch.own(call)
        parts = batch.whole_named(call)
        assert sorted(sample for part in parts for sample in part) == batch.ids
        loads = [sum(lengths[sample] for sample in part) for part in parts]
        assert max(loads) - min(loads) <= max(lengths.values())
        for part, sources in zip(parts, batch.sources_of_ranks(call), strict=True):
            assert sorted(sample for source in sources for sample in source.samples) == list(part)
        held = dict(zip(batch.ids, batch.owners("score"), strict=True))
        assert all(held[sample] == rank for rank, part in enumerate(parts) for sample in part)


# --- a run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(home: Path) -> Path:
    """A run on compressed CSV whose reward model is of another family: other tokens, a chat template of its own."""
    tokenizer: Any = make_tokenizer(LLAMA3, corpus=["12+34=046 " * 9])
    shape = tiny.config("llama", vocab_size=len(tokenizer.get_vocab()), num_labels=1)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(home / "rm")
    tokenizer.save_pretrained(home / "rm")
    shutil.copytree(home / "model", home / "chatty")
    chatty: Any = AutoTokenizer.from_pretrained(home / "chatty")
    chatty.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if twice %}={% endif %}"
    chatty.save_pretrained(home / "chatty")
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    lines = ["prompt,answer", *(f"{item['prompt']},{item['answer']}" for item in rows)]
    (home / "train.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (home / "scores.py").write_text("def same(score, answer):\n    return score\n")
    reward = {
        "kind": "function",
        "fn": "scores:same",
        "reads": ["score", "answer"],
        "writes": {"reward": "sample float32"},
    }
    models = {"actor": {}, "rm": {**RM, "path": "rm"}}
    graph = {**SCORED, "models": models, "calls": {**SCORED["calls"], "reward": reward}}
    (home / "scored_graph.yaml").write_text(json.dumps(graph))
    data = {"path": "train.csv.gz", "template_args": {"twice": True}}
    settings = {"graph": "scored_graph.yaml", "batch": {"groups": 6}, "steps": 2}
    evaluation = {
        "every": 2,
        "data": {**data, "path": "test.jsonl", "columns": {"prompt": "prompt", "answer": "answer"}},
    }
    parts = {"data": data, "models": {"actor": {"path": "chatty"}}, "eval": evaluation}
    file = write_run(home, "scored", settings, parts)
    return finish(home, "run", str(file), name="scored").folder


def test_scores_of_another_family_are_those_of_transformers(scored: Path, home: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "rm")
    model: Any = AutoModelForSequenceClassification.from_pretrained(home / "rm")
    lines = [json.loads(line) for file in (scored / "samples").iterdir() for line in file.read_text().splitlines()]
    assert len(lines) == 2 * 6 * 4
    assert len({line["reward"] for line in lines}) > len(lines) / 4
    for line in lines:
        assert line["prompt"].endswith("=="), "the template's argument reached the workers"
        assert line["answer"] == f"{sum(map(int, line['prompt'].rstrip('=').split('+'))):03d}", "CSV keeps zeros"
        question = line["prompt"].removesuffix("=")
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": line["text"]}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        with torch.no_grad():
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
            assert line["reward"] == pytest.approx(float(model.score(hidden)), abs=1e-4)
        assert "tokens_of_rm" not in line
    assert len(records(scored)) == 2


def test_held_out_samples_are_scored_in_the_tokens_of_the_other_family(scored: Path, home: Path) -> None:
    actor: Any = AutoModelForCausalLM.from_pretrained(home / "model")
    own, other = (AutoTokenizer.from_pretrained(home / name) for name in ("model", "rm"))
    scorer: Any = AutoModelForSequenceClassification.from_pretrained(home / "rm")
    scores = []
    for line in (home / "test.jsonl").read_text().splitlines():
        question = json.loads(line)["prompt"]
        ids = own(question + "=", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            drawn = actor.generate(ids, max_new_tokens=BASE["batch"]["max_new_tokens"], do_sample=False)
            text = own.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True)
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            hidden = scorer.model(torch.tensor([other.apply_chat_template(chat, return_dict=False)])).last_hidden_state
            scores.append(float(scorer.score(hidden[0, -1])))
    found = {record["step"]: record["metrics"]["reward"] for record in records(scored, "eval")}
    assert found == pytest.approx(dict.fromkeys((0, 2), sum(scores) / len(scores)), abs=1e-4)  # nothing is trained


def test_the_same_run_with_shared_tokens_is_refused_before_it_starts(scored: Path, home: Path) -> None:
    said = finish(
        home, "run", str(home / "scored.yaml"), "calls.score.tokenizer=shared", f"outputs.dir={home / 'no'}", code=2
    ).output()
    assert "$.calls.score.model: 'rm'" in said
    assert "write `tokenizer: own` in calls.score" in said
    assert not (home / "no").exists()
