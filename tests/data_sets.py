"""Tokenizers with and without a chat template, rows written to a file, and texts of errors, for tests of data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.keys import parse_key_type
from realgraph.runtime.data.data import DataRow, DataSet
from realgraph.runtime.data.tokenize import Tokenizer

CORPUS = ["what is 12+34? the answer is 46. hello world, so it goes; you and I know it well.\n\n"] * 20
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's way: the last answer gets an empty thinking block, earlier ones lose theirs.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (  # no end token after turns, spaces around, and it refuses a system turn
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]{% else %} {{ m.content.strip() }} {% endif %}"
    "{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "inst": INST}


LLAMA3 = (  # as in Llama-3-Instruct: a first token, headers, and an end of turn that is no end of sequence
    "{% set offset = 0 %}{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI = (  # turns end with one token, and the chat with another
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MARKED = (  # says itself what the assistant says, and forgets the end of the turn
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (  # Qwen's way of tools and of thinking that can be switched off
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_tokenizer(
    template: str | None = None, bos: bool = False, eos: str | None = None, corpus: list[str] = CORPUS
) -> Tokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    headers = "<|user|><|assistant|><|system|>" if template == PHI else ""
    special += sorted({*re.findall(r"<\|\w+\|>", f"{template}{headers}")} - {*special})
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(corpus, trainer)
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    end = eos or ("<|im_end|>" if template in (CHATML, THINKING) else "</s>")
    wrapper: Any = PreTrainedTokenizerFast
    made: Tokenizer = wrapper(tokenizer_object=raw, bos_token="<s>", eos_token=end, chat_template=template)
    return made


PLAIN = make_tokenizer()
INPUTS = {"prompt": parse_key_type("group tokens"), "answer": parse_key_type("group text")}
WHOLE = {"tokens": parse_key_type("sample tokens"), "mask": parse_key_type("token bool")}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def row(data: DataSet, index: int) -> DataRow:
    found = data.row(index)
    assert isinstance(found, DataRow)
    return found


def told(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(error.value)
