"""Recomputation of a decoder layer's activations in the backward pass, as a plan chooses it. Worker side."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from realgraph.planner.plan.layout import Recompute

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_ATEN = torch.ops.aten
_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default})  # of weights: attention without a kernel uses bmm
_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._flash_attention_forward.default,
        _ATEN._efficient_attention_forward.default,
    }
)


@contextmanager
def recomputing(network: Any, how: Recompute) -> Iterator[None]:
    """Inside, the layers of a transformers network in evaluation mode keep all activations for the backward pass
    (`none`), their inputs alone (`full`), or also what matrix products and fused attention kernels return (`selective`:
    norms, rotations and activation functions are computed again; arXiv:2205.05198, sec. 5)."""
    if how == "none":
        yield
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = selective(products(next(iter(network.model.layers))))
    network.activation_checkpointing_enable(options)
    network.disable_input_require_grads()  # hooks for reentrant checkpoints, which would stay behind
    network.train()  # transformers recomputes in training mode only; it changes nothing else here
    network.recomputed = how
    try:
        yield
    finally:
        network.recomputed = "none"
        network.eval()
        network.activation_checkpointing_disable()


def products(layer: nn.Module) -> int:
    """Matrix products of a decoder layer's forward pass."""
    return sum(isinstance(module, nn.Linear) for module in layer.modules())


def selective(n_products: int) -> Callable[[], Contexts]:
    """The contexts of one layer's forward pass and of its repetition. The last product's output is not kept: it only
    enters the residual sum, whose backward reads nothing."""

    def contexts() -> Contexts:
        seen = 0

        def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal seen
            seen += operation in _PRODUCTS
            kept = operation in _ATTENTION or (operation in _PRODUCTS and seen != n_products)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        pair: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return pair

    return contexts
