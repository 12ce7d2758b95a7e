"""The train engine on one rank: splits change nothing, resumes are exact, weights travel."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.graphs.maths import (
    KL,
    Constant,
    CrossEntropy,
    Entropy,
    Loss,
    PairMean,
    PairwiseScore,
    PolicyGradient,
    Preference,
    SequenceMean,
    TokenMean,
    Value,
)
from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.models.models import Wants
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import open_engine
from realgraph.runtime.train.optimizer import LossScale
from realgraph.runtime.wire.metrics import Mean, Metric
from tests import tiny
from tests.engines import CPU, OPTIMIZER, POLICY, call, close, engine, folder, optimizer, same, weights_of

__all__ = ["folder"]

# --- splits -----------------------------------------------------------------------------------------------------------

LOSSES = {
    "grpo": ("lm", Loss({"policy": PolicyGradient(), "kl": KL(to="ref_logprobs", coef=0.1)}, SequenceMean())),
    "entropy": ("lm", Loss({"policy": PolicyGradient(), "entropy": Entropy(coef=0.1)}, TokenMean())),
    "constant": ("lm", Loss({"policy": PolicyGradient(ratio="sequence")}, Constant(length=64))),
    "sft": ("lm", Loss({"ce": CrossEntropy()}, TokenMean())),
    "dpo": ("lm", Loss({"dpo": Preference()}, PairMean())),
    "critic": ("value", Loss({"value": Value()}, TokenMean())),
    "reward": ("score", Loss({"pairs": PairwiseScore()}, PairMean())),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_split_batch_is_the_whole_batch(folder: Path, name: str) -> None:
    """Any micro-batching, with an empty mask inside: the same loss, gradient norm and weights after three steps."""
    head, loss = LOSSES[name]
    found = []
    for limit in (None, 30, 1):
        one = engine(folder, {"dtype": "float64", "head": head}, max_tokens_per_microbatch=limit)
        if head != "lm":
            ones = ((n, torch.ones_like(t) * 0.1 if n == "score.weight" else t) for n, t in one.weights())
            one.load_weights(whole(ones), 0)
        metrics = []
        for step in range(3):
            batch = tiny.batch(tiny.lengths(10, 40, step), step, dtype=torch.float64)
            mask = batch.mask.clone()
            mask[: batch.lengths[0]] = False
            metrics.append(one.train(call(loss), [replace(batch, mask=mask)]))
        found.append((metrics, weights_of(one)))
    for metrics, weights in found[1:]:
        for a, b in zip(metrics, found[0][0], strict=True):
            for key in ("loss", "grad_norm", "n_tokens"):
                assert a[key].value == pytest.approx(b[key].value, rel=1e-12, abs=1e-15), key
        assert close(weights, found[0][1], 1e-12)


def test_the_entropy_metric_is_the_first_micro_batchs(folder: Path) -> None:
    batch = tiny.batch([9] * 6)
    one = engine(folder, max_tokens_per_microbatch=18)
    part = one.passes.parts(POLICY, [batch], 0)[0]
    assert len(part.cuts) == 3
    first = batch.select(part.cuts[0])
    entropy = one.model.run(first, Wants(entropy="detached", where=first.mask)).entropy
    assert entropy is not None
    found = one.train(call(), [batch])["entropy"]
    assert isinstance(found, Mean) and found.weight == int(first.mask.sum())
    assert found.value == pytest.approx(float(entropy[first.mask].mean()), rel=1e-5)
    assert "entropy" not in engine(folder, entropy_metric=False).train(call(), [batch])


def test_idle_samples_can_be_left_out_exactly(folder: Path) -> None:
    loss = Loss({"policy": PolicyGradient()}, SequenceMean())
    found = []
    for skip in (False, True):
        metrics: dict[str, Metric] = {}
        one = engine(folder, {"dtype": "float64"}, skip_idle=skip, max_tokens_per_microbatch=60)
        for step in range(3):
            batch = tiny.batch(tiny.lengths(12, 40, step), step, group_size=4, dtype=torch.float64)
            equal = torch.tensor([g == 1 for g in batch.groups])[batch.sample_index()]
            keys = {**batch.token_keys, "advantages": torch.where(equal, 0.0, batch.token_keys["advantages"])}
            metrics = one.train(call(loss), [replace(batch, token_keys=keys)])
        assert metrics["skipped"].value == pytest.approx(4 / 12 if skip else 0)
        found.append((metrics["loss"].value, metrics["grad_norm"].value, weights_of(one)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-12)
    assert close(found[0][2], found[1][2], 1e-12)


def test_a_batch_with_nothing_to_learn_is_a_call_of_zero_loss_and_no_step(folder: Path) -> None:
    one = engine(folder)
    before = weights_of(one)
    batch = tiny.batch([5, 6])
    metrics = one.train(call(), [replace(batch, mask=torch.zeros_like(batch.mask)), batch.select([])])
    assert metrics["loss"].value == 0
    assert metrics["grad_norm"].value == 0
    assert one.version == 1
    assert one.optimizer_steps == 0
    assert metrics["empty_steps"].value == 2
    assert same(before, weights_of(one))


def test_mini_batches_without_a_step_have_no_part_in_the_means_of_steps(folder: Path) -> None:
    batch = tiny.batch([5, 6])
    alone = engine(folder).train(call(), [batch])
    mixed = engine(folder).train(call(), [replace(batch, mask=torch.zeros_like(batch.mask)), batch])
    assert mixed["empty_steps"].value == 1
    for name in ("loss", "grad_norm"):
        assert mixed[name].value == pytest.approx(alone[name].value, rel=1e-12), name


# --- the optimizer ----------------------------------------------------------------------------------------------------


def test_three_steps_equal_torch_by_hand(folder: Path) -> None:
    """Against a plain loop: transformers' own forward a sample at a time, torch's AdamW, clip_grad_norm_."""
    settings = optimizer(schedule="linear", warmup_steps=1, final_lr_fraction=0.1)
    one = engine(folder, {"dtype": "float64"}, optimizer=settings, total_steps=3, max_tokens_per_microbatch=30)
    network = tiny.network().double()
    adam = torch.optim.AdamW(network.parameters(), lr=1.0, betas=settings.betas, eps=settings.eps, weight_decay=0.01)
    for step, factor in enumerate((1.0, 1.0, 0.55)):  # 0.1 would be that of a fourth
        batch = tiny.batch(tiny.lengths(5, 20, step), step, dtype=torch.float64)
        metrics = one.train(call(Loss({"ce": CrossEntropy()})), [batch])
        total, start = torch.zeros((), dtype=torch.float64), 0
        for n in batch.lengths:
            tokens, mask = batch.tokens[start : start + n], batch.mask[start : start + n]
            logprobs = network(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            total = total - logprobs[mask[1:]].sum()
            start += n
        adam.zero_grad()
        torch.autograd.backward(total / batch.mask.sum())
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.param_groups[0]["lr"] = 1e-2 * factor
        adam.step()
        assert metrics["loss"].value == pytest.approx(float(total.detach() / batch.mask.sum()), rel=1e-9)
        assert metrics["grad_norm"].value == pytest.approx(float(norm), rel=1e-6)  # transformers' RoPE is float32
        assert metrics["lr"].value == pytest.approx(1e-2 * factor)
    expected = {name: parameter.detach() for name, parameter in network.named_parameters()}
    assert close(weights_of(one), expected, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_learns_through_masters(folder: Path, dtype: str) -> None:
    """Updates far below the model's own resolution add up in the masters, and the model is their cast."""
    one, exact = engine(folder, {"dtype": dtype}), engine(folder)
    for step in range(6):
        batch = tiny.batch(tiny.lengths(6, 30, step % 2), step % 2)
        low = one.train(call(lr=1e-4), [batch])
        high = exact.train(call(lr=1e-4), [batch])
        assert low["loss"].value == pytest.approx(high["loss"].value, rel=0.05, abs=0.02)
    assert one.masters is not None
    assert exact.masters is not None
    moved = [
        float((m - p.detach()).abs().max()) for m, p in zip(one.masters.tensors, one.masters.parameters, strict=True)
    ]
    assert max(moved) > 0
    for name, master in zip(one.masters.names, one.masters.tensors, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(dict(one.weights())[name], master.to(one.dtype))


def test_an_overflow_halves_the_scale_and_loses_no_step(folder: Path) -> None:
    one = engine(folder, {"dtype": "float16"})
    one.scale = LossScale(2.0**40, dynamic=True, patience=2)
    batch = tiny.batch(tiny.lengths(6, 30, 0))
    metrics = one.train(call(), [batch])
    assert one.optimizer_steps == 1
    assert math.isfinite(metrics["grad_norm"].value)
    scale = one.scale.value
    assert 1 < scale < 2.0**40
    assert metrics["loss_scale"].value == scale
    exact = engine(folder)
    assert metrics["grad_norm"].value == pytest.approx(exact.train(call(), [batch])["grad_norm"].value, rel=0.02)


# --- weights and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_resumed_engine_goes_on_bit_for_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    settings = {"optimizer": optimizer(schedule="cosine", warmup_steps=3), "max_tokens_per_microbatch": 40}
    one = engine(folder, {"dtype": dtype}, **settings)
    batches = [tiny.batch(tiny.lengths(6, 30, i), i, dtype=one.dtype) for i in range(4)]
    one.train(call(), batches[:2])
    one.save(tmp_path)
    two = engine(folder, {"dtype": dtype}, **settings)
    two.load(tmp_path)
    assert two.version == 1
    assert two.optimizer_steps == two.due_steps == 2
    for _ in range(2):
        assert one.train(call(), batches[2:]) == two.train(call(), batches[2:])
    assert same(weights_of(one), weights_of(two))
    assert torch.equal(one.inference(batches[0], "logprobs", 1.0), two.inference(batches[0], "logprobs", 1.0))


def test_weights_travel_and_averages_follow(folder: Path) -> None:
    actor = engine(folder)
    ref = engine(folder, {"trainable": False, "ema_rate": 0.1, "dtype": "bfloat16"}, optimizer=None)
    start = weights_of(actor)
    actor.train(call(lr=1e-3), [tiny.batch([9, 8, 7])])
    for version in range(1, 4):
        ref.average_weights(whole(actor.weights()), 0.1, version)
    assert ref.version == 3
    assert ref.masters is not None
    new = weights_of(actor)
    for name, master in zip(ref.masters.names, ref.masters.tensors, strict=True):
        begin = start[name].bfloat16().float()
        torch.testing.assert_close(master, new[name] + 0.9**3 * (begin - new[name]), rtol=1e-5, atol=1e-6)
    copy = engine(folder, {"trainable": False}, optimizer=None)
    copy.load_weights(whole(actor.weights()), 7)
    assert same(weights_of(copy), new)
    assert copy.version == 7


def test_inference_keeps_the_order_under_any_micro_batching(folder: Path) -> None:
    batch = tiny.batch(tiny.lengths(12, 40, 1))
    whole = engine(folder, optimizer=None).inference(batch, "logprobs", 0.8)
    for limit in (1, 25, 60):
        found = engine(folder, optimizer=None, max_tokens_per_microbatch=limit).inference(batch, "logprobs", 0.8)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    assert whole.dtype == torch.float32
    assert engine(folder, optimizer=None).inference(batch.select([]), "logprobs", 1.0).numel() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_computes_what_a_cpu_does(tmp_path: Path, kind: str, dtype: Any) -> None:
    folder = tiny.save(tmp_path, kind)
    batch = tiny.batch(tiny.lengths(12, 60, 0))
    role, layout = ModelRole(trainable=True, dtype=dtype), Layout(DeviceMesh(0, 1))
    found = []
    for device in (CPU, torch.device("cuda", 0)):
        one = open_engine(role, str(folder), layout, LayoutRanks.alone(device), TrainSettings(optimizer=OPTIMIZER))
        logprobs = one.inference(batch, "logprobs", 1.0)
        found.append((logprobs, one.train(call(Loss({"ce": CrossEntropy()})), [batch])))
    tolerance = 1e-3 if dtype == "float32" else 0.1
    assert float((found[0][0] - found[1][0]).abs().mean()) < tolerance
    assert found[0][1]["loss"].value == pytest.approx(found[1][1]["loss"].value, rel=tolerance)
    assert found[0][1]["grad_norm"].value == pytest.approx(found[1][1]["grad_norm"].value, rel=tolerance)


def test_wants_of_a_mask_cost_nothing_else(folder: Path) -> None:
    """A batch whose mask is empty still gives a graph, so that a sharded model's backward runs."""
    one = engine(folder)
    batch = tiny.batch([4, 5])
    outputs = one.model.run(batch, Wants(where=torch.zeros_like(batch.mask)))
    assert outputs.logprobs is not None
    assert not outputs.logprobs.any()
    torch.autograd.backward(outputs.logprobs.sum())
