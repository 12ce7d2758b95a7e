"""Bytes of weights, gradients, masters and moments on every worker, counted, are those of the planner."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from realgraph.graphs.errors import Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.memory.memory import Running, gathered, rescue_copies, trained_copy
from realgraph.planner.inputs.model_spec import ModelSpec, spec_from_config
from realgraph.planner.plan.axes import coordinates_of
from realgraph.planner.plan.layout import Layout
from realgraph.runtime.engine import RELEASED, TrainSettings
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from tests import tiny
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import OPTIMIZER, Case, call_of, minibatches, ranks_of
from tests.ranks import RankProcesses

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320}
MODELS = {
    "qwen3": WIDE,
    "qwen3_moe": {**WIDE, "num_experts": 8, "moe_intermediate_size": 64},
    "deepseek_v3": {
        **{**WIDE, "head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 64, "q_lora_rank": 24},
        **{"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
    "gpt_oss": {**WIDE, "num_local_experts": 8, "intermediate_size": 192},
}
EVERY = {name: layout for name, layout in LAYOUTS.items() if name != "tp2 apart"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms, which every rank of tp holds whole and the planner divides, are few beside the rest, as in real models."""
    folder = tmp_path_factory.mktemp("wide")
    for kind, shape in MODELS.items():
        tiny.save(folder / kind, kind, **shape)
    return folder


def opened(here: LayoutRanks, case: Case, models: Path) -> TorchTrainEngine:
    """A trained copy."""
    settings = TrainSettings(max_tokens_per_microbatch=40, optimizer=OPTIMIZER, total_steps=8, skip_idle=False)
    role = ModelRole(trainable=True, dtype=case.dtype)
    return open_engine(role, str(models / case.model), case.layout, here, settings)


def train_once(engine: TorchTrainEngine, case: Case) -> None:
    """Two optimizer steps on this rank's share of the mini-batches."""
    engine.train(call_of(case), [batch.select([engine.ranks.dp.rank]) for batch in minibatches(case.dtype, 0)])


def counted(ranks: LayoutRanks, case: Case, models: Path) -> dict[str, int] | None:
    """Bytes on one worker, after a step; of gradients the most there are at a time, and what is left of them."""
    here = ranks_of(case, ranks)
    if here is None:
        return None
    engine = opened(here, case, models)
    masters, adam = engine.masters, engine.adam
    assert masters is not None and adam is not None
    fresh, collect = [0], masters.collect

    def watched() -> None:
        grads = [parameter.grad for parameter in masters.parameters if parameter.grad is not None]
        local = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]
        flat = masters.flat.untyped_storage().data_ptr()
        fresh.append(sum(grad.nbytes for grad in local if grad.untyped_storage().data_ptr() != flat))
        collect()

    masters.collect = watched  # type: ignore[method-assign]
    train_once(engine, case)
    separate = masters.tensors if masters.separate else []
    return {
        "weights": sum(part.values.nbytes for part in engine.contents.weights.values()),
        "gradients": masters.flat.nbytes + max(fresh),
        "optimizer": sum(tensor.nbytes for tensor in [*separate, *adam.moments()]),
        "left": masters.flat.untyped_storage().nbytes() + sum(p.grad is not None for p in masters.parameters),
        "kept": sum(part.values.nbytes for _, part in engine.snapshot().parts),
    }


def spec_of(kind: str) -> ModelSpec:
    """The planner's view of one of `MODELS`."""
    return spec_from_config(tiny.config(kind, **MODELS[kind]).to_dict(), Where())


def kind_of(name: str) -> str:
    return "qwen3" if EVERY[name].ep == 1 else "qwen3_moe"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        *((name, kind_of(name), "bfloat16") for name in EVERY),
        *((name, kind_of(name), "float32") for name in [*EVERY][::5]),
        *(
            (name, kind, "bfloat16")
            for name in ("tp4", "fsdp2 tp2", "ep4 tp2", "ep2 fsdp2 pp2", "tp2 pp2")
            for kind in ("gpt_oss", "deepseek_v3")
        ),
    ],
)
def test_counted_bytes_are_the_planners(four: RankProcesses, wide: Path, name: str, kind: str, dtype: Any) -> None:
    layout = EVERY[name]
    found = [one for one in four.run(counted, Case(kind, "sft", dtype, layout), wide) if one is not None]
    assert len(found) == layout.mesh.n_devices
    model, role = spec_of(kind), ModelRole(trainable=True, dtype=dtype)
    for worker, on_worker in enumerate(found):
        stage = coordinates_of(layout, layout.mesh.first + worker).pp
        assert on_worker == pytest.approx(terms(model, role, layout, stage), rel=0.02), worker
    fullest = {term: max(on_worker[term] for on_worker in found) for term in found[0]}
    assert fullest == pytest.approx(terms(model, role, layout, None), rel=0.02)


def terms(model: ModelSpec, role: ModelRole, layout: Layout, stage: int | None) -> dict[str, int]:
    """The planner's bytes on a device of a pipeline stage, or of the fullest one."""
    states = trained_copy(model, role, layout, stage=stage)
    expected = {term: getattr(states, term) for term in ("weights", "gradients", "optimizer")}
    expected["kept"] = rescue_copies(model, role, layout, stage).total // 2
    return expected | {"left": 0}  # between two train calls


def gathered_bytes(ranks: LayoutRanks, case: Case, models: Path) -> dict[str, int] | None:
    """Bytes on one worker behind its last backward pass, before gradients are reduced: weights that are gathered, and
    whole gradients; and the casts of experts' weights that one micro-batch keeps."""
    here = ranks_of(case, ranks)
    if here is None:
        return None
    engine = opened(here, case, models)
    masters, most = engine.masters, {"weights": 0, "gradients": 0}
    assert masters is not None
    collect, network = masters.collect, engine.model
    alone = [p for p in network.parameters() if not isinstance(p, DTensor)]
    casts = 2 * sum(p.numel() for p in alone) if case.dtype == "bfloat16" else 0

    def watched() -> None:
        states = [fully_shard.state(m) for m in network.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]
        every = [one for state in states for group in state._fsdp_param_groups for one in group.fsdp_params]
        whole = [one for one in every if hasattr(one, "_unsharded_param")]
        weights = [one._unsharded_param for one in whole]
        there = sum(w.nbytes for w in weights if w.untyped_storage().nbytes())
        sums = [
            w.grad if (kept := one.unsharded_accumulated_grad) is None else kept
            for w, one in zip(weights, whole, strict=True)
        ]
        most["weights"] = max(most["weights"], there)
        most["gradients"] = max(most["gradients"], sum(g.nbytes for g in sums if g is not None))
        collect()

    masters.collect = watched  # type: ignore[method-assign]
    train_once(engine, case)
    return {**most, "casts": casts}


@pytest.mark.parametrize("name", ["fsdp2 pp2", "fsdp2 pp2 twice", "fsdp cp2 pp2", "ep2 fsdp2 pp2"])
def test_sharded_stages_hold_the_whole_weights_and_gradients_that_plans_count(
    four: RankProcesses, wide: Path, name: str
) -> None:
    layout = EVERY[name]
    kind = kind_of(name)
    found = [one for one in four.run(gathered_bytes, Case(kind, "sft", "bfloat16", layout), wide) if one is not None]
    model, role = spec_of(kind), ModelRole(trainable=True, dtype="bfloat16")
    expected = gathered(model, role, layout, Running(microbatches=1))
    weights = max(one["weights"] + one["casts"] for one in found)
    assert weights == pytest.approx(expected.weights, rel=0.02)
    assert max(one["gradients"] for one in found) == pytest.approx(expected.gradients, rel=0.02)


def given_up(ranks: LayoutRanks, case: Case, models: Path) -> tuple[list[int], bool] | None:
    """Bytes of a copy's weights on one worker before it is given up, then, and when it is back; and whether it is the
    same then, and computes the same."""
    here = ranks_of(case, ranks)
    if here is None:
        return None
    role = ModelRole(dtype=case.dtype)
    engine = open_engine(role, str(models / case.model), case.layout, here, TrainSettings(skip_idle=False))
    batch = minibatches(case.dtype, 0)[0].select([here.dp.rank])

    def held() -> int:
        storages = {id(one): one for one in (tensor.untyped_storage() for tensor in engine.state_tensors())}
        return sum(storage.nbytes() for storage in storages.values())

    with engine.local_parts() as parts:
        copied = [part._replace(values=part.values.clone()) for part in parts.values() if part.box.numel]
    logprobs, nbytes = engine.inference(batch, "logprobs", 1.0), [held()]
    engine.release()
    engine.release()  # two calls may share a copy
    nbytes.append(held())
    assert engine.version == RELEASED
    engine.load_weights(iter(copied), 7)
    nbytes.append(held())
    with engine.local_parts() as parts:
        same = all(torch.equal(parts[part.name].values, part.values) for part in copied)
    return nbytes, same and engine.version == 7 and torch.equal(engine.inference(batch, "logprobs", 1.0), logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp4", "fsdp2", "tp4", "fsdp2 pp2 twice", "fsdp cp2 tp2", "ep4 tp2", "ep2 fsdp2 pp2"])
def test_a_copy_that_is_given_up_leaves_no_byte_and_comes_back_whole(
    four: RankProcesses, wide: Path, name: str
) -> None:
    layout = EVERY[name]
    kind = kind_of(name)
    found = [one for one in four.run(given_up, Case(kind, "sft", "bfloat16", layout), wide) if one is not None]
    assert len(found) == layout.mesh.n_devices
    for (before, without, after), same in found:
        assert before == after > without == 0
        assert same
