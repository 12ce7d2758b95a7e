"""`realgraph generate`: prompts that can't be answered, chats as in the run, ends of the model's generation config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from realgraph.commands.eval import answering_roles, model_folder
from realgraph.commands.generate import SamplingRequest, answers, chat_settings
from realgraph.graphs.errors import ConfigError
from realgraph.runtime.job.job import DataSpec
from tests import tiny
from tests.data_sets import TOOLS, make_tokenizer

TOKENIZER: Any = make_tokenizer(TOOLS, eos="</s>")
ARGS = {"enable_thinking": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint of a tiny model that has a chat template."""
    root = tmp_path_factory.mktemp("run")
    folder = root / "checkpoints" / "step-000001" / "actor"
    tiny.save(folder, vocab_size=len(TOKENIZER.get_vocab()), max_position_embeddings=64)
    TOKENIZER.save_pretrained(folder)
    data = {"path": "x", "system": "be brief", "template_args": ARGS, "further": 1}
    (root / "job.json").write_text(json.dumps({"data": data, "name": "x"}))
    return root


def run_of(root: Path, roles: list[str], calls: dict[str, Any], leading: str = "") -> Path:
    """A run directory whose newest checkpoint has models of these roles."""
    for role in roles:
        folder = root / "checkpoints" / "step-000002" / role
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    root.mkdir(exist_ok=True)
    (root / "job.json").write_text(json.dumps({"graph": {"calls": calls, "leading": leading}}))
    return root


GENERATES = {name: {"kind": "generate", "model": role} for name, role in (("later", "con"), ("first", "pro"))}


def test_the_role_that_generates_answers_whatever_the_others_are_called(tmp_path: Path) -> None:
    calls = {"fit": {"kind": "train", "model": "critic"}, "sample": {"kind": "generate", "model": "policy"}}
    one = run_of(tmp_path / "one", ["critic", "policy"], calls)
    assert model_folder(one) == one / "checkpoints/step-000002/policy"
    two = run_of(tmp_path / "two", ["con", "pro"], GENERATES, leading="first")
    assert model_folder(two) == two / "checkpoints/step-000002/pro"
    assert model_folder(two, "con").name == "con"
    assert answering_roles(two / "checkpoints/step-000002") == ["pro", "con"]


def test_of_a_checkpoint_without_its_run_a_model_must_be_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, ["con", "pro"], GENERATES, leading="first")
    (run / "job.json").unlink()
    with pytest.raises(ConfigError) as refused:
        model_folder(run)
    (problem,) = refused.value.problems
    assert problem.text == "there are several models: con, pro"
    assert problem.hint == f"name the folder of one, such as {run}/checkpoints/step-000002/con"


def model(run: Path) -> Path:
    return run / "checkpoints" / "step-000001" / "actor"


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "command line: $: prompt 2 can't be answered: it is empty"),
        ("so it goes " * 90, "prompt 2 can't be answered: it has "),
        ("a\udcff", "prompt 2 can't be answered: it is not UTF-8 text: byte 2"),
    ],
)
def test_prompts_that_cannot_be_answered_are_told(run: Path, prompt: str, said: str, chat: bool) -> None:
    with pytest.raises(ConfigError) as error:
        answers(model(run), ["hello", prompt], SamplingRequest(chat=chat))
    assert said in str(error.value)
    assert "prompt 1" not in str(error.value)


@pytest.mark.parametrize("prompt", ["a\x00b", "\x1b[31m\r\n", "\u2028\ufeff", " "])
def test_control_characters_are_text_like_any_other(run: Path, prompt: str) -> None:
    assert [asked for asked, _ in answers(model(run), [prompt], SamplingRequest(max_new_tokens=2))] == [prompt]


def test_a_prompt_of_tokens_that_the_model_does_not_have_is_told(tmp_path: Path) -> None:
    tiny.save(tmp_path, vocab_size=10)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"prompt 1 can't be answered: it has the token \d+, and the model's vocab"):
        answers(tmp_path, ["hello"], SamplingRequest(chat=False))


def test_chats_are_rendered_as_in_the_run(run: Path) -> None:
    folder = str(model(run))
    assert chat_settings(model(run), SamplingRequest(), True) == DataSpec(folder, system="be brief", template_args=ARGS)
    asked = chat_settings(model(run), SamplingRequest(template_args=("enable_thinking=true",)), True)
    assert asked.template_args == {"enable_thinking": True}
    assert chat_settings(model(run), SamplingRequest(chat=False), True) == DataSpec(folder, chat=False)
    with pytest.raises(ConfigError, match="--template-arg is given, but the prompts are plain text"):
        chat_settings(model(run), SamplingRequest(chat=False, template_args=("a=1",)), True)
    with pytest.raises(ConfigError, match="'enable' is not an override"):
        chat_settings(model(run), SamplingRequest(template_args=("enable",)), True)
    with pytest.raises(ConfigError, match="chat template reads no 'thinking'"):
        answers(model(run), ["hello"], SamplingRequest(template_args=("thinking=1",)))


def test_every_end_of_the_generation_config_ends_an_answer(tmp_path: Path) -> None:
    """A list of all tokens: whatever comes first ends the answer."""
    network = tiny.network(vocab_size=len(TOKENIZER.get_vocab()))
    network.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    single = {TOKENIZER.decode([token], skip_special_tokens=True) for token in range(len(TOKENIZER.get_vocab()))}
    for ends, all_single in ((2, False), (list(range(len(TOKENIZER.get_vocab()))), True)):
        file.write_text(json.dumps({"eos_token_id": ends}))
        found = answers(tmp_path, ["hello"], SamplingRequest(n=8, temperature=1.0, max_new_tokens=20))
        assert all(text in single for _, text in found) == all_single


def test_what_ends_samples_of_the_run_ends_an_answer(run: Path, tmp_path: Path) -> None:
    """`stop` of the call that generates by the model's role, though it is not the leading one."""
    request = SamplingRequest(n=8, temperature=1.0, max_new_tokens=20)
    before = [text for _, text in answers(model(run), ["hello"], request)]
    letter = max("".join(before), key="".join(before).count)
    shutil.copytree(run, tmp_path / "run")
    calls = {"first": {"kind": "generate", "model": "pro", "stop": ["x"]}}
    calls["later"] = {"kind": "generate", "model": "actor", "stop": [letter]}
    job = {"data": {}, "graph": {"calls": calls, "leading": "first"}}
    (tmp_path / "run/job.json").write_text(json.dumps(job))
    plain = [text for _, text in answers(model(tmp_path / "run"), ["hello"], request)]
    assert any(letter in text for text in plain) and all(letter not in text[:-1] for text in plain)
