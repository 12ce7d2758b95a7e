"""Training of tiny models under any layout, and all that a step leaves behind: what must equal one process's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realgraph.graphs.keys import ROUTES
from realgraph.graphs.maths import (
    KL,
    CrossEntropy,
    Decoupled,
    Entropy,
    LoadBalance,
    Loss,
    PairMean,
    PairwiseScore,
    PolicyGradient,
    Preference,
    SequenceMean,
    TokenMean,
    Value,
)
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.plan.layout import DeviceMesh, Layout, Recompute
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.engine import TrainOptions, TrainSettings
from realgraph.runtime.models.models import Wants
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.experts.routing import record_of, route_dtype
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.train.passes import ModelPasses, StepShare
from realgraph.runtime.train.staged import PackedMicroBatch
from realgraph.runtime.wire.metrics import Metric, merge
from tests import tiny
from tests.ranks import joined

OPTIMIZER = Optimizer(weight_decay=0.01, schedule="cosine", warmup_steps=1, max_grad_norm=0.5)
LOSSES = {
    "rl": Loss(
        {
            "policy": PolicyGradient(off_policy=Decoupled(cap=1e6)),
            "kl": KL(to="ref_logprobs", coef=0.1),
            "entropy": Entropy(coef=0.01),
        },
        SequenceMean(),
    ),
    "sft": Loss({"nll": CrossEntropy()}, TokenMean()),
    "value": Loss({"value": Value()}, TokenMean()),
    "pairs": Loss({"preference": Preference()}, PairMean()),
    "scores": Loss({"score": PairwiseScore()}, PairMean()),
    "sequences": Loss({"policy": PolicyGradient(ratio="sequence")}, SequenceMean()),
    "balanced": Loss({"nll": CrossEntropy(), "balance": LoadBalance(coef=0.3)}, TokenMean()),
}
LOSSES["replayed"] = LOSSES["rl"]  # of tokens that go to given experts
OUTPUTS = {"value": "values", "scores": "scores"}  # of the others logprobs and entropies
HEADS = {"value": "value", "scores": "score"}  # of the others lm
MICROBATCH_TOKENS = 40
TEMPERATURE = 0.8
SAMPLES = 6  # of a mini-batch
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_hidden_layers": 2}),
    "llama": ("llama", {"intermediate_size": 51}),
    "qwen2": ("qwen2", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "mistral": ("mistral", {"intermediate_size": 49}),
    "gemma": ("gemma", {}),
    "qwen3 deep": ("qwen3", {"num_hidden_layers": 4}),
    "llama deep": ("llama", {"num_hidden_layers": 4}),
    "gemma2 deep": ("gemma2", {"num_hidden_layers": 4}),
    "gemma3 deep": (
        "gemma3_text",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [0], "moe_intermediate_size": 13}),
    "qwen3_moe deep": ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1], "moe_intermediate_size": 13}),
    "mixtral": ("mixtral", {"intermediate_size": 3}),
    "gpt_oss": ("gpt_oss", {"intermediate_size": 3}),
    "deepseek": ("deepseek_v3", {"moe_intermediate_size": 3}),
    "deepseek deep": ("deepseek_v3", {"num_hidden_layers": 4, "q_lora_rank": None, "attention_bias": True}),
    "gpt_oss deep": ("gpt_oss", {"num_hidden_layers": 4}),
}  # all with the vocabulary of 61


@dataclass(frozen=True)
class Case:
    """One training. loss: of `LOSSES`. epochs: over two mini-batches. alike: samples of a group begin alike."""

    model: str
    loss: str = "rl"
    dtype: Any = "float64"
    layout: Layout = field(default_factory=lambda: Layout(DeviceMesh(0, 1)))
    recompute: Recompute = "none"
    lr: float = 1e-3
    epochs: int = 2
    alike: bool = False

    @property
    def alone(self) -> "Case":
        """The same training by one process."""
        return replace(self, layout=Layout(DeviceMesh(0, 1)), recompute="none")


Parts = dict[str, tuple[tuple[int, ...], Any]]  # by name: where in the whole tensor they begin, and values


@dataclass
class Training:
    """All that one worker saw. before: by name, of each mini-batch of an epoch, outputs before the first step. steps:
    metrics of each train call. gradients: of each optimizer step, clipped, of what it steps. weights, moments: at the
    end, what lies there."""

    before: dict[str, list[Any]] = field(default_factory=dict)
    steps: list[dict[str, Metric]] = field(default_factory=list)
    gradients: list[Parts] = field(default_factory=list)
    weights: Parts = field(default_factory=dict)
    moments: Parts = field(default_factory=dict)


def save_models(folder: Path) -> Path:
    """All of `MODELS`, by their names."""
    for name, (kind, changes) in MODELS.items():
        tiny.save(folder / name, kind, **changes)
    return folder


def minibatches(dtype: str, seed: int) -> list[Packed]:
    """Two ragged mini-batches; samples 0 and 1 of the second have an empty mask."""
    first, second = (
        tiny.batch(tiny.lengths(SAMPLES, 24, seed + i), seed + i, dtype=getattr(torch, dtype)) for i in range(2)
    )
    mask = second.mask.clone()
    mask[: sum(second.lengths[:2])] = False
    second = replace(second, mask=mask, samples=tuple(range(6, 12)))
    return [first, second]


def alike(batch: Packed) -> Packed:
    """The batch with groups of two whose shorter sample, but for a third of it, is the beginning of the other too."""
    samples = [*torch.split(batch.tokens.clone(), list(batch.lengths))]
    for one, other in zip(samples[::2], samples[1::2], strict=True):
        n = max(1, 2 * min(len(one), len(other)) // 3)
        other[:n] = one[:n]
    return replace(batch, tokens=torch.cat(samples))


def routed(batch: Packed, engine: TorchTrainEngine) -> Packed:
    """The batch with experts for each token but the last one of a sample and a few others, not those of its routers."""
    record, draw = record_of(engine.model.network), torch.Generator().manual_seed(batch.n_tokens)
    assert record is not None
    order = torch.rand((batch.n_tokens, record.n_layers, record.n_experts), generator=draw).argsort(-1)
    routes = order[..., : engine.model.config.num_experts_per_tok].to(route_dtype(record.n_experts))
    routes[torch.rand(batch.n_tokens, generator=draw) < 0.1] = record.n_experts
    routes[torch.tensor(batch.lengths).cumsum(0) - 1] = record.n_experts
    return replace(batch, token_keys={**batch.token_keys, ROUTES: routes})


def shares(n_ranks: int) -> list[list[list[int]]]:
    """The samples of every data-parallel rank in each mini-batch of an epoch: the last of several ranks has none of the
    first, no mask in the second."""
    match n_ranks:
        case 1:
            return [[[*range(SAMPLES)]]] * 2
        case 2:
            return [[[0, 1, 2, 3, 4, 5], []], [[2, 3, 4, 5], [0, 1]]]
        case _:
            return [[[0, 1, 2], [4], [3, 5], []], [[2], [], [3, 4, 5], [0, 1]]]


def share(batches: Sequence[Packed], ranks: LayoutRanks) -> list[Packed]:
    """One rank's mini-batches."""
    parts = shares(ranks.dp.size)
    return [batch.select(parts[i % 2][ranks.dp.rank]) for i, batch in enumerate(batches)]


def numpy(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Copies: tensors would travel between processes by file descriptors, and memory that numpy has can't be freed."""
    return {name: tensor.detach().to("cpu", torch.float64, copy=True).numpy() for name, tensor in tensors.items()}


def copied(held: Mapping[str, WeightPart]) -> Parts:
    """The same of parts."""
    values = numpy({name: part.values for name, part in held.items()})
    return {name: (part.box.start, values[name]) for name, part in held.items()}


class WatchedPasses(ModelPasses):
    """Passes that give the entropies of every micro-batch, not of a rank's first one alone: their mean is then the same
    under all layouts."""

    _answer: Callable[[Sequence[PackedMicroBatch]], list[Outputs]] | None = None  # in place of a pass

    def _outputs(self, work: Sequence[PackedMicroBatch]) -> list[Outputs]:
        return super()._outputs(work) if self._answer is None else self._answer(work)

    def with_entropies(self, batch: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of one forward pass: [T] each, in the batch's order."""
        passed: list[Outputs] = []

        def run(work: Sequence[PackedMicroBatch]) -> list[Outputs]:
            both = [replace(one, wants=replace(one.wants, entropy="detached")) for one in work]
            passed.extend(super(WatchedPasses, self)._outputs(both))
            return passed

        def entropies(_: Sequence[PackedMicroBatch]) -> list[Outputs]:
            return [replace(outputs, logprobs=outputs.entropy) for outputs in passed]

        asked = Wants("logprobs", temperature)
        self._answer = run
        logprobs = self.inference(batch, asked)
        self._answer = entropies
        second = self.inference(batch, asked)
        self._answer = None
        return logprobs, second

    def _step_work(self, part: StepShare, wants: Wants) -> list[PackedMicroBatch]:
        work = super()._step_work(part, wants)
        return [replace(one, wants=replace(one.wants, entropy=wants.entropy)) for one in work]


class Watched(TorchTrainEngine):
    """An engine that writes down every gradient that it steps."""

    seen: Training

    def outputs(self, loss: str, batch: Packed, alone: bool) -> dict[str, Tensor]:
        """By name, one value a token, or a sample, in the model's dtype. alone: log-probabilities by a pass of their
        own, as calls of inference make it, not by that of the entropies."""
        passes = self.passes
        assert isinstance(passes, WatchedPasses)
        output = OUTPUTS.get(loss, "logprobs")
        if output != "logprobs":
            return {output: passes.inference(batch, Wants(output, TEMPERATURE))}
        logprobs, entropies = passes.with_entropies(batch, TEMPERATURE)
        if alone:
            logprobs = passes.inference(batch, Wants("logprobs", TEMPERATURE))
        return {"logprobs": logprobs, "entropies": entropies}

    def watch(self) -> Training:
        """Begin, once; the notes fill as it trains, and new ones may take the place of `seen`."""
        self.seen = Training()
        assert self.adam is not None
        adam, step = self.adam, self.adam.step

        def noted(lr: float) -> None:
            masters, places = adam.masters, self.contents.states["exp_avg"]
            found = {name: master.grad for name, master in zip(masters.names, masters.tensors, strict=True)}
            stepped = {name: places[name]._replace(values=grad) for name, grad in found.items() if grad is not None}
            self.seen.gradients.append(copied(stepped))
            step(lr)

        adam.step = noted  # type: ignore[method-assign]
        return self.seen


def keep_norms_exact(model: nn.Module) -> None:
    """Compute norms in float64: transformers' round to float32 inside, where a sum of parts is another number."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            above = 1.0 if "Gemma" in type(module).__name__ else 0.0
            eps = float(getattr(module, "variance_epsilon", 0.0) or getattr(module, "eps", 0.0))
            module.forward = partial(_norm, module, above, eps)


def _norm(module: Any, above: float, eps: float, x: Tensor) -> Tensor:
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return unit * (above + module.weight)


def open_case(case: Case, models: Path, ranks: LayoutRanks) -> Watched:
    """The engine of a case on one worker."""
    head: Any = HEADS.get(case.loss, "lm")
    role = ModelRole(trainable=True, head=head, dtype=case.dtype)
    shared = case.layout.cp if case.loss == "balanced" else 1  # balance is of a micro-batch: all have the same ones
    settings = TrainSettings(
        max_tokens_per_microbatch=MICROBATCH_TOKENS // shared, optimizer=OPTIMIZER, total_steps=8, skip_idle=False
    )
    engine = open_engine(role, str(models / case.model), case.layout, ranks, settings)
    if case.dtype == "float64":
        keep_norms_exact(engine.model)
    engine.__class__, engine.passes.__class__ = Watched, WatchedPasses
    assert isinstance(engine, Watched)
    if head != "lm":  # a new head is all zeros
        changed = [(name, t + 0.1 if name == "score.weight" else t) for name, t in engine.weights()]
        engine.load_weights(whole(iter(changed)), 0)
    return engine


def call_of(case: Case) -> Train:
    """The train call of a case."""
    return Train(
        model="actor",
        loss=LOSSES[case.loss],
        lr=case.lr,
        optimizer=OPTIMIZER,
        minibatches=2,
        epochs=case.epochs,
        temperature=TEMPERATURE if case.loss == "rl" else 1.0,
    )


def ranks_of(case: Case, ranks: LayoutRanks) -> LayoutRanks | None:
    """The groups of this worker under the case's layout. None on a worker that it leaves out."""
    if case.layout.mesh.n_devices == 1:
        return ranks
    return joined[0].of_layout(case.layout) if ranks.mesh.rank in case.layout.mesh.devices else None


def train(ranks: LayoutRanks, case: Case, models: Path) -> Training | None:
    """One worker's training: two optimizer steps an epoch. None on a worker that the layout leaves out."""
    here = ranks_of(case, ranks)
    if here is None:
        return None
    engine = open_case(case, models, here)
    seen = engine.watch()
    made = minibatches(case.dtype, 0) * case.epochs
    made = [alike(batch) for batch in made] if case.alike else made
    batches = share([routed(batch, engine) for batch in made] if case.loss == "replayed" else made, here)
    for i, batch in enumerate(batches[:2]):
        for name, values in numpy(engine.outputs(case.loss, batch, alone=i == 1)).items():
            seen.before.setdefault(name, []).append(values)
    seen.steps.append(engine.train(call_of(case), batches, TrainOptions(case.recompute)))
    note_end(engine)
    return seen


def note_end(engine: Watched) -> None:
    """Write down the weights and moments that lie on this worker."""
    engine.seen.weights = copied(engine.contents.weights)
    for kind, held in engine.contents.states.items():
        engine.seen.moments |= copied({f"{kind}.{name}": part for name, part in held.items()})


def merged(found: Sequence[Training], step: int) -> dict[str, float]:
    """The metrics of all workers together."""
    total: dict[str, Metric] = {}
    for one in found:
        merge(total, one.steps[step])
    return {name: metric.value for name, metric in total.items()}
