"""Training passes of one model under parallel layouts, against one process and against torch's own parallelism.

Processes of one thread each, on two cores, started once; run from the root of the repository: `OMP_NUM_THREADS=1 python
-m benchmarks.parallel_engines`. A pass is forward and backward of a step's micro-batches, without the optimizer. Ours
take packed samples under a budget of tokens. `torch.distributed.pipelining` (Schedule1F1B) takes micro-batches of one
shape: equal lengths as they are, ragged ones padded to the longest. torch's DTensor plan of tensor parallelism takes
micro-batches of neighbouring lengths, each padded to its own longest. Experts are cut in a mixture of its own (8
experts, 2 of them a token), against that mixture in one process. `ideal`: the cores that work, over one; two for four
processes of fsdp2 tp2. Rounds of all contenders take turns, and each counts by its best: only ratios carry over to
other machines.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.machine import describe
from realgraph.graphs.maths import CrossEntropy, Loss, TokenMean
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.costs.compute.pipeline import MicroBatch, Pipeline, pipeline_seconds
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.stages import balanced_stages, layer_ranges
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.stage import layer_stages
from realgraph.runtime.train.engine import open_engine
from realgraph.runtime.train.passes import Aim
from tests import tiny
from tests.ranks import RankProcesses, joined

MICROBATCHES = 8
SHAPES = {
    "0.8M": {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "30M": {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "head_dim": 64}
    | {"num_attention_heads": 8, "num_key_value_heads": 4},
}
LAYOUTS = {
    "one process": Layout(DeviceMesh(0, 1)),
    "pp2": Layout(DeviceMesh(0, 2), pp=2),
    "pp2 interleaved": Layout(DeviceMesh(0, 2), pp=2, stages=((3, 2), (2, 2))),
    "tp2": Layout(DeviceMesh(0, 2), tp=2),
    "cp2": Layout(DeviceMesh(0, 2), cp=2),
    "dp2": Layout(DeviceMesh(0, 2), dp=2),
    "fsdp2 tp2": Layout(DeviceMesh(0, 4), dp=2, tp=2, sharding="fsdp"),
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
OF_MIXTURE = {
    "one process": Layout(DeviceMesh(0, 1)),
    "ep2": Layout(DeviceMesh(0, 2), dp=2, ep=2),
}
IDEAL = 2.0  # cores
FEW = {"pp2 interleaved": Layout(DeviceMesh(0, 2), pp=2, stages=((1, 1), (1, 1)))}  # of a model of four layers
CLAIMS = (  # contender, peer, lengths, ratio of the 30M model
    ("pp2", "one process", "ragged", 1.3),
    ("tp2", "one process", "ragged", 1.25),
    ("tp2", "torch DTensor", "equal", 1.15),
    ("tp2", "torch DTensor", "ragged", 1.15),
    ("pp2", "torch 1F1B", "equal", 0.95),
    ("pp2", "torch 1F1B", "ragged", 2.0),
)
Contender = Callable[[LayoutRanks, Path, Layout, "Work", int], list[float]]
RESULTS = Path(__file__).parent / "results" / "parallel_engines.json"


@dataclass(frozen=True)
class Work:
    """The samples of a step. lengths: `equal` or `ragged`. budget: tokens of a micro-batch."""

    lengths: tuple[int, ...]
    vocabulary: int

    @property
    def budget(self) -> int:
        """Tokens that cut the step into `MICROBATCHES`, or one more."""
        return -(-sum(self.lengths) // MICROBATCHES) + (0 if len(set(self.lengths)) == 1 else max(self.lengths) // 16)

    @property
    def batch(self) -> Packed:
        """The samples, all of random tokens that are trained on."""
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, self.vocabulary, (sum(self.lengths),), generator=draw)
        return Packed(tokens, self.lengths, torch.ones_like(tokens, dtype=torch.bool))

    @property
    def padded(self) -> tuple[Tensor, Tensor]:
        """[samples, longest] tokens, and the next ones, -100 where there is none."""
        return padded(torch.split(self.batch.tokens, list(self.lengths)))

    @property
    def padded_parts(self) -> list[tuple[Tensor, Tensor]]:
        """The same of micro-batches within the budget, of neighbours in length, so that little is padded."""
        samples = torch.split(self.batch.tokens, list(self.lengths))
        cuts: list[list[Tensor]] = [[]]
        for sample in samples:  # in ascending order
            if cuts[-1] and (len(cuts[-1]) + 1) * len(sample) > self.budget:
                cuts.append([])
            cuts[-1].append(sample)
        return [padded(cut) for cut in cuts]


def padded(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[samples, longest] tokens, and the next ones, -100 where there is none."""
    tokens = torch.nn.utils.rnn.pad_sequence(list(samples), True)
    follows = torch.arange(tokens.shape[1]) < torch.tensor([len(sample) for sample in samples])[:, None] - 1
    return tokens, tokens.roll(-1, 1).where(follows, -100)


def works(vocabulary: int) -> dict[str, Work]:
    """Equal lengths, and long-tailed ones of about as many tokens."""
    rng = random.Random(0)
    ragged = tuple(sorted(min(256, max(8, int(rng.lognormvariate(3.8, 0.8)))) for _ in range(32)))
    return {"equal": Work((64,) * 32, vocabulary), "ragged": Work(ragged, vocabulary)}


# --- on each worker ---------------------------------------------------------------------------------------------------


def ours(ranks: LayoutRanks, folder: Path, layout: Layout, work: Work, rounds: int) -> list[float]:
    """Seconds of each round of an engine's passes; nothing on a worker that the layout leaves out."""
    if ranks.mesh.rank not in layout.mesh.devices:
        return []
    here = joined[0].of_layout(layout) if layout.mesh.n_devices > 1 else LayoutRanks.alone(ranks.device)
    settings = TrainSettings(max_tokens_per_microbatch=work.budget, optimizer=Optimizer(), skip_idle=False)
    engine = open_engine(ModelRole(trainable=True), str(folder), layout, here, settings)
    assert engine.adam is not None
    masters, call = engine.adam.masters, Train(model="actor", loss=Loss({"nll": CrossEntropy()}, TokenMean()))
    share = work.batch.select(range(here.dp.rank, len(work.lengths), here.dp.size))
    (part,) = engine.passes.parts(call.loss, [share], 0)

    def step() -> None:
        engine.passes.accumulate(Aim(call), part, masters)
        engine.passes.reduce(masters, 1.0)

    return timed(step, here, rounds)


def torchs(ranks: LayoutRanks, folder: Path, layout: Layout, work: Work, rounds: int) -> list[float]:
    """The same of torch's Schedule1F1B over the same stages."""
    if ranks.mesh.rank not in layout.mesh.devices:
        return []
    model = build(ModelRole(), str(folder), Start(ranks.device))
    model.config._attn_implementation = "sdpa"
    here = joined[0].of_layout(layout)
    assert here.pp.group is not None
    ((layers,),) = [
        chunks
        for stage, chunks in enumerate(layer_ranges(layer_stages(model.config, model.head, layout)))
        if stage == here.pp.rank
    ]
    part = TorchPart(model.network, layers, here.pp.rank == here.pp.size - 1).requires_grad_()
    stage = TorchStage(part, here.pp.rank, here.pp.size, ranks.device, group=here.pp.group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=summed_loss, scale_grads=False)
    tokens, follow = work.padded

    def step() -> None:
        part.zero_grad()
        if here.pp.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=follow, losses=[])

    return timed(step, here, rounds)


def dtensors(ranks: LayoutRanks, folder: Path, layout: Layout, work: Work, rounds: int) -> list[float]:
    """The same of torch's DTensor plan: heads and widths by columns, what follows them by rows, the vocabulary cut."""
    if ranks.mesh.rank not in layout.mesh.devices:
        return []
    here = joined[0].of_layout(layout)
    assert here.tp.group is not None
    network: Any = build(ModelRole(), str(folder), Start(ranks.device)).network
    network.config._attn_implementation = "sdpa"
    mesh = TorchMesh.from_group(here.tp.group, "cpu")
    column, row = ColwiseParallel, RowwiseParallel
    for layer in network.model.layers:
        plan = {f"self_attn.{name}_proj": column() for name in "qkv"} | {"self_attn.o_proj": row()}
        plan |= {"mlp.gate_proj": column(), "mlp.up_proj": column(), "mlp.down_proj": row()}
        parallelize_module(layer, mesh, plan)
    ends = {"model.embed_tokens": row(input_layouts=Replicate()), "lm_head": column(output_layouts=Replicate())}
    parallelize_module(network, mesh, ends)
    network.requires_grad_()

    def step() -> None:
        network.zero_grad()
        for tokens, follow in work.padded_parts:
            logits = network(tokens, use_cache=False).logits
            summed_loss(logits, follow).backward()

    return timed(step, here, rounds)


class TorchPart(nn.Module):
    """A stage for torch's schedules: [samples, longest] tokens, or hidden states, to hidden states or logits."""

    def __init__(self, network: Any, layers: range, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([network.model.layers[number] for number in layers])
        self.rotary = network.model.rotary_emb
        self.embedding = network.model.embed_tokens if layers.start == 0 else None
        self.ends = nn.Sequential(network.model.norm, network.lm_head) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        hidden = x if self.embedding is None else self.embedding(x)
        turns = self.rotary(hidden, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=turns)
        out: Tensor = self.ends(hidden)
        return out


def summed_loss(logits: Tensor, follow: Tensor) -> Tensor:
    """Cross-entropy of the tokens that follow."""
    return F.cross_entropy(logits.flatten(0, 1), follow.flatten(), reduction="sum")


def timed(step: Callable[[], None], here: LayoutRanks, rounds: int) -> list[float]:
    """Seconds of each round, all ranks together, after one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        here.mesh.barrier()
        begun = time.perf_counter()
        step()
        here.mesh.barrier()
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


# --- all of them ------------------------------------------------------------------------------------------------------


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Seconds and ratios of one model, and of a mixture of its size."""
    layouts = LAYOUTS if name == "30M" else {**LAYOUTS, **FEW}
    shape = SHAPES[name]
    processes = RankProcesses(4, (*layouts.values(), *OF_MIXTURE.values()), seconds=600.0)
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save(Path(folder) / "model", "qwen3", **shape)
        mixture = tiny.save(Path(folder) / "mixture", "qwen3_moe", **shape, **MIXTURE)
        contenders: dict[str, tuple[Contender, Path, Layout]] = {
            **{name: (ours, model, layout) for name, layout in layouts.items()},
            "torch 1F1B": (torchs, model, layouts["pp2"]),
            "torch DTensor": (dtensors, model, layouts["tp2"]),
            **{f"mixture, {name}": (ours, mixture, layout) for name, layout in OF_MIXTURE.items()},
        }
        for lengths, work in works(shape["vocab_size"]).items():
            seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
            for _ in range(rounds):
                for contender, (run, path, layout) in contenders.items():
                    seconds[contender] += processes.run(run, path, layout, work, 1)[0]
            best[lengths] = {contender: min(found) for contender, found in seconds.items()}
            for contender, least in best[lengths].items():
                peer = "mixture, one process" if contender.startswith("mixture") else "one process"
                ratio = best[lengths][peer] / least
                print(
                    f"{name:>5} {lengths:>7} {contender:>20}: {least:7.3f} s, {ratio:.2f} x one process, "
                    f"ideal {1.0 if contender == peer else IDEAL:.0f}",
                    flush=True,
                )
    processes.close()
    return {
        "seconds": best,
        "interleaved_over_1f1b": interleaving(name, best),
        "tokens": {k: sum(w.lengths) for k, w in works(64).items()},
    }


def interleaving(name: str, best: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Seconds of 1F1B over those of interleaved chunks: by lengths as measured, and as the schedules' formula has it
    where messages and chunks cost nothing."""
    layers, width = SHAPES[name]["num_hidden_layers"], SHAPES[name]["hidden_size"]
    chunks = {**LAYOUTS, **(FEW if name != "30M" else {})}["pp2 interleaved"].stages
    attention = (
        2
        * width
        * SHAPES[name]["head_dim"]
        * (SHAPES[name]["num_attention_heads"] + SHAPES[name]["num_key_value_heads"])
    )
    head = SHAPES[name]["vocab_size"] * width / (attention + 3 * width * SHAPES[name]["intermediate_size"])
    one = MicroBatch(1.0, 2.0, 3.0 * head)
    plain = Pipeline(balanced_stages(layers, 2, 1, (0.0, head)))
    predicted = pipeline_seconds(one, plain, MICROBATCHES) / pipeline_seconds(
        one, Pipeline(chunks, "interleaved"), MICROBATCHES
    )
    found = {lengths: seconds["pp2"] / seconds["pp2 interleaved"] for lengths, seconds in best.items()}
    shown = ", ".join(f"{ratio:.2f} ({lengths})" for lengths, ratio in found.items())
    print(f"{name:>5} interleaved over 1F1B: {shown}; where messages and chunks cost nothing {predicted:.2f}")
    return {"measured": found, "bound": predicted}


def main() -> None:
    """Measure, print, compare with the claims, and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(SHAPES), help="only this model; writes nothing")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    measured = {name: measure(name, given.rounds) for name in SHAPES if given.case in (None, name)}
    claims = []
    for contender, peer, lengths, target in CLAIMS if "30M" in measured else ():
        found = measured["30M"]["seconds"][lengths]
        ratio = found[peer] / found[contender]
        verdict = "PASS" if ratio >= target else "FAIL"
        print(f"{verdict} {contender} against {peer}, {lengths} lengths: {ratio:.2f} (claim >= {target})")
        claims.append({"contender": contender, "peer": peer, "lengths": lengths, "ratio": ratio, "claim": target})
    if given.case is None:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": describe(), "cases": measured, "claims": claims}, indent=2) + "\n")


if __name__ == "__main__":
    main()
