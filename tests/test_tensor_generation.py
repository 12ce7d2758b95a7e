"""Replicas of several workers generate together: the samples of one process, whatever their callers do meanwhile."""

import copy
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.axes import coordinates_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import Completion, OwnWeights, Request, RolloutEngine, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.fixed import fixed_parts
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.experts.block import name_experts
from realgraph.runtime.parallel.experts.routing import record_of
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.rollout import StagedRollout
from realgraph.runtime.parallel.pipeline.stage import walk
from tests import tiny
from tests.ranks import RankProcesses, joined
from tests.rollouts import assert_exact, requests, run

CPU = torch.device("cpu")
TP4 = Layout(DeviceMesh(0, 4), tp=4)
DP2_TP2 = Layout(DeviceMesh(0, 4), dp=2, tp=2)
EP2 = Layout(DeviceMesh(0, 4), dp=4, ep=2)
EP4 = Layout(DeviceMesh(0, 4), dp=4, ep=4)
EP4_TP2 = Layout(DeviceMesh(0, 4), dp=2, tp=2, ep=4)
TP4_EP2 = Layout(DeviceMesh(0, 4), tp=4, ep=2)
DP2_PP2 = Layout(DeviceMesh(0, 4), dp=2, pp=2)
TP2_PP2 = Layout(DeviceMesh(0, 4), tp=2, pp=2)
CHUNKS = Layout(DeviceMesh(0, 4), tp=2, pp=2, stages=((1, 1), (1, 1)))
PP4 = Layout(DeviceMesh(0, 4), pp=4)
PP4_X2 = Layout(DeviceMesh(0, 4), pp=4, stages=((1, 1),) * 4)
DP2_PP2_X3 = Layout(DeviceMesh(0, 4), dp=2, pp=2, stages=((2, 1, 1), (1, 1, 1)))
EP2_PP2 = Layout(DeviceMesh(0, 4), dp=2, pp=2, ep=2)
EP2_PP2_X2 = Layout(DeviceMesh(0, 4), dp=2, pp=2, ep=2, stages=((1, 1), (1, 1)))
LAYOUTS = {
    **{"tp4": TP4, "dp2_tp2": DP2_TP2, "ep2": EP2, "ep4": EP4, "ep4_tp2": EP4_TP2, "tp4_ep2": TP4_EP2},
    **{"dp2_pp2": DP2_PP2, "tp2_pp2": TP2_PP2, "ep2_pp2": EP2_PP2, "tp2_pp2_x2": CHUNKS, "pp4": PP4},
    **{"pp4_x2": PP4_X2, "dp2_pp2_x3": DP2_PP2_X3, "ep2_pp2_x2": EP2_PP2_X2},
}
KINDS = ("qwen3", "llama", "gemma2")
LIMITS = RolloutLimits(max_running=6, max_cache_tokens=240, prefill_tokens=64)
LIMITS8 = replace(LIMITS, max_running=8)
# sequences give their pages to older ones: in lanes of one, or of some
SCARCE, NARROW = replace(LIMITS, max_cache_tokens=64), replace(LIMITS, max_cache_tokens=128)


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    processes = RankProcesses(4, [*LAYOUTS.values()])
    yield processes
    processes.close()


def layers_of(layout: Layout) -> int:
    """Those of a model for it."""
    return sum(map(sum, layout.stages)) or (4 if layout.pp > 1 else 2)


def wanted_of(seed: int) -> list[Request]:
    """Some greedy, some of a cut distribution, most of the whole one."""
    made = requests(random.Random(seed), 12, longest=14, groups_of=3)
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.7}]
    return [replace(request, **changes[request.id % 4]) for request in made]


def share_of(part: Sequence[Request], rank: int) -> Sequence[Request]:
    """The requests of a data-parallel rank: all, all but two, two, none."""
    return (part, part[2:], part[:2], ())[rank]


def give_way(engine: RolloutEngine, rng: random.Random) -> None:
    """A pause, in which a call of this worker alone may need the memory of its caches."""
    engine.pause()
    if rng.random() < 0.3:
        engine.release(weights=False)
    engine.resume()


def generate_together(ranks: LayoutRanks, folder: Path, layout: Layout, role: ModelRole, seed: int) -> Any:
    """On the head: the samples, the second half after a change of weights. The others pause now and then."""
    groups, rng, told = joined[0].of_layout(layout), random.Random(seed + ranks.mesh.rank), threading.Event()
    limits = NARROW if layout.stages else SCARCE if layout.pp > 1 else LIMITS
    engine = open_rollout(role, OwnWeights(str(folder), CPU), limits, lambda tokens: "", told.set, groups)
    wanted = wanted_of(seed)
    done: dict[int, Completion] = {}
    for part in (share_of(wanted[:6], groups.dp.rank), share_of(wanted[6:], groups.dp.rank)):
        if groups.heads:
            engine.submit([replace(wanted[0], id=99, seed=1), *part])
            engine.abort([99])
            with engine.set_aside():
                engine.submit(part[:2])
                assert engine.take(30.0) if part else engine.status().running == 0
            while not {request.id for request in part} <= done.keys():
                done |= {completion.id: completion for completion in engine.take(30.0)}
                give_way(engine, rng)
            engine.pause()
            engine.dismiss()
        else:
            for _ in range(rng.randint(0, 9)):
                give_way(engine, rng)
            engine.pause()
            engine.follow()
        ranks.mesh.barrier()
        other = build(role, str(folder), Start(CPU, seed=3))
        engine.prepare(whole(other.network.named_parameters()))
        engine.switch(engine.version + 1)
        engine.resume()
    engine.pause()
    ranks.mesh.barrier()
    assert engine.close(10.0)
    bare = {
        i: (replace(one, routes=None), None if one.routes is None else one.routes.numpy()) for i, one in done.items()
    }
    return bare if groups.heads else None  # tensors would travel by file descriptors


def generate_by_walk(ranks: LayoutRanks, *arguments: Any) -> Any:
    """`generate_together`, with the walk of float32 models on a CPU through layers, whatever their dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realgraph.runtime.generate.cached_model.lean_applies", lambda _: True)
        return generate_together(ranks, *arguments)


def plain_network(module: Any, kind: str) -> Any:
    """The same weights in transformers' own network; of a mixture all but its experts are transformers'."""
    if kind == "deepseek_v3":
        mixed = tiny.network(kind, 0, num_hidden_layers=module.config.num_hidden_layers).double()
        name_experts(mixed)
        mixed.load_state_dict(module.state_dict())
        return mixed
    if record_of(module) is not None:
        mixture: Any = copy.deepcopy(module)
        mixture.config._attn_implementation = "eager"
        return mixture
    plain = tiny.network(kind, 0, num_hidden_layers=module.config.num_hidden_layers).to(next(module.parameters()).dtype)
    plain.load_state_dict(module.state_dict())
    return plain


CASES = [
    *(("tp4", kind, "float64") for kind in KINDS),
    ("tp4", "qwen3", "float32"),
    *(("dp2_tp2", kind, how) for kind, how in (("qwen3", "float64"), ("gemma2", "float64"), ("llama", "float32"))),
    ("ep2", "qwen3_moe", "float64"),
    ("ep4", "mixtral", "float64"),
    ("ep4", "qwen3_moe", "float32"),
    *(("tp4", "gpt_oss", how) for how in ("float64", "float32")),
    ("ep4_tp2", "gpt_oss", "float64"),
    ("dp2_pp2", "gpt_oss", "float64"),
    *((name, "deepseek_v3", "float64") for name in ("tp4", "ep4_tp2", "dp2_pp2", "ep2_pp2_x2")),
    ("ep4_tp2", "qwen3_moe", "float64"),
    ("tp4_ep2", "mixtral", "float64"),
    ("dp2_pp2", "qwen3", "float64"),
    ("dp2_pp2", "gemma2", "float32"),
    ("tp2_pp2", "gemma3_text", "float64"),
    ("tp2_pp2_x2", "llama", "float64"),
    ("pp4", "qwen3", "float64"),
    ("pp4_x2", "qwen3", "float64"),
    ("dp2_pp2_x3", "gemma2", "float64"),
    ("ep2_pp2", "qwen3_moe", "float64"),
    *(("ep2_pp2_x2", kind, "float64") for kind in tiny.MIXTURES[:3]),
    ("tp2_pp2", "qwen3_moe", "float64"),
    ("tp4", "qwen2", "walk"),
    ("dp2_tp2", "qwen3", "walk"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "how"), CASES)
def test_a_replica_draws_what_one_process_draws(
    four: RankProcesses, tmp_path: Path, name: str, kind: str, how: str
) -> None:
    """tp4 over 2 KV heads and 61 tokens; behaviour log-probabilities are those of a full forward. Replicas that share
    experts have different requests, or none, and tell to which of them each token went; four stages have six
    sequences, two or one."""
    layers = layers_of(LAYOUTS[name])
    changes: dict[str, Any] = (
        {"mlp_only_layers": [0, 2]} if (name, kind) == ("tp2_pp2", "qwen3_moe") else {}
    )  # those of one stage
    folder = tiny.save(tmp_path / kind, kind, num_hidden_layers=layers, **changes)
    dtype: Any = "float64" if how == "walk" else how
    role, layout = ModelRole(path="x", dtype=dtype, routing_replay=kind in tiny.MIXTURES), LAYOUTS[name]
    generate = generate_by_walk if how == "walk" else generate_together
    found = [one for one in four.run(generate, folder, layout, role, 7) if one is not None]
    assert len(found) == layout.dp
    wanted = wanted_of(7)
    for part, start in ((wanted[:6], Start(CPU)), (wanted[6:], Start(CPU, seed=3))):
        module = build(role, str(folder), start).network
        kept = fixed_parts(build(role, str(folder), Start(CPU)).network)  # which no weights bring
        for fixed, here in fixed_parts(module).items():
            here.values.copy_(kept[fixed].values)
        expected = run(ContinuousBatch(module, LIMITS, keeps_routes=role.routing_replay), part)
        plain = plain_network(module, kind)
        for rank, done in enumerate(found):
            for request in share_of(part, rank):
                (own, routes), one = done[request.id], expected[request.id]
                if dtype == "float64":
                    assert own.tokens == one.tokens
                    # transformers' norms round to float32, the walk's do not
                    assert own.logprobs == pytest.approx(one.logprobs, abs=1e-5 if how == "walk" else 1e-6)
                    assert (routes is None) == (one.routes is None) == (kind not in tiny.MIXTURES)
                    assert one.routes is None or routes.tolist() == one.routes.tolist()
                if request.temperature and not request.top_k:
                    assert_exact(plain, request, own)


def prepare_while_others_generate(ranks: LayoutRanks, folder: Path) -> list[int]:
    """On the head: the versions of a sample's tokens. Its weights come from workers that pause later than it does."""
    role, groups = ModelRole(path="x", dtype="float32"), joined[0].of_layout(TP4)
    engine = open_rollout(role, OwnWeights(str(folder), CPU), LIMITS, lambda tokens: "", lambda: None, groups)
    own = list(build(role, str(folder), Start(CPU)).network.named_parameters())

    def together() -> Iterator[tuple[str, Tensor]]:
        ranks.mesh.barrier()
        yield from own

    if groups.heads:
        engine.submit([Request(1, (5, 9, 2), 40, seed=1)])
        engine.pause()
        time.sleep(0.1)  # the others have the request by then, and would take a step
    else:
        time.sleep(0.4)  # the head waits for weights by then
        engine.pause()
    engine.prepare(whole(together()))
    engine.switch(1)
    done: list[Completion] = []
    if groups.heads:
        engine.resume()
        done = engine.take(30.0)
        engine.pause()
        engine.dismiss()
    else:
        engine.follow()
    ranks.mesh.barrier()
    assert engine.close(10.0)
    return [version for one in done for version in one.versions]


def test_new_weights_come_from_workers_that_pause_later(four: RankProcesses, tmp_path: Path) -> None:
    """The head's engine takes part in exchanges meanwhile, for whose outcome those workers wait before they pause."""
    versions, *followers = four.run(prepare_while_others_generate, tiny.save(tmp_path / "model"))
    assert len(versions) == 40
    assert versions[-1] == 1
    assert followers == [[], [], []]


def generate_ahead(ranks: LayoutRanks, folder: Path, layout: Layout, new_tokens: int) -> list[int]:
    """On the head: the lengths of eight samples on four stages. The last stage draws for no pass before the first one
    has begun three passes through a chunk after its last one of that pass."""
    network, begun, drawn, sent = ranks.mesh.group, torch.zeros(1, dtype=torch.int64), 0, list[Any]()
    chunks = layers_of(layout) // 4
    turns = [(step, chunk, lane) for step in range(new_tokens) for chunk in range(chunks) for lane in range(4)]
    ends = [i for i, (_, chunk, _) in enumerate(turns) if chunk == chunks - 1]
    share = StagedRollout.share

    def tell(*arguments: Any) -> Tensor:
        if ranks.mesh.rank == 0:
            sent.append(dist.isend(torch.tensor([len(sent) + 1]), group=network, group_dst=3, tag=9))
        return walk(*arguments)

    def wait(self: StagedRollout, *arguments: Any) -> None:
        nonlocal drawn
        drawn += 1
        while ranks.mesh.rank == 3 and begun < min(ends[drawn - 1] + 4, len(turns)):
            came = dist.irecv(begun, group=network, group_src=0, tag=9)
            assert came is not None
            came.wait(timedelta(seconds=20))
        share(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realgraph.runtime.parallel.pipeline.rollout.walk", tell)
        patch.setattr(StagedRollout, "share", wait)
        role, groups = ModelRole(path="x", dtype="float32"), joined[0].of_layout(layout)
        engine = open_rollout(role, OwnWeights(str(folder), CPU), LIMITS8, lambda tokens: "", lambda: None, groups)
        done: list[Completion] = []
        if not groups.heads:
            engine.pause()
        ranks.mesh.barrier()  # a stage that paused between two steps would let the passes end that `wait` holds up
        if groups.heads:  # prompts of one token: no prefill
            engine.submit([Request(i, (i + 1,), new_tokens, seed=i) for i in range(8)])
            while len(done) < 8:
                done += engine.take(30.0)
            engine.pause()
            engine.dismiss()
        else:
            engine.follow()
        ranks.mesh.barrier()
        assert engine.close(10.0)
    return [len(completion.tokens) for completion in done]


@pytest.mark.parametrize("layout", [PP4, PP4_X2], ids=["pp4", "pp4_x2"])
def test_stages_compute_different_sequences_at_the_same_time(
    four: RankProcesses, tmp_path: Path, layout: Layout
) -> None:
    folder = tiny.save(tmp_path / "qwen3", "qwen3", num_hidden_layers=layers_of(layout), eos_token_id=None)
    assert four.run(generate_ahead, folder, layout, 6) == [[], [], [], [6] * 8]


def meet_no_number(ranks: LayoutRanks, folder: Path, layout: Layout) -> str:
    """The error of generation where one sequence has a token without numbers, as this worker is told of it. Of the
    first replica that sequence is in the last lane that has any, of another one in the first."""
    groups, role = joined[0].of_layout(layout), ModelRole(path="x", dtype="float64")
    engine = open_rollout(role, OwnWeights(str(folder), CPU), LIMITS, lambda tokens: "", lambda: None, groups)
    engine.pause()
    network = build(role, str(folder), Start(CPU)).network
    network.model.embed_tokens.weight.data[60] = torch.nan
    engine.prepare(whole(network.named_parameters()))
    engine.switch(1)
    ranks.mesh.barrier()
    if groups.heads:
        prompts = [(i + 3, 60 if i == (5, 0)[groups.dp.rank] else i) for i in range(6)]
        engine.submit([Request(i, prompt, 60, seed=i, temperature=0.0) for i, prompt in enumerate(prompts)])
        engine.resume()
    with pytest.raises(FloatingPointError) as error:
        engine.take(30.0) if groups.heads else engine.follow()
    ranks.mesh.barrier()
    assert engine.close(10.0)
    return str(error.value)


@pytest.mark.parametrize("name", ["pp4", "pp4_x2", "ep2_pp2", "ep2_pp2_x2"])
def test_logits_that_are_no_numbers_end_generation_on_all_stages(
    four: RankProcesses, tmp_path: Path, name: str
) -> None:
    """Also where passes of other lanes have begun and have chunks before them. Nobody waits for a worker that fails."""
    layout = LAYOUTS[name]
    folder = tiny.save(tmp_path / "model", "qwen3_moe", num_hidden_layers=layers_of(layout))
    for rank, told in enumerate(four.run(meet_no_number, folder, layout)):
        request = (5, 0)[coordinates_of(layout, rank).dp]
        assert told == f"request {request}: the model's logits are NaN"
