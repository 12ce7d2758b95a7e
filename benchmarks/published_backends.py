"""Other software whose speeds were published, as `Backend`s: for comparison, a plan never uses them."""

from msgspec.structs import replace

from realgraph.planner.costs.backend import FSDP, Backend

# FSDP of PyTorch 1.13 and 2.0: weights are views into flat buffers and not copied out; a rate limiter holds back the
# gathers of later layers (arXiv:2304.11277, sec. 3.4). How much of the traffic shows was set with the speeds
# of llm-foundry in view: small micro-batches without recomputation against large ones with it.
FSDP_2023 = replace(FSDP, compute=1.0, exposed=0.75)
# DeepSpeed's ZeRO-3 under modules of Hugging Face's transformers, eager: the norms of LLaMA in float32 take eight
# kernels, rotary embeddings nine; counted operation by operation they move 135 bytes an element of hidden width and 10
# of the MLP's, fused kernels 28 and 8.
ZERO3 = replace(FSDP_2023, name="zero3", elementwise=3.2)
# DeepSpeed-Chat (arXiv:2308.01320; DeepSpeedExamples, dschat/utils/ds_utils.py): attention in separate operations, its
# softmax in float32 (28 bytes a score); at most 3e7 parameters prefetched or live, less than a layer, so that no gather
# runs ahead of compute. Its hybrid engine gathers weights once a batch and generates the batch to its longest sample.
DEEPSPEED_CHAT = replace(ZERO3, name="deepspeed-chat", attention="unfused", score_bytes=28, dp_overlap=0.0, exposed=1.0)
# 2021 and 2022: attention by batched products and a fused softmax; no overlap of gradients; whole residuals on tp.
MEGATRON_2022 = Backend(
    "megatron-2022",
    attention="unfused",
    dp_overlap=0.0,
    p2p_overlap=0.0,
    gradient_bytes=2,
    sequence_parallel=False,
    step_seconds=0.1,
    logit_bytes=48,
)
# The training of BLOOM (bigscience, train/tr11-176B-ml): kernels launched one by one (CUDA_LAUNCH_BLOCKING=1, against
# hangs: about a hundred a layer at 15 us), and gradients all-reduced.
DEEPSPEED_2022 = replace(MEGATRON_2022, name="deepspeed-2022", reduces_all=True, layer_seconds=1.5e-3)


def in_eight_bits(engine: Backend, speedup: float, cache_bytes: int | None = None) -> Backend:
    """The engine with layers' products in 8 bits, so much faster, weights of one byte and such a cache."""
    return replace(engine, product_speedup=speedup, weight_bytes=1, cache_bytes=cache_bytes)
