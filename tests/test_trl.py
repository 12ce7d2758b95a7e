"""Losses and advantages beside TRL's own functions, on the same tensors. Skipped where TRL is not installed.

TRL's loss functions are methods of trainers; here they are called on a bare object that holds the settings they read,
and the forward pass gives them the very tensors that ours gets.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("accelerate")
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.utils import nanstd

from realgraph.graphs import maths
from realgraph.graphs.maths import Aggregate, Loss, OffPolicy
from realgraph.graphs.spec import Advantage
from realgraph.graphs.steps import Center, Scale, Step
from realgraph.runtime.algorithms.advantages import compute
from realgraph.runtime.algorithms.losses import denominator, evaluate
from realgraph.runtime.batch import Outputs, Packed

N, PROMPT, RESPONSE = 6, 3, 9
grpo_loss: Any = GRPOTrainer._compute_loss
dpo_loss: Any = DPOTrainer._compute_loss
reward_loss: Any = RewardTrainer.compute_loss
KEYS = ("logprobs", "behaviour_logprobs", "proximal_logprobs", "ref_logprobs")


class Padded:
    """The same numbers twice: padded [N, RESPONSE] for TRL, packed for us. Right padding, no empty response."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, RESPONSE + 1, (N,), generator=generator)
        self.mask = torch.arange(RESPONSE) < self.lengths[:, None]
        base = torch.randn(N, RESPONSE, generator=generator, dtype=torch.float64) * 0.5 - 1.5
        self.values = {
            name: base + 0.25 * torch.randn(N, RESPONSE, generator=generator, dtype=torch.float64) for name in KEYS
        }
        self.values["logprobs"].requires_grad_()
        self.advantages = torch.randn(N, generator=generator, dtype=torch.float64)

    def pack(self, values: Tensor) -> Tensor:
        """[N, RESPONSE] -> [T], zeros over the prompts."""
        rows = [torch.cat([values.new_zeros(PROMPT), row[:n]]) for row, n in zip(values, self.lengths, strict=True)]
        return torch.cat(rows)

    def ours(self, proximal: bool) -> tuple[Packed, Outputs]:
        keys = {name: self.pack(self.values[name]) for name in KEYS[1:] if proximal or name != "proximal_logprobs"}
        lengths = tuple(PROMPT + int(n) for n in self.lengths)
        mask = torch.cat([torch.arange(n) >= PROMPT for n in lengths])
        groups = tuple(i // 2 for i in range(N))
        tokens = torch.zeros(sum(lengths), dtype=torch.int64)
        batch = Packed(tokens, lengths, mask, tuple(range(N)), groups, keys, {"advantages": self.advantages})
        return batch, Outputs(logprobs=self.pack(self.values["logprobs"]))


def accelerator() -> SimpleNamespace:
    return SimpleNamespace(
        num_processes=1,
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )


def settings(**given: Any) -> SimpleNamespace:
    """A trainer as far as TRL's loss functions read it, in evaluation (no gradient accumulation)."""
    return SimpleNamespace(
        accelerator=accelerator(),
        model=SimpleNamespace(training=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False,
        **given,
    )


def grpo(data: Padded, ratios: Tensor | None, old: Tensor, **given: Any) -> tuple[Tensor, dict[str, list[float]]]:
    """TRL's GRPO loss and metrics."""
    trainer = settings(
        **{
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "args": SimpleNamespace(use_bias_correction_kl=False, delta=given.pop("delta", None)),
            "loss_type": "grpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "use_vllm": ratios is not None,
            "vllm_importance_sampling_correction": True,
            "max_completion_length": 11,
            "_entropy_bonus_enabled": False,
            "_get_per_token_logps_and_entropies": lambda *a, **k: (
                data.values["logprobs"],
                torch.ones(N, RESPONSE, dtype=torch.float64),
                None,
            ),
            **given,
        }
    )
    inputs = {
        "prompt_ids": torch.zeros(N, PROMPT, dtype=torch.int64),
        "prompt_mask": torch.ones(N, PROMPT, dtype=torch.int64),
        "completion_ids": torch.zeros(N, RESPONSE, dtype=torch.int64),
        "completion_mask": data.mask.double(),
        "advantages": data.advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": data.values["ref_logprobs"],
        "importance_sampling_ratio": ratios,
        "num_items_in_batch": data.mask.sum(),
    }
    return grpo_loss(trainer, trainer.model, inputs), trainer._metrics["eval"]


def agree(mine: Tensor, theirs: Tensor, of: Tensor) -> None:
    """Value and gradient."""
    torch.testing.assert_close(mine.detach(), theirs.detach().double(), rtol=1e-12, atol=1e-14)
    (a,) = torch.autograd.grad(mine, of, retain_graph=True)
    (b,) = torch.autograd.grad(theirs, of, retain_graph=True)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def evaluated(loss: Loss, data: Padded, proximal: bool = True) -> tuple[Tensor, dict[str, float]]:
    batch, outputs = data.ours(proximal)
    scalar, metrics = evaluate(loss, batch, outputs, denominator(loss, batch))
    return scalar, {name: mean.value for name, mean in metrics.items()}


TYPES: dict[str, Aggregate] = {
    "grpo": maths.SequenceMean(),
    "bnpo": maths.TokenMean(),
    "dapo": maths.TokenMean(),
    "dr_grpo": maths.Constant(11),
}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", TYPES)
def test_grpo_dapo_dr_grpo_and_gspo(kind: str, level: Any, beta: float) -> None:
    for seed in range(3):
        data = Padded(seed)
        policy = maths.PolicyGradient(ratio=level, clip=maths.TwoSided(0.2, 0.28))
        loss = Loss({"policy": policy, "kl": maths.KL("ref_logprobs", "k3", beta)}, TYPES[kind])
        theirs, metrics = grpo(
            data, None, data.values["behaviour_logprobs"], loss_type=kind, importance_sampling_level=level, beta=beta
        )
        mine, found = evaluated(loss, data)
        agree(mine, theirs, data.values["logprobs"])
        if level == "token":  # per sequence, TRL counts sequences and we count tokens
            assert found["clip_fraction"] == pytest.approx(metrics["clip_ratio/region_mean"][0])
        if beta:
            assert found["kl"] == pytest.approx(metrics["kl"][0])


def test_dual_clip_and_cispo() -> None:
    for seed in range(5):
        data = Padded(seed)
        dual = maths.PolicyGradient(clip=maths.TwoSided(0.1, 0.1, dual=1.2))
        theirs, _ = grpo(data, None, data.values["behaviour_logprobs"], delta=1.2, epsilon_low=0.1, epsilon_high=0.1)
        agree(evaluated(Loss({"p": dual}, maths.SequenceMean()), data)[0], theirs, data.values["logprobs"])
        cispo = maths.PolicyGradient(clip=maths.StopGradient(1.0, 0.2))
        theirs, _ = grpo(data, None, data.values["behaviour_logprobs"], loss_type="cispo", epsilon_high=1.2)
        agree(evaluated(Loss({"p": cispo}), data)[0], theirs, data.values["logprobs"])


@pytest.mark.parametrize("mode", ["truncated", "clamp", "mask"])
@pytest.mark.parametrize("first_step", [False, True])
def test_importance_sampling_corrections(mode: str, first_step: bool) -> None:
    """TRL's correction between the sampler's and the trainer's log-probabilities is the decoupled objective."""
    cap = 1.1
    corrections: dict[str, OffPolicy] = {
        "truncated": maths.Truncated(cap),
        "clamp": maths.Decoupled(cap, "clamp"),
        "mask": maths.Decoupled(cap, "mask"),
    }
    for seed in range(3):
        data = Padded(seed)
        old = data.values["logprobs"].detach() if first_step else data.values["proximal_logprobs"]
        ratios = (old - data.values["behaviour_logprobs"]).exp()
        ratios = ratios.masked_fill(ratios > cap, 0.0) if mode == "mask" else ratios.clamp(max=cap)
        theirs, _ = grpo(data, ratios, old)
        policy = maths.PolicyGradient(clip=maths.TwoSided(0.2, 0.28), off_policy=corrections[mode])
        mine, _ = evaluated(Loss({"p": policy}, maths.SequenceMean()), data, proximal=not first_step)
        agree(mine, theirs, data.values["logprobs"])


@pytest.mark.parametrize("seed", range(3))
def test_dpo(seed: int) -> None:
    data = Padded(seed)
    order = [0, 2, 4, 1, 3, 5]  # TRL's batch: all chosen, then all rejected
    mask = torch.cat([torch.zeros(N, PROMPT), data.mask.double()], dim=1)[order]

    def forward(values: Tensor) -> SimpleNamespace:
        whole = torch.cat([torch.zeros(N, PROMPT - 1, dtype=torch.float64), values * data.mask], dim=1)[order]
        zeros = torch.zeros_like(whole).detach()
        return SimpleNamespace(log_probs=whole, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    reference = forward(data.values["ref_logprobs"]).log_probs.sum(1)
    trainer = settings(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        use_weighting=False,
        beta=0.3,
        _total_train_tokens=0,
    )
    inputs = {
        "input_ids": torch.zeros(N, PROMPT + RESPONSE, dtype=torch.int64),
        "attention_mask": torch.ones(N, PROMPT + RESPONSE),
        "completion_mask": mask,
        "ref_chosen_logps": reference[: N // 2],
        "ref_rejected_logps": reference[N // 2 :],
    }
    theirs = dpo_loss(trainer, lambda **k: forward(data.values["logprobs"]), inputs, False)
    mine, found = evaluated(Loss({"p": maths.Preference(beta=0.3)}, maths.PairMean()), data)
    agree(mine, theirs, data.values["logprobs"])
    metrics = trainer._metrics["eval"]
    assert found["accuracy"] == pytest.approx(metrics["rewards/accuracies"][0])
    assert found["margin"] == pytest.approx(metrics["rewards/margins"][0])
    assert found["chosen_reward"] == pytest.approx(metrics["rewards/chosen"][0])


@pytest.mark.parametrize("seed", range(3))
def test_reward_model(seed: int) -> None:
    scores = torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    ordered = torch.cat([scores[0::2], scores[1::2]])
    trainer = settings(args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0)
    theirs = reward_loss(trainer, lambda **k: SimpleNamespace(logits=ordered[:, None]), {})
    batch, _ = Padded(seed).ours(False)
    loss = Loss({"p": maths.PairwiseScore()}, maths.PairMean())
    mine, metrics = evaluate(loss, batch, Outputs(scores=scores), denominator(loss, batch))
    agree(mine, theirs, scores)
    assert metrics["accuracy"].value == pytest.approx(trainer._metrics["eval"]["accuracy"][0])


@pytest.mark.parametrize("seed", range(5))
def test_advantages_scaled_by_trls_deviation(seed: int) -> None:
    """Group and batch deviations by TRL's `nanstd`, put together as its GRPO trainer does inside a longer method."""
    data = Padded(seed)
    batch, _ = data.ours(False)
    rewards = data.advantages
    mean = rewards.view(-1, 2).mean(1).repeat_interleave(2)
    cases: list[tuple[dict[str, Step | None], Tensor]] = [
        (
            {"center": Center(), "scale": Scale(eps=1e-4)},
            nanstd(rewards.view(-1, 2), dim=1).repeat_interleave(2),
        ),
        # TRL takes the batch's deviation of the rewards themselves: here, scale before centring.
        ({"scale": Scale("batch", 1e-4), "center": Center()}, nanstd(rewards, dim=0).expand(N)),
    ]
    for steps, deviation in cases:
        expected = (rewards - mean) / (deviation + 1e-4)
        outputs, _, _ = compute(Advantage(steps, reads=("advantages",)), batch, {})
        wanted = torch.where(batch.mask, expected[batch.sample_index()], 0.0).float()
        torch.testing.assert_close(outputs["advantages"], wanted, rtol=1e-6, atol=1e-7)
