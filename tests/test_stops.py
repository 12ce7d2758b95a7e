"""Ends of samples: the model's ends of sequence, the template's turn end, tokens and texts that a call asks for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.spec import Generate
from realgraph.runtime.data.stops import Stops, asked_stops, end_tokens, model_ends, stops_of
from realgraph.runtime.engine import Request
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.job.job import DataSpec
from tests import tiny
from tests.data_sets import CHATML, INST, PLAIN, make_tokenizer

AT = Where("run.yaml", 7, "$.calls.rollout.stop")


def write_ends(folder: Path, generation: Any, config: Any) -> Path:
    for name, ends in (("generation_config", generation), ("config", config)):
        if ends is not Ellipsis:
            (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([7, 9], 2, {7, 9}),
        (7, [2, 3], {7}),
        (None, [2, 3], {2, 3}),
        ([], 2, {2}),
        (..., 2, {2}),
        (..., ..., set()),
        ([7], ..., {7}),
    ],
)
def test_the_ends_of_a_model_are_those_of_its_generation_config(
    tmp_path: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    folder = write_ends(tmp_path, generation, config)
    assert model_ends(folder) == expected
    assert end_tokens(PLAIN, folder) == expected | {PLAIN.eos_token_id}


@pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}'])
def test_a_generation_config_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: \$: "):
        model_ends(tmp_path)


def test_the_end_of_a_turn_ends_a_chat_and_no_plain_text(tmp_path: Path) -> None:
    chatty = make_tokenizer(CHATML, eos="</s>")
    end, turn_end = chatty.eos_token_id, chatty.convert_tokens_to_ids("<|im_end|>")
    call = Generate(model="actor")
    assert stops_of("rollout", call, DataSpec("x"), chatty, tmp_path).tokens == {end, turn_end}
    assert stops_of("rollout", call, DataSpec("x", chat=False), chatty, tmp_path).tokens == {end}
    assert end_tokens(make_tokenizer(INST), tmp_path) == {end}


def test_special_tokens_stop_as_tokens_and_other_texts_as_texts() -> None:
    found = asked_stops(("<|im_end|>", "\n\n", "the answer", "<s>"), PLAIN, AT)
    assert found == Stops(frozenset({0, 3}), ("\n\n", "the answer"))


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ((".", ""), r"run\.yaml:7: \$\.calls\.rollout\.stop\[1\]: an empty text would end every sample at once"),
        (("<|im_end|>\n",), r"stop\[0\]: '<\|im_end\|>\\n' holds the special token '<\|im_end\|>' among other text"),
    ],
)
def test_what_can_never_stop_a_sample_is_refused(stop: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked_stops(stop, PLAIN, AT)
    assert re.search(said, str(error.value)), error.value


def test_a_special_token_among_the_stops_ends_what_is_generated() -> None:
    """Its text leaves it out, so as a text it would never appear."""
    module = tiny.network("qwen3", vocab_size=len(PLAIN.get_vocab()))
    with torch.no_grad():
        module.lm_head.weight[3] = module.lm_head.weight.norm(dim=-1).max() * 0.1  # <|im_end|>: now and then
    stops = asked_stops(("<|im_end|>",), PLAIN, AT)
    engine = ContinuousBatch(module, decode=lambda tokens: PLAIN.decode(tokens, skip_special_tokens=True))
    requests = [
        Request(i, (5, 6, 7), 60, seed=i, stop_tokens=stops.tokens, stop_strings=stops.strings) for i in range(40)
    ]
    engine.submit(requests)
    done = []
    while not engine.idle:
        done += engine.step()
    for completion in done:
        assert completion.finished == (completion.tokens[-1] == 3)
        assert 3 not in completion.tokens[:-1]
    assert any(completion.finished for completion in done)
