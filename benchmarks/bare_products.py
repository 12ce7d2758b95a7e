"""The bare matrix products of a training step in float32: a time below which no trainer of these cores can come.

Forward, gradient of the input and gradient of the weight of every linear layer, one after the other on one thread, in
CPU time. Attention's scores, norms, the optimizer and everything between processes are left out.
"""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REPETITIONS = 8


def seconds_a_token(model: Path, rows: int, processes: int = 1) -> tuple[float, float]:
    """CPU seconds of one token through all layers, and of one through the head, where each product has as many rows;
    the mean of so many processes, which measure at once. model: a folder with a config.json of a dense decoder."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = list(pool.map(_measure, [config] * processes, [rows] * processes))
    layers, heads = zip(*found, strict=True)
    return sum(layers) / processes, sum(heads) / processes


def _measure(config: Mapping[str, Any], rows: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    layer = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    layer += [(hidden, inner), (hidden, inner), (inner, hidden)]
    seconds = {shape: _seconds_of(*shape, rows) / rows for shape in {*layer, (hidden, config["vocab_size"])}}
    return config["num_hidden_layers"] * sum(seconds[shape] for shape in layer), seconds[hidden, config["vocab_size"]]


def _seconds_of(n_in: int, n_out: int, rows: int) -> float:
    """The least CPU seconds of the three products of one layer."""
    x, weight, grad = torch.randn(rows, n_in), torch.randn(n_out, n_in), torch.randn(rows, n_out)
    out, d_x, d_weight = torch.empty(rows, n_out), torch.empty(rows, n_in), torch.empty(n_out, n_in)

    def products() -> None:
        _into(out, x, weight.t())
        _into(d_x, grad, weight)
        _into(d_weight, grad.t(), x)

    products()
    seconds = []
    for _ in range(REPETITIONS):
        begun = time.thread_time()
        products()
        seconds.append(time.thread_time() - begun)
    return min(seconds)


def _into(out: Tensor, left: Tensor, right: Tensor) -> None:
    torch.mm(left, right, out=out)
