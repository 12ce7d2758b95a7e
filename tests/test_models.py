"""Models: log-probabilities equal plain transformers', saved folders load with transformers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import revert_weight_conversion

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import ModelRole, Optimizer
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from tests import tiny

CPU = torch.device("cpu")
LENGTHS = [9, 3, 17, 1, 8, 30, 30]


def logprobs_of(model: Any, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Plain: one sample through transformers; (log-probabilities, entropies) of its tokens, 0 for the first."""
    distribution = (model(tokens[None]).logits[0].double() / temperature).log_softmax(-1)[:-1]
    entropy = -(distribution.exp() * distribution).sum(-1)
    found = distribution.gather(-1, tokens[1:, None])[:, 0]
    zero = found.new_zeros(1)
    return torch.cat([zero, found]), torch.cat([zero, entropy])


@pytest.fixture(scope="module", params=tiny.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save(tmp_path_factory.mktemp(kind), kind)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def open_one(folder: Path, role: ModelRole, **settings: Any) -> TorchTrainEngine:
    return open_engine(role, str(folder), Layout(DeviceMesh(0, 1)), LayoutRanks.alone(CPU), TrainSettings(**settings))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_logprobs_and_entropies_equal_plain_transformers(kind: str, folder: Path, temperature: float) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    batch = tiny.batch(LENGTHS)
    found = build(ModelRole(), str(folder), Start(CPU)).run(batch, Wants("logprobs", temperature, "detached"))
    plain = [logprobs_of(reference, tokens, temperature) for tokens in torch.split(batch.tokens, LENGTHS)]
    assert found.logprobs is not None
    assert found.entropy is not None
    torch.testing.assert_close(found.logprobs.double(), torch.cat([a for a, _ in plain]), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found.entropy.double(), torch.cat([b for _, b in plain]), rtol=1e-5, atol=2e-5)


def test_only_the_asked_tokens_have_logprobs(folder: Path) -> None:
    model = build(ModelRole(), str(folder), Start(CPU))
    batch = tiny.batch(LENGTHS)
    whole, part = model.run(batch, Wants()).logprobs, model.run(batch, Wants(where=batch.mask)).logprobs
    assert whole is not None
    assert part is not None
    torch.testing.assert_close(part, torch.where(batch.mask, whole, 0.0))


def test_gradients_equal_plain_transformers(kind: str, folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = build(ModelRole(gradient_checkpointing=True), str(folder), Start(CPU))
    batch = tiny.batch([9, 3, 17, 6])
    found = model.run(batch, Wants()).logprobs
    assert found is not None
    torch.autograd.backward(found.mean())
    plain = torch.cat([logprobs_of(reference, tokens, 1.0)[0] for tokens in torch.split(batch.tokens, [9, 3, 17, 6])])
    torch.autograd.backward(plain.mean())
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    expected = revert_weight_conversion(reference, grads)
    for name, parameter in model.network.named_parameters():
        assert parameter.grad is not None
        grad = expected[name]
        scale = float(grad.abs().max())
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


def test_a_saved_model_loads_with_transformers_unchanged(kind: str, folder: Path, tmp_path: Path) -> None:
    engine = open_one(folder, ModelRole(trainable=True), optimizer=Optimizer())
    engine.save(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert type(again).__name__ == json.loads((tmp_path / "saved/config.json").read_text())["architectures"][0]
    original = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for (name, a), (other, b) in zip(again.named_parameters(), original.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    batch = tiny.batch(LENGTHS)
    found = engine.inference(batch, "logprobs", 1.0)
    plain = torch.cat([logprobs_of(again, tokens, 1.0)[0] for tokens in torch.split(batch.tokens, LENGTHS)])
    torch.testing.assert_close(found.double(), plain.detach(), rtol=1e-5, atol=2e-5)
    assert (tmp_path / "saved/tokenizer_config.json").is_file()
    assert (tmp_path / "saved/generation_config.json").is_file()


def test_a_critic_begins_at_zero_saves_and_loads_as_a_classifier(kind: str, folder: Path, tmp_path: Path) -> None:
    role = ModelRole(trainable=True, head="value")
    engine = open_one(folder, role, optimizer=Optimizer())
    batch = tiny.batch(LENGTHS)
    assert not engine.inference(batch, "values", 1.0).any()
    draw = torch.Generator().manual_seed(1)
    head = torch.randn(1, 32, generator=draw)
    engine.load_weights(whole((name, head if name == "score.weight" else t) for name, t in engine.weights()), 1)
    engine.save(tmp_path / "critic")
    values = engine.inference(batch, "values", 1.0)
    again = open_one(tmp_path / "critic", role, max_tokens_per_microbatch=20)
    torch.testing.assert_close(again.inference(batch, "values", 1.0), values)
    score_role = ModelRole(head="score")
    scores = open_one(tmp_path / "critic", score_role, max_tokens_per_microbatch=20).inference(batch, "scores", 1.0)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", attn_implementation="eager")
    pieces = torch.split(batch.tokens, LENGTHS)
    with torch.no_grad():
        hidden = [classifier.model(tokens[None]).last_hidden_state[0] @ head[0] for tokens in pieces]
        logits = torch.cat([classifier(tokens[None]).logits[0] for tokens in pieces])
    expected = torch.cat([torch.cat([h.new_zeros(1), h[:-1]]) for h in hidden])
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharded", [False, True])
def test_pieces_tied_heads_and_casts(tmp_path: Path, sharded: bool) -> None:
    """Files of several shards, an untied head, another dtype than the files'."""
    model = tiny.network("llama")
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB" if sharded else "5GB")
    assert (tmp_path / "m/model.safetensors.index.json").is_file() == sharded
    found = build(ModelRole(dtype="bfloat16"), str(tmp_path / "m"), Start(CPU)).network
    for name, parameter in model.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter.to(torch.bfloat16))
    rope = found.model.rotary_emb.inv_freq
    assert torch.equal(rope, model.model.rotary_emb.inv_freq)
    assert rope.dtype == torch.float32


def test_random_weights_only_where_asked(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        build(ModelRole(), str(tmp_path), Start(CPU))
    first, same, other = (build(ModelRole(), str(tmp_path), Start(CPU, seed=seed)) for seed in (1, 1, 2))

    def flat(model: PackedModel) -> Tensor:
        return torch.cat([parameter.detach().view(-1) for parameter in model.network.parameters()])

    assert torch.equal(flat(first), flat(same))
    assert not torch.equal(flat(first), flat(other))
    assert flat(first).isfinite().all()


def change(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported[\s\S]*qwen3 \(Qwen3\)"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "its own code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"quantization_config": "mxfp4"}, "quantised"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_size": 64}, "the config asks for"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers.*must be equal"),
    ],
)
def test_refused_configurations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelRole(), str(change(tiny.save(tmp_path), **changes)), Start(CPU))


def test_incomplete_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    for n_layers, message in ((3, r"lacks 'model\.layers\.2.*and \d+ more"), (1, "has no place")):
        folder = change(tiny.save(tmp_path / str(n_layers), "llama"), num_hidden_layers=n_layers)
        with pytest.raises(ConfigError, match=message):
            build(ModelRole(), str(folder), Start(CPU))


def test_refused_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        build(ModelRole(), "/nowhere/at/all", Start(CPU))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        build(ModelRole(), str(tmp_path), Start(CPU))
    folder = tiny.save(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickled[\s\S]*save_pretrained"):
        build(ModelRole(), str(folder), Start(CPU))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors[\s\S]*hf download NAME"):
        build(ModelRole(), str(folder), Start(CPU))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"\(2 of 2 files are missing\)[\s\S]*hf download NAME"):
        build(ModelRole(), str(folder), Start(CPU))


def test_a_score_head_that_nobody_trained_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the weights have no score head, and this role never learns one"):
        build(ModelRole(head="score"), str(folder), Start(CPU))
    build(ModelRole(head="score", trainable=True), str(folder), Start(CPU))


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_is_no_language_model(tmp_path: Path, tied: bool) -> None:
    """Though with a tied embedding it has all the weights of one."""
    tiny.save(tmp_path / "model", tie_word_embeddings=tied)
    role = ModelRole(trainable=True, head="value")
    open_one(tmp_path / "model", role, optimizer=Optimizer()).save(tmp_path / "critic")
    build(ModelRole(head="value"), str(tmp_path / "critic"), Start(CPU))
    with pytest.raises(ConfigError, match="weights of a Qwen3ForSequenceClassification, such as a critic"):
        build(ModelRole(), str(tmp_path / "critic"), Start(CPU))


def test_the_generators_attention_is_put_back(tmp_path: Path) -> None:
    """A module shared with a generator may come back with another attention function set."""
    model = build(ModelRole(), str(tiny.save(tmp_path)), Start(CPU))
    batch = tiny.batch(LENGTHS)
    before = model.run(batch, Wants()).logprobs
    model.config._attn_implementation = "eager"
    after = model.run(batch, Wants()).logprobs
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
