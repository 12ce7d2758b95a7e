"""Tokens of a chat that are learnt, by templates of several families, beside transformers' own rendering and masks."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.run_file.compose import check_run
from realgraph.runtime.data.chats import chat_sample, turn_end_token
from realgraph.runtime.data.data import DataSet
from realgraph.runtime.data.tokenize import Template, prompt_tokens
from realgraph.runtime.job.job import DataSpec
from tests.data_sets import (
    CHATML,
    INPUTS,
    INST,
    LLAMA3,
    MARKED,
    PHI,
    PLAIN,
    THINKING,
    TOOLS,
    WHOLE,
    make_tokenizer,
    row,
    told,
    write,
)
from tests.run_texts import place

__all__ = ["place"]

# template -> what it ends a turn with; the tokenizer's end of sequence is </s> in all of them
ENDS = {"chatml": CHATML, "thinking": THINKING, "llama3": LLAMA3, "phi": PHI, "marked": MARKED, "tools": TOOLS}
END_OF = {"llama3": "<|eot_id|>", "phi": "<|end|>"}
TOKENIZERS = {name: make_tokenizer(template, eos="</s>") for name, template in ENDS.items()}
USERS_ONLY = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
WORDS = ["what", "is", "12+34?", "the", "answer", "46", "so", "it", "goes", "hello"]


def chat(rng: random.Random) -> list[dict[str, str]]:
    """One to three turns of both, and now and then a question at the end."""
    messages = []
    for _ in range(rng.randint(1, 3)):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))})
    return messages + messages[:1] * rng.randint(0, 1)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("seed", range(5))
def test_every_turn_is_learnt_with_its_end_and_nothing_else(name: str, seed: int) -> None:
    """The end of a turn is the template's, though the tokenizer's end of sequence is another token."""
    tokenizer, end = TOKENIZERS[name], END_OF.get(name, "<|im_end|>")
    messages = chat(random.Random(seed))
    tokens, mask = chat_sample(messages, tokenizer)
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    # This byte-level tokenizer cuts Llama's blank line otherwise where words follow: as it is at generation counts.
    assert name == "llama3" or tokens == whole[: len(tokens)], "the template's own rendering, nothing added"
    assert tokenizer.decode(whole).startswith(tokenizer.decode(tokens))
    runs = "".join(tokenizer.decode([token]) if use else "\n###" for token, use in zip(tokens, mask, strict=True))
    said = [run.strip() for run in runs.split("###") if run.strip()]
    words = [message["content"] for message in messages if message["role"] == "assistant"]
    assert [run.removeprefix("<think>\n\n</think>\n\n") for run in said] == [f"{text}{end}" for text in words]
    assert mask[-1] and tokens[-1] == tokenizer.convert_tokens_to_ids(end) == turn_end_token(tokenizer)


@pytest.mark.parametrize("seed", range(5))
def test_a_template_that_marks_what_the_assistant_says_is_taken_at_its_word(seed: int) -> None:
    """transformers' own mask, and the end of each turn that this template forgets to mark."""
    tokenizer, messages = TOKENIZERS["marked"], chat(random.Random(seed))
    tokens, mask = chat_sample(messages, tokenizer)
    own = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    marked = [bool(use) for use in own["assistant_masks"][: len(tokens)]]
    assert tokens == own["input_ids"][: len(tokens)]
    ends = [t for t in range(1, len(tokens)) if marked[t - 1] and not marked[t]]
    assert [t for t, use in enumerate(mask) if use] == sorted([t for t, use in enumerate(marked) if use] + ends)


def test_a_template_without_an_end_of_turn_leaves_it_to_the_end_of_sequence() -> None:
    tokenizer = make_tokenizer(INST)
    assert turn_end_token(tokenizer) is None
    assert turn_end_token(PLAIN) is None
    tokens, mask = chat_sample(
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so"}], tokenizer
    )
    assert tokenizer.decode(tokens) == "[INST] hello [/INST] so</s>"
    assert mask[-1] and tokens[-1] == tokenizer.eos_token_id


def test_tool_calls_are_part_of_the_assistants_turn() -> None:
    tokenizer = TOKENIZERS["tools"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "46"},
        {"role": "assistant", "content": "the answer is 46"},
    ]
    tokens, mask = chat_sample(messages, tokenizer)
    learnt = tokenizer.decode([token for token, use in zip(tokens, mask, strict=True) if use])
    first = '<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>'
    assert learnt == f"{first}the answer is 46<|im_end|>"


# --- arguments and tools of the template -------------------------------------------------------------------------

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}


def test_template_arguments_and_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["tools"]
    rows = [{"prompt": "hello", "answer": "1"}, {"prompt": "hello", "answer": "1", "tools": [SUB]}]
    path = write(tmp_path / "a.jsonl", [{"prompt": "hello", "answer": "1", "tools": None}, *rows])
    chats = [{"role": "user", "content": "hello"}]
    for args in ({}, {"enable_thinking": False}):
        for tools in (None, (ADD,)):
            data = DataSet(DataSpec(path, template_args=args, tools=tools), INPUTS, tokenizer)
            for i, own in enumerate((tools, tools, (SUB,))):
                text = tokenizer.apply_chat_template(
                    chats, tokenize=False, add_generation_prompt=True, tools=own, **args
                )
                assert tokenizer.decode(row(data, i).group["prompt"]) == text
                assert ("<think>" in text) == bool(args) and ("add" in text) == (own == (ADD,))
    whole = [{"messages": [*chats, {"role": "assistant", "content": "so"}], "tools": f"[{{}}, {SUB!r}]"}]
    whole[0]["tools"] = '[{"name": "sub"}]'  # JSON text, as parquet often has it
    trained = DataSet(DataSpec(write(tmp_path / "b.jsonl", whole)), WHOLE, tokenizer)
    assert '{"name": "sub"}' in tokenizer.decode(row(trained, 0).samples[0]["tokens"])
    assert prompt_tokens(chats, tokenizer, Template({"enable_thinking": False})) != prompt_tokens(chats, tokenizer)


@pytest.mark.parametrize(
    ("template", "fields", "said"),
    [
        (
            TOOLS,
            {"template_args": {"enable_thinkin": False}},
            r"\$\.data\.template_args\.enable_thinkin: the tokenizer's",
        ),
        (TOOLS, {"template_args": {"enable_thinkin": False}}, "hint: did you mean 'enable_thinking'"),
        (CHATML, {"tools": (ADD,)}, r"\$\.data\.tools: data\.tools is set, but .* reads no tools"),
        (CHATML, {"columns": {"tools": "tools"}}, r"\$\.data\.columns\.tools: .* reads no tools"),
        (TOOLS, {"columns": {"tools": "toools"}}, r"\$\.data\.columns\.tools: there is no column 'toools'"),
        (USERS_ONLY, {"system": "Be brief."}, r"\$\.data\.system: .* leaves system messages out"),
        (None, {"template_args": {"x": 1}}, r"\$\.data\.template_args: .* no chat template to put it in"),
    ],
)
def test_what_a_template_does_not_read_is_refused(
    tmp_path: Path, template: str | None, fields: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "hello", "answer": "1", "tools": []}])
    with pytest.raises(ConfigError, match=said):
        DataSet(DataSpec(path, **fields), INPUTS, make_tokenizer(template))


def test_a_message_that_the_template_leaves_out_is_named(tmp_path: Path) -> None:
    chat = [GOOD, {"role": "assistant", "content": ""}, {"role": "system", "content": "Be brief."}, GOOD]
    rows = [{"prompt": [GOOD], "answer": "1"}, {"prompt": chat, "answer": "1"}]
    path = write(tmp_path / "a.jsonl", rows)
    data = DataSet(DataSpec(path), INPUTS, make_tokenizer(USERS_ONLY))
    data.row(0)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:2: \$\.prompt\[2\]\.role: .*leaves messages of the role 'system' out"
    ):
        data.row(1)
    assert DataSet(DataSpec(path), INPUTS, make_tokenizer(CHATML)).row(1)


# --- messages ----------------------------------------------------------------------------------------------------

GOOD = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], ": the list of messages is empty"),
        ("hello", ": expected text or a list of chat messages|expected a list of chat messages"),
        ([GOOD, "hello"], "[1]: expected messages with `role` and `content`, got str 'hello'"),
        ([GOOD, {"content": "x"}], "[1]: expected messages with `role` and `content`, got dict"),
        ([{"from": "human", "value": "x"}], "[0]: .*`from` and `value` are called `role` and `content` here"),
        ([GOOD, {"role": 3, "content": "x"}], "[1]: .*got the role int 3"),
        ([GOOD, {"role": "asistant", "content": "x"}], "[1].role: unknown role 'asistant'.*did you mean 'assistant'"),
        ([GOOD, {"role": "assistant", "content": 4}], "[1].content: expected text, got int 4"),
        ([GOOD, {"role": "assistant", "content": None}], "[1]: expected messages with `role` and `content`"),
        ([GOOD, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}], "[1].content: .*a list of parts"),
        ([GOOD, {"role": "assistant", "content": ""}], ": the assistant's messages are empty"),
    ],
)
def test_malformed_messages_are_told_with_their_place(tmp_path: Path, messages: Any, said: str) -> None:
    good = [GOOD, {"role": "assistant", "content": "so it goes"}]
    path = write(tmp_path / "a.jsonl", [{"messages": good}, {"messages": messages}])
    data = DataSet(DataSpec(path), WHOLE, TOKENIZERS["chatml"])
    assert row(data, 0).samples
    with pytest.raises(ConfigError) as error:
        data.row(1)
    expected = re.escape("a.jsonl:2: $.messages") + said.replace("[0]", r"\[0\]").replace("[1]", r"\[1\]")
    assert re.search(expected, told(error)), told(error)


def test_a_prompt_asks_something(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "hello"}
    cases = [
        ("", r"\$\.prompt: the prompt is empty"),
        ([asked, {"role": "assistant", "content": "so"}], r"\$\.prompt\[1\]\.role: a prompt ends before the assistant"),
    ]
    for prompt, said in cases:
        path = write(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "1"}])
        with pytest.raises(ConfigError, match=said):
            DataSet(DataSpec(path), INPUTS, TOKENIZERS["chatml"]).row(0)


def test_roles_that_the_template_knows_are_taken(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m.role }}", "{{ 'user' if m.role == 'critic' else m.role }}")
    messages = [{"role": "critic", "content": "hello"}, {"role": "assistant", "content": "so"}]
    path = write(tmp_path / "a.jsonl", [{"messages": messages}])
    assert row(DataSet(DataSpec(path), WHOLE, make_tokenizer(template)), 0).samples
    with pytest.raises(ConfigError, match="unknown role 'critic'"):
        DataSet(DataSpec(path), WHOLE, TOKENIZERS["chatml"]).row(0)


def test_token_ids_outside_of_the_vocabulary_are_told(tmp_path: Path) -> None:
    n = len(PLAIN.get_vocab())
    path = write(tmp_path / "a.jsonl", [{"prompt": [1, n - 1], "answer": "1"}, {"prompt": [1, n], "answer": "1"}])
    data = DataSet(DataSpec(path), INPUTS, PLAIN)
    assert row(data, 0).group["prompt"] == [1, n - 1]
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: \$\.prompt: the token id {n} is outside of the vocabulary"):
        data.row(1)


# --- in the run file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "data.template_args={tools: [x]}",
            "$.data.template_args.tools: 'tools' is not an argument that can be set here",
        ),
        ("data.template_args={tokenize: true}", "$.data.template_args.tokenize: 'tokenize' is an option of rendering"),
        ("data.template_args={a-b: 1}", "$.data.template_args.a-b: 'a-b' can't be the name of an argument"),
        ("data.template_args={x: {y: [1, .nan]}}", "$.data.template_args.x.y[1]: expected a finite number, got nan"),
        ("data.template_args={x: 9223372036854775808}", "$.data.template_args: 9223372036854775808 is too large"),
        ("data.template_args=[1]", "$.data.template_args: expected a mapping, got a list"),
        ("data.tools={a: 1}", "$.data.tools: expected a list, each item a mapping or null, got a mapping"),
        ("data.tools=[add]", "$.data.tools[0]: expected a mapping, got 'add'"),
        ("data.tools=[{}]", "$.data.tools[0]: a tool without a description"),
        ("eval.data.template_args={x: .inf}", "$.eval.data.template_args.x: expected a finite number, got inf"),
    ],
)
def test_arguments_that_no_template_can_take_are_refused_by_check(place: Path, setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_run(place / "run.yaml", [setting])
    assert said in told(error)


def test_held_out_data_take_over_the_template_arguments(place: Path) -> None:
    settings = ["data.template_args={enable_thinking: false, depth: 3}", "data.tools=[{a: 1}]"]
    run = check_run(place / "run.yaml", [*settings, f"eval.data.path={place / 'data/train.jsonl'}"]).run
    assert run.eval is not None and run.eval.data is not None
    for data in (run.data, run.eval.data):
        assert data.template_args == {"enable_thinking": False, "depth": 3}
        assert data.tools == ({"a": 1},)
