"""Recomputation in the backward pass: the same training, fewer operations kept or repeated."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from realgraph.planner.plan.layout import Recompute
from realgraph.runtime.engine import TrainOptions
from realgraph.runtime.models.models import Wants
from realgraph.runtime.train.recompute import products, recomputing
from tests import tiny
from tests.engines import call, close, engine, folder, weights_of

__all__ = ["folder"]


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_recomputation_changes_nothing_and_generators_keep_their_cache(
    kind: str, how: Recompute, tmp_path: Path
) -> None:
    folder = tiny.save(tmp_path / kind, kind)
    plain, saving = engine(folder, {"dtype": "float64"}), engine(folder, {"dtype": "float64"})
    batch = tiny.batch(tiny.lengths(6, 30, 0))
    a, b = plain.train(call(), [batch]), saving.train(call(), [batch], TrainOptions(how))
    for name in ("loss", "grad_norm"):
        assert a[name].value == pytest.approx(b[name].value, rel=1e-10)
    assert close(weights_of(plain), weights_of(saving), 1e-10)
    assert not saving.model.network.training  # transformers drops the cache of a checkpointing module in training mode
    assert not saving.model.network.is_activation_checkpointing


class Products(TorchDispatchMode):
    """Counts the products with weights, and the attention kernels' forward passes, that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.attention = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.matrix += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.attention += func == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_repeats_no_product_and_no_attention_and_full_does(folder: Path) -> None:
    one = engine(folder)
    network = one.model.network
    network.config.hidden_act = "gelu"  # so that the CPU's own walk does not stand for the layers
    layers, before, found = network.config.num_hidden_layers, 0, {}
    hows: tuple[Recompute, ...] = ("none", "selective", "full")
    for how in hows:
        with recomputing(network, how), Products() as counted:
            outputs = one.model.run(tiny.batch([9, 12]), Wants("logprobs", 1.0))
            assert outputs.logprobs is not None
            before = counted.attention
            outputs.logprobs.sum().backward()
            found[how] = (counted.matrix, counted.attention - before)
            assert before > 0
    assert found["selective"] == found["none"]
    assert found["none"][1] == 0
    assert found["full"][1] == before
    needed = products(network.model.layers[0]) - 1  # the last one's output only enters a sum
    assert found["full"][0] - found["none"][0] == layers * needed
