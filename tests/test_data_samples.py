"""Data that are whole samples: plain ones, chats and pairs, with the mask of what is to be learnt."""

import random
from pathlib import Path
from typing import Any, Literal

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.keys import OF_DATA, parse_key_type
from realgraph.runtime.data.chats import chat_sample
from realgraph.runtime.data.data import DataSet, TooLong
from realgraph.runtime.data.tokenize import Tokenizer, plain_sample, prompt_tokens
from realgraph.runtime.job.job import DataSpec
from tests.data_sets import CHATML, PLAIN, TEMPLATES, WHOLE, make_tokenizer, row, told, write


def learnt(tokenizer: Tokenizer, tokens: list[int], mask: list[bool]) -> list[str]:
    """The runs of masked tokens, as text."""
    runs: list[list[int]] = []
    for t, (token, use) in enumerate(zip(tokens, mask, strict=True)):
        if use and (t == 0 or not mask[t - 1]):
            runs.append([])
        if use:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("seed", range(10))
def test_a_plain_sample_is_prompt_response_and_end(seed: int) -> None:
    rng = random.Random(seed)
    words = ["what", "is", "12+34?", "the", "answer", "46", "so", "it", "goes"]
    prompt, response = (" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(2))
    tokens, mask = plain_sample(prompt, response, PLAIN)
    assert PLAIN.decode(tokens) == prompt + response + "</s>"
    assert learnt(PLAIN, tokens, mask) == [response + "</s>"]
    assert tokens[: mask.index(True)] == PLAIN.encode(prompt, add_special_tokens=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mask_of_a_chat_is_what_the_assistant_says(name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    messages = [
        {"role": "user", "content": "what is 12+34?"},
        {
            "role": "assistant",
            "content": "<think>hm</think>the answer is 46" if name == "thinking" else "the answer is 46",
        },
        {"role": "user", "content": "you know it well"},
        {"role": "assistant", "content": "I know.\n"},
    ]
    tokens, mask = chat_sample(messages, tokenizer)
    end = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "inst": ""}[name]
    block = "<think>\n\n</think>\n\n" if name == "thinking" else ""
    runs = learnt(tokenizer, tokens, mask)
    assert [run.strip() for run in runs[:-1]] == [f"the answer is 46{end}"]
    last = {"chatml": "I know.\n<|im_end|>", "thinking": block + "I know.<|im_end|>", "inst": "I know.</s>"}[name]
    assert runs[-1].strip() == last
    # What stands before the last answer is, token for token, the prompt that generation would see.
    prompt = prompt_tokens(messages[:-1], tokenizer)
    start = len(mask) - 1 - mask[::-1].index(False) + 1
    assert name == "thinking" or tokens[:start] == prompt
    if name == "thinking":
        assert tokenizer.decode(tokens[:start]).endswith("<|im_start|>assistant\n")


def test_columns_become_samples(tmp_path: Path) -> None:
    chatty = make_tokenizer(CHATML)
    turn = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so it goes"}]
    texts = write(tmp_path / "text.jsonl", [{"q": "hello", "response": " so it goes"}])
    chats = write(tmp_path / "chat.jsonl", [{"messages": chat}])
    plain = row(DataSet(DataSpec(texts, columns={"prompt": "q"}), WHOLE, PLAIN), 0).samples
    assert [PLAIN.decode(s["tokens"]) for s in plain] == ["hello so it goes</s>"]
    wrapped = row(DataSet(DataSpec(texts, columns={"prompt": "q"}), WHOLE, chatty), 0).samples
    assert chatty.decode(wrapped[0]["tokens"]) == turn + " so it goes<|im_end|>"
    (sample,) = row(DataSet(DataSpec(chats), WHOLE, chatty), 0).samples
    assert chatty.decode(sample["tokens"]) == turn + "so it goes<|im_end|>"
    assert learnt(chatty, sample["tokens"], sample["mask"]) == ["so it goes<|im_end|>"]


@pytest.mark.parametrize("form", ["texts", "answers", "chats"])
def test_pairs_are_the_chosen_and_then_the_rejected(tmp_path: Path, form: str) -> None:
    chatty = make_tokenizer(CHATML)
    turn = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ask = {"role": "user", "content": "hello"}
    good, bad = ({"role": "assistant", "content": text} for text in ("I know", "so what"))
    pairs: dict[str, dict[str, Any]] = {
        "texts": {"prompt": "hello", "chosen": "I know", "rejected": "so what"},
        "answers": {"prompt": [ask], "chosen": [good], "rejected": [bad]},
        "chats": {"chosen": [ask, good], "rejected": [ask, bad]},
    }
    path = write(tmp_path / "a.jsonl", [{**pairs[form], "margin": [0.5, 1]}])
    inputs = {**WHOLE, "margin": parse_key_type("sample float32")}
    samples = row(DataSet(DataSpec(path), inputs, chatty, samples_per_group=2), 0).samples
    assert [chatty.decode(s["tokens"]) for s in samples] == [turn + t + "<|im_end|>" for t in ("I know", "so what")]
    assert [s["margin"] for s in samples] == [0.5, 1.0]


def test_an_answer_of_several_turns_follows_its_prompt(tmp_path: Path) -> None:
    chatty = make_tokenizer(CHATML)
    turns = [("user", "hello"), ("assistant", "I know"), ("user", "so"), ("assistant", "it goes")]
    ask, *answer = ({"role": role, "content": content} for role, content in turns)
    path = write(tmp_path / "a.jsonl", [{"prompt": [ask], "response": answer}])
    (sample,) = row(DataSet(DataSpec(path), WHOLE, chatty), 0).samples
    assert chatty.decode(sample["tokens"]).startswith("<|im_start|>user\nhello<|im_end|>")
    assert learnt(chatty, sample["tokens"], sample["mask"]) == ["I know<|im_end|>", "it goes<|im_end|>"]


def test_limits_hold_for_what_stands_before_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "what is it you know? " * 20, "response": "so it goes"}])
    n = len(PLAIN.encode("what is it you know? " * 20, add_special_tokens=True))
    assert DataSet(DataSpec(path, max_prompt_tokens=5), WHOLE, PLAIN).row(0) == TooLong(0, n, 5)
    data = DataSet(DataSpec(path, max_prompt_tokens=5, too_long="truncate_left"), WHOLE, PLAIN)
    (sample,) = row(data, 0).samples
    assert sample["mask"].index(True) == 5
    assert learnt(PLAIN, sample["tokens"], sample["mask"]) == ["so it goes</s>"]


def test_a_sequence_has_a_limit_and_its_first_token_follows_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"tokens": [3, 4, 5, 6, 7, 8], "mask": [1, 0, 0, 1, 1, 1]}])

    def limited(too_long: Literal["drop", "fail", "truncate_left"], most: int) -> DataSet:
        return DataSet(DataSpec(path, max_prompt_tokens=2, too_long=too_long), WHOLE, PLAIN, max_new_tokens=most)

    (whole,) = row(limited("drop", 4), 0).samples
    assert whole == {"tokens": [3, 4, 5, 6, 7, 8], "mask": [False, False, False, True, True, True]}
    assert limited("drop", 3).row(0) == TooLong(0, 6, 5)
    (short,) = row(limited("truncate_left", 1), 0).samples
    assert short == {"tokens": [6, 7, 8], "mask": [False, True, True]}
    with pytest.raises(ConfigError) as error:
        limited("fail", 3).row(0)
    assert "6 tokens, more than data.max_prompt_tokens + batch.max_new_tokens = 5" in told(error)


def test_tokens_and_masks_may_stand_in_the_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"tokens": [3, 4, 5], "mask": [0, 0, 1], "teacher": [0.0, -1, -2]}])
    inputs = {**WHOLE, "teacher": parse_key_type("token float32")}
    (sample,) = row(DataSet(DataSpec(path), inputs, PLAIN), 0).samples
    assert sample == {"tokens": [3, 4, 5], "mask": [False, False, True], "teacher": [0.0, -1.0, -2.0]}
    short = write(tmp_path / "b.jsonl", [{"tokens": [3, 4, 5], "mask": [1], "teacher": []}])
    with pytest.raises(ConfigError) as error:
        DataSet(DataSpec(short), inputs, PLAIN).row(0)
    assert "b.jsonl:1: $: 3 tokens, but a mask of 1" in told(error)


def test_a_row_gives_a_prompt_and_a_sequence_of_its_own_beside_it(tmp_path: Path) -> None:
    """With pairs of samples a group, too, there is one; what is too long leaves the row out."""
    file = write(tmp_path / "data.jsonl", [{"prompt": "what is", "response": "the answer", "answer": "46"}])
    inputs = {"prompt": parse_key_type("group tokens"), **OF_DATA}
    for n in (1, 2, 4):
        found = row(DataSet(DataSpec(file), inputs, PLAIN, n), 0)
        tokens, mask = plain_sample("what is", "the answer", PLAIN)
        assert found.samples == ()
        assert found.group == {
            "prompt": prompt_tokens("what is", PLAIN),
            "data.tokens": tokens,
            "data.mask": mask,
        }
    short = DataSet(DataSpec(file, max_prompt_tokens=1), inputs, PLAIN)
    assert isinstance(short.row(0), TooLong)
    del inputs["prompt"]
    with pytest.raises(ConfigError, match="needs the columns 'prompt' and 'response', or 'messages'"):
        DataSet(DataSpec(write(tmp_path / "other.jsonl", [{"answer": "46"}])), inputs, PLAIN)


def test_chats_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    chatty = make_tokenizer(CHATML)
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hello"}]}])
    with pytest.raises(ConfigError) as error:
        DataSet(DataSpec(path), WHOLE, chatty).row(0)
    assert "a.jsonl:1: $.messages: no message has the role 'assistant'" in told(error)
