"""The engines that `realgraph profile` times, on random models: passes, train calls, decode steps, whole rollouts.

Worker side. A model is built once for all its cases; a decode case keeps its sequences where they are, so that every
round times the same step.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS
from realgraph.graphs.maths import Loss, PolicyGradient
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.costs.calibrate.measurements import DecodeCase, Pass, RolloutCase
from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import Request, RolloutLimits, TrainSettings
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.models import PackedModel
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.profile.files import model_folder
from realgraph.runtime.train.engine import TorchTrainEngine
from realgraph.runtime.train.passes import ModelPasses

EngineCase = Pass | DecodeCase | RolloutCase  # long enough, or repeating by themselves, to be timed once a round
DECODE_STEPS = 4  # timed in each round
PREFILL_TOKENS = 4096  # that enter the cache in one step
LR = 1e-9
ALONE = Layout(DeviceMesh(0, 1))


class ProfiledEngines:
    """The engines of one worker, by model."""

    def __init__(self, dtype: DType, ranks: LayoutRanks, folder: Path) -> None:
        self._role = ModelRole(trainable=True, dtype=dtype)
        self._ranks, self._folder = ranks, folder
        self._built: dict[ModelSpec, PackedModel] = {}
        self._engines: dict[ModelSpec, TorchTrainEngine] = {}

    def prepare(self, case: EngineCase) -> Callable[[], float]:
        """A function that runs the case once and returns its seconds."""
        match case:
            case Pass():
                return self._pass(case)
            case DecodeCase():
                return self._decode(case)
            case RolloutCase():
                return self._rollout(case)

    def _model(self, model: ModelSpec) -> PackedModel:
        if model not in self._built:
            start = Start(self._ranks.device, seed=0)
            self._built[model] = build(self._role, str(model_folder(self._folder, model)), start)
        return self._built[model]

    def _trained(self, model: ModelSpec) -> TorchTrainEngine:
        """One engine a model: its masters and moments are several times the model."""
        if model not in self._engines:
            settings = TrainSettings(optimizer=Optimizer())
            self._engines[model] = TorchTrainEngine(self._role, self._model(model), ALONE, self._ranks, settings)
        return self._engines[model]

    def _sync(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()

    # --- packed passes ------------------------------------------------------------------------------------------------

    def _pass(self, case: Pass) -> Callable[[], float]:
        tokens = case.samples * case.length // case.microbatches
        settings = TrainSettings(max_tokens_per_microbatch=tokens, optimizer=Optimizer())
        engine = self._trained(case.model)
        passes = ModelPasses(self._role, engine.model, self._ranks, settings)
        batch = random_batch(case, self._ranks.device)
        call = Train(model="actor", lr=LR, loss=Loss(terms={"policy": PolicyGradient()}))

        def run() -> float:
            engine.passes = passes
            self._sync()
            began = time.perf_counter()
            if case.train:
                engine.train(call, [batch])
            else:
                engine.inference(batch, "logprobs", 1.0)
            self._sync()
            return time.perf_counter() - began

        return run

    # --- generation ---------------------------------------------------------------------------------------------------

    def _engine(self, model: ModelSpec, running: int, cuda_graphs: bool = True) -> ContinuousBatch:
        limits = RolloutLimits(max_running=running, prefill_tokens=PREFILL_TOKENS, cuda_graphs=cuda_graphs)
        return ContinuousBatch(self._model(model).network, limits)

    def _decode(self, case: DecodeCase) -> Callable[[], float]:
        """Sequences that all differ, as the engine decodes equal ones once; each round times a few steps near the
        asked context."""
        engine = self._engine(case.model, case.running, case.cuda_graphs)
        numbers = iter(range(1 << 40))

        def run() -> float:
            ids = [next(numbers) for _ in range(case.running)]
            prompts = [own_prompt(place, case.context, case.model.vocab) for place in range(case.running)]
            fills = -(-case.running * case.context // PREFILL_TOKENS) + 1
            budget = fills + DECODE_STEPS + 1
            engine.submit([Request(i, prompt, budget, seed=i) for i, prompt in zip(ids, prompts, strict=True)])
            for _ in range(fills):  # the first sequences decode while the last ones enter the cache
                if engine.running < case.running:
                    engine.step()
            rounds = []
            for _ in range(DECODE_STEPS):
                self._sync()
                began = time.perf_counter()
                engine.step()
                self._sync()
                rounds.append(time.perf_counter() - began)
            engine.abort(ids)
            engine.release()
            return min(rounds)

        return run

    def _rollout(self, case: RolloutCase) -> Callable[[], float]:
        engine = self._engine(case.model, case.running)
        numbers = iter(range(1 << 40))
        n_tokens = case.model.vocab

        def run() -> float:
            requests = []
            for group in range(case.groups):
                prompt = tuple((group * 31 + i * 7) % n_tokens for i in range(case.prompt))
                for _ in range(case.per_group):
                    number = next(numbers)
                    requests.append(Request(number, prompt, case.new, seed=number))
            self._sync()
            began = time.perf_counter()
            engine.submit(requests)
            while not engine.idle:
                engine.step()
            self._sync()
            return time.perf_counter() - began

        return run


def own_prompt(number: int, length: int, vocab: int) -> tuple[int, ...]:
    """A prompt of `length` tokens that no other `number` below vocab^2 has."""
    return (number % vocab, number // vocab % vocab, *((number + 7 * i) % vocab for i in range(length)))[:length]


def random_batch(case: Pass, device: torch.device) -> Packed:
    """Samples of random tokens, each a group of its own, of which the second half was sampled."""
    total = case.samples * case.length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(case.model.vocab, (total,), generator=generator)
    mask = (torch.arange(total) % case.length) >= case.length // 2
    keys: dict[str, Tensor] = {"advantages": torch.randn(total, generator=generator)}
    keys[BEHAVIOUR_LOGPROBS] = torch.full((total,), -1.0)
    numbers = tuple(range(case.samples))
    return Packed(tokens, (case.length,) * case.samples, mask, numbers, numbers, keys).to(device)
