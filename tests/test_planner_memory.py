"""Bytes of layouts that cut a model: against papers' formulas, by hand, and monotone in devices and recomputation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.spec import Generate, ModelRole
from realgraph.planner.costs.memory import memory
from realgraph.planner.costs.memory.memory import DType, Recompute, Running
from realgraph.planner.costs.memory.terms import PREFILL_TOKENS
from realgraph.planner.inputs.model_spec import LatentAttention, ModelSpec
from realgraph.planner.options.footprints import copy_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.request.engine_support import run_support
from realgraph.planner.request.request import at_staleness
from realgraph.runtime.engine import RolloutLimits
from tests.planner_cases import cluster, grpo, known, request

BF16 = ModelRole(trainable=True, dtype="bfloat16")
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-72B")
GPT3 = ModelSpec("llama", 12288, 96, 96, 96, 128, 49152, 51200, True, 2048, mlp_matrices=2)


def layout(dp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1) -> Layout:
    return Layout(DeviceMesh(0, dp * tp * pp * cp), dp=dp, tp=tp, pp=pp, ep=ep, cp=cp)


def even(model: ModelSpec, cut: Layout) -> Layout:
    """As many layers on every stage, so that the last, with the head besides, is the fullest of a single pass."""
    return replace(cut, stages=((model.layers // cut.pp,),) * cut.pp)


@pytest.mark.parametrize(("tp", "score_bytes"), [(1, 0), (8, 0), (8, 5)])
def test_activations_of_a_gpt_layer_are_near_the_papers_formula(tp: int, score_bytes: int) -> None:
    """arXiv:2205.05198, eq. 4: s b h (34 + 5 a s / h) / t bytes, of which dropout's masks are 2."""
    length, tokens = 2048, 2048
    plain = Running(score_bytes=score_bytes, sample_tokens=length, fused=True)
    two, one = (
        memory.train_activations(replace(GPT3, layers=n), BF16, layout(tp=tp), tokens, plain).activations
        for n in (12, 11)
    )
    formula = tokens * GPT3.hidden * (32 + score_bytes * GPT3.heads * length / GPT3.hidden) / tp
    assert two - one == pytest.approx(formula, rel=0.03)


def test_states_of_a_distributed_optimizer_by_hand() -> None:
    """Llama 3.1 70B on tp 8, pp 4, dp 4: 20 of 80 layers and the head; 6 bytes a parameter, and 12 over 4."""
    model = known("meta-llama/Llama-3.1-70B")
    params = (20 * 855_654_400 + 128256 * 8192 + 8192 // 4) // 8
    assert memory.local_params(model, BF16, layout(4, 8, 4)) == pytest.approx(params, rel=1e-6)
    states = memory.trained_copy(model, BF16, layout(4, 8, 4))
    expected = (2 * params, 4 * params, 3 * params)
    assert (states.weights, states.gradients, states.optimizer) == pytest.approx(expected, rel=1e-6)
    whole = memory.trained_copy(model, BF16, layout(4, 8, 4), memory.StateShare(distributed=False))
    assert whole.total == pytest.approx(18 * params, rel=1e-6)
    assert memory.frozen_copy(model, BF16, layout(4, 8, 4)).total == states.weights
    wide = memory.trained_copy(model, replace(BF16, dtype="float32"), layout(4, 8, 4))  # weights are the masters
    expected = (4 * params, 4 * params, 2 * params)
    assert (wide.weights, wide.gradients, wide.optimizer) == pytest.approx(expected, rel=1e-6)


def test_experts_are_cut_by_expert_parallelism_alone() -> None:
    model = known("Qwen/Qwen3-30B-A3B")
    routed = model.routed_params()
    rest = model.n_params() - routed
    cut = memory.local_params(model, BF16, layout(dp=8, ep=8))
    assert cut == pytest.approx(rest + routed / 8, rel=1e-6)
    assert memory.local_params(model, BF16, layout(dp=4, tp=2, ep=4)) == pytest.approx(rest / 2 + routed / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "ep"), [(32, 1, 8, 32), (8, 4, 8, 8), (8, 4, 8, 32), (4, 8, 8, 4), (32, 8, 1, 1)]
)
def test_a_distributed_optimizer_has_each_state_once(dp: int, tp: int, pp: int, ep: int) -> None:
    """Qwen3 235B-A22B, 12 bytes a parameter in all: no device can have less than its part of the experts' states."""
    model = known("Qwen/Qwen3-235B-A22B")
    states = memory.trained_copy(model, BF16, layout(dp, tp, pp, ep=ep))
    stages = -(-model.layers // pp) / model.layers
    even = 12 * model.routed_params() * stages / (dp * tp)
    rest = 12 * (model.n_params() - model.routed_params()) / (dp * tp)
    rest += (
        12 * model.layers * model.attention_copies(tp) / dp
    )  # of KV heads, which neighbours hold where tp is more than them
    assert even <= states.optimizer <= even + rest


@pytest.mark.parametrize(("kind", "staleness", "copies"), [("cpu", 0, 1), ("cpu", 2, 2), ("H100-SXM", 2, 1)])
def test_weights_of_a_stream_on_cpus_count_twice(kind: str, staleness: int, copies: int) -> None:
    """New ones come to memory beside those in use; elsewhere they overwrite them."""
    asked = at_staleness(request(grpo(), "Qwen/Qwen3-0.6B", cluster(kind, 2)), staleness)
    own = memory.frozen_copy(asked.model("rollout"), asked.role("rollout"), layout())
    held = copy_of(asked, "rollout", layout(), asked.cluster)
    assert (held.weights, held.total) == (copies * own.weights, copies * own.weights)


def test_experts_of_a_replica_lie_whole_where_its_engine_does_not_cut_them_further() -> None:
    """The embedded engine spreads them over ep devices alone, of which tp may have more."""
    asked = request(grpo(), "Qwen/Qwen3-30B-A3B")
    call = next(name for name, one in asked.graph.calls.items() if isinstance(one, Generate))
    wide = layout(dp=2, tp=4, ep=2)
    role, model, engine = asked.role(call), asked.model(call), asked.engine
    embedded, cutting = (
        copy_of(replace(asked, engine=replace(engine, cuts_served_experts=cuts)), call, wide, asked.cluster).weights
        for cuts in (run_support().cuts_served_experts, True)
    )
    assert embedded == memory.frozen_copy(model, role, wide).weights
    routed = 2 * model.routed_params()
    assert embedded - cutting == pytest.approx(routed / 2 - routed / 4, rel=1e-3)


def test_one_rank_of_fsdp_holds_what_a_whole_copy_does() -> None:
    model, alone = known("Qwen/Qwen3-8B"), layout()
    assert memory.trained_copy(model, BF16, replace(alone, sharding="fsdp")) == memory.trained_copy(model, BF16, alone)


def test_what_fsdp_gathers_by_hand() -> None:
    """Llama 3.1 8B: three times a layer's 218,112,000 parameters (in use, on its way, the buffer that it is copied out
    of), embedding and head; gradients of one layer and the ends."""
    model, ends = known("meta-llama/Llama-3.1-8B"), 2 * 128256 * 4096
    sharded = replace(layout(8), sharding="fsdp")
    trains = memory.gathered(model, BF16, sharded, Running())
    assert trains.weights == 2 * (3 * 218_112_000 + ends)
    assert trains.gradients == 4 * (218_112_000 + ends)
    assert memory.gathered(model, BF16, sharded, None).gradients == 0
    assert memory.gathered(model, BF16, layout(8), Running()).total == 0


def test_a_sharded_stage_that_trains_has_all_its_weights_and_their_gradients() -> None:
    """Llama 3.1 8B on two stages: one has half of the layers and an end of the model, whatever dp is."""
    model, ends = known("meta-llama/Llama-3.1-8B"), 128256 * 4096
    staged = even(model, replace(layout(8, pp=2), sharding="fsdp"))
    trains = memory.gathered(model, BF16, staged, Running())
    assert trains.weights == 2 * memory.local_params(model, BF16, staged) > 2 * (16 * 218_112_000 + ends)
    assert trains.gradients == 2 * trains.weights
    scores = memory.gathered(model, BF16, staged, None)
    assert scores == memory.gathered(model, BF16, replace(layout(8), sharding="fsdp"), None)


@pytest.mark.parametrize(("dp", "alone"), [(8, True), (16, False)])
def test_sharded_experts_that_lie_on_one_device_are_cast_and_not_gathered(dp: int, alone: bool) -> None:
    """Qwen3-30B-A3B: 16 of 128 experts on a device, 2,048 x 768 x 3 parameters each, in 48 layers."""
    model, expert = known("Qwen/Qwen3-30B-A3B"), 3 * 2048 * 768
    spread, whole = (replace(layout(dp, ep=ep), sharding="fsdp") for ep in (8, 1))
    held = memory.gathered(model, BF16, spread, Running())
    rest = memory.gathered(model, BF16, whole, Running()).weights - 2 * 3 * 128 * expert
    assert held.weights == rest + (48 if alone else 3) * 2 * 16 * expert
    again = memory.gathered(model, BF16, spread, Running("full"))
    assert again.weights == rest + (1 if alone else 3) * 2 * 16 * expert


def test_rescue_copies_are_two_of_weights_moments_and_masters() -> None:
    model = known("Qwen/Qwen3-0.6B")
    assert memory.rescue_copies(model, BF16, layout(2)).total == 2 * (2 + 4 + 4 + 4) * model.n_params()
    assert memory.rescue_copies(model, replace(BF16, dtype="float32"), layout(2)).total == 2 * 12 * model.n_params()
    sharded = memory.rescue_copies(model, BF16, replace(layout(2), sharding="fsdp")).total
    assert sharded == 2 * (2 + 4 + 4 + 4) * -(-model.n_params() // 2)


def test_logits_whole_or_in_chunks() -> None:
    model = known("meta-llama/Llama-3.1-8B")
    chunked = memory.train_activations(model, BF16, layout(), 16384)
    whole = memory.train_activations(model, BF16, layout(), 16384, Running(logit_bytes=16))
    assert chunked.logits == 16 * (1 << 24)
    assert whole.logits == 16 * 16384 * 128256
    assert whole.activations == chunked.activations
    critic = replace(BF16, head="value")
    assert memory.train_activations(model, critic, layout(), 16384).logits == 0


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", 10), ("float32", 8)])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 8, "pp": 4}])
def test_layouts_that_cut_a_model_hold_all_logits_of_a_micro_batch(
    axes: dict[str, int], dtype: DType, each: int
) -> None:
    """8,192 tokens of 128,256 logits over tp: as computed, in float32, and their softmax; chunks where asked for.

    Serving engines need logits of last tokens only."""
    model, role = known("meta-llama/Llama-3.1-8B"), replace(BF16, dtype=dtype)
    cut = even(model, layout(**axes))
    whole = each * 8192 * 128256 // cut.tp
    for rows in (
        memory.train_activations(model, role, cut, 8192, Running(microbatches=1)),
        memory.forward_activations(model, role, cut, 8192),
    ):
        assert rows.logits == whole
    chunks = memory.train_activations(model, role, cut, 8192, Running(logit_bytes=0, microbatches=1))
    assert chunks.logits == 16 * (1 << 24) // cut.tp
    assert memory.generation(model, role, cut, 8192).logits == chunks.logits


@pytest.mark.parametrize(("recompute", "layers"), [("none", 32), ("selective", 32), ("full", 1)])
def test_context_parallel_ranks_keep_the_keys_and_values_of_each_other(recompute: Recompute, layers: int) -> None:
    """2 x 8 heads x 128 numbers in bf16 of 3 others' tokens, in every layer or in the one that is computed again."""
    model, running = known("meta-llama/Llama-3.1-8B"), Running(recompute=recompute, fused=True, logit_bytes=0)
    alone, shared = (memory.train_activations(model, BF16, layout(cp=cp), 1024, running) for cp in (1, 4))
    assert shared.activations - alone.activations == 1024 * layers * 3 * 2 * 8 * 128 * 2


def test_a_prompt_enters_the_cache_as_its_seconds_are_counted() -> None:
    """Activations of a prefill pass grow up to the tokens of one pass, in which this project's engine takes fewer."""
    model = known("meta-llama/Llama-3.1-8B")
    held = [memory.generation(model, BF16, layout(), n * PREFILL_TOKENS).activations for n in (1, 2, 8)]
    assert (
        held[0] == held[1] == held[2] == memory.forward_activations(model, BF16, layout(), PREFILL_TOKENS).activations
    )
    assert RolloutLimits(max_running=1).prefill_tokens <= PREFILL_TOKENS


def test_the_first_stage_keeps_more_micro_batches_than_the_last() -> None:
    """pp 8, full recomputation: inputs of 12 layers of 8 micro-batches, one layer live."""
    running = Running(recompute="full", fused=True)
    stage = memory.train_activations(GPT3, BF16, layout(tp=8, pp=8), 2048, running)
    inputs = 12 * 8 * 2 * 12288 // 8
    live = 2 * memory.kept_bytes_per_token(GPT3, "bfloat16", fused=True) // 8
    ends = 16 * 12288 // 8
    assert stage.activations == pytest.approx(2048 * (inputs + live + ends), rel=1e-3)
    few = memory.train_activations(GPT3, BF16, layout(tp=8, pp=8), 2048, replace(running, microbatches=2))
    assert few.activations < stage.activations
    chunks = memory.train_activations(GPT3, BF16, layout(tp=8, pp=8), 2048, replace(running, chunks=3))
    assert chunks.activations > stage.activations
    away = memory.train_activations(GPT3, BF16, layout(tp=8, pp=8), 2048, replace(running, offloaded=True))
    assert away.activations == pytest.approx(2048 * (live + ends), rel=1e-3)


@given(
    st.sampled_from(MODELS),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((2048, 16384)),
)
def test_more_devices_never_hold_more_each(name: str, tp: int, pp: int, dp: int, tokens: int) -> None:
    model = known(name)
    here = layout(dp=dp, tp=tp, pp=pp)
    wider = [layout(2 * dp, tp, pp), layout(dp, 2 * tp, pp), layout(dp, tp, 2 * pp)]
    for more in wider:
        if memory.cuts_model(here) or not memory.cuts_model(more):
            assert memory.trained_copy(model, BF16, more).total <= memory.trained_copy(model, BF16, here).total
        assert memory.frozen_copy(model, BF16, more).total <= memory.frozen_copy(model, BF16, here).total
    cut = memory.train_activations(model, BF16, layout(dp, 2 * tp, pp), tokens)
    if memory.cuts_model(here):
        assert cut.total <= memory.train_activations(model, BF16, here, tokens).total
    assert memory.generation(model, BF16, layout(dp, 2 * tp), 1 << 18).total <= (
        memory.generation(model, BF16, layout(dp, tp), 1 << 18).total
    )


@given(st.sampled_from(MODELS), st.sampled_from((1, 8)), st.sampled_from((1, 4)), st.sampled_from((2048, 16384)))
def test_recomputation_saves_and_longer_micro_batches_cost(name: str, tp: int, pp: int, tokens: int) -> None:
    model = known(name)
    ways: tuple[Recompute, ...] = ("none", "selective", "full")

    def held(recompute: Recompute, tokens: int) -> int:
        return memory.train_activations(
            model, BF16, even(model, layout(tp=tp, pp=pp)), tokens, Running(recompute)
        ).total

    none, selective, full = (held(way, tokens) for way in ways)
    assert full < selective < none
    assert all(held(way, 2 * tokens) > held(way, tokens) for way in ways)
    light = replace(BF16, gradient_checkpointing=True)
    assert memory.train_activations(model, light, even(model, layout(tp=tp, pp=pp)), tokens).total == full


def test_latent_attention_caches_one_latent_a_token() -> None:
    """DeepSeek-V3 (arXiv:2412.19437): 671 billion parameters, 37 of them active; 576 elements a token and layer."""
    model = ModelSpec(
        "llama", 7168, 61, 128, 128, 128, 18432, 129280, False, 163840,
        experts=256, experts_per_token=8, expert_intermediate=2048, expert_layers=58, shared_intermediate=2048,
        latent=LatentAttention(1536, 512, 64, 128),
    )  # fmt: skip
    assert model.n_params() == pytest.approx(671e9, rel=0.001)
    assert model.active_params() + model.vocab * model.hidden == pytest.approx(37e9, rel=0.02)
    assert memory.kv_bytes_per_token(model, 2) == 61 * 576 * 2
    wide = memory.generation(model, BF16, layout(tp=8), 4096).kv_cache
    assert wide == 61 * 576 * 2 * (4096 + 16)  # every tp rank keeps the whole latent, and a page for padding


def test_what_a_plan_may_fill_leaves_room_for_the_runtime_and_on_a_cpu_for_all_else_that_runs() -> None:
    gpu = cluster("H100-SXM", 8)
    assert memory.usable_bytes(gpu) == 85_500_000_000 - 1_500_000_000
    cpu = replace(gpu, kind="cpu", memory_bytes=10**10)
    assert memory.usable_bytes(cpu) == round(0.94 * 1e10) - 600_000_000
    assert memory.usable_bytes(replace(gpu, memory_bytes=1)) == 0
    more = replace(gpu, memory_bytes=2 * gpu.memory_bytes)
    assert memory.usable_bytes(more) > memory.usable_bytes(gpu)


def test_each_axis_beyond_the_first_has_a_communicator_of_its_own() -> None:
    """NCCL's buffers: 24 channels, two neighbours, 4 MiB, 4.7 MiB and 0.5 MiB."""
    each = memory.communicators(layout(dp=2, tp=2)).total
    assert each == pytest.approx(24 * 2 * (4 + 4.6875 + 0.5) * 2**20, rel=2e-3)
    assert [memory.communicators(one).total for one in (layout(), layout(dp=8), layout(dp=2, tp=2, pp=2, cp=2))] == [
        0,
        0,
        3 * each,
    ]


def test_experts_outputs_are_weighted_in_float32() -> None:
    """Qwen3 30B-A3B: 8 experts a token give 2048 numbers each, with two float32 copies; where spread, tp cuts them."""
    model, tokens = known("Qwen/Qwen3-30B-A3B"), 4096
    for cut in (layout(), layout(tp=4), layout(tp=4, ep=4)):
        without, default = (
            memory.train_activations(model, BF16, cut, tokens, running) for running in (Running(combined=0), Running())
        )
        shares = cut.tp if cut.ep > 1 else 1
        assert default.total - without.total == 2 * 4 * 8 * 2048 * tokens // shares


def test_a_footprint_names_its_largest_term() -> None:
    both = memory.Footprint(weights=3, logits=2) + memory.Footprint(buckets=4, kv_cache=1)
    assert (both.total, both.worst) == (10, "buckets")
