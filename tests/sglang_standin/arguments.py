"""The stand-in's command line. Needs no torch."""

import argparse


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Arguments of SGLang that mean something here; others are refused, as SGLang refuses what it does not know."""
    parser = argparse.ArgumentParser("sglang.launch_server")
    for name, default in (("model-path", None), ("host", "127.0.0.1"), ("weight-version", "default")):
        parser.add_argument(f"--{name}", default=default, required=default is None)
    for name in ("device", "attention-backend", "api-key", "admin-api-key", "kv-cache-dtype", "log-level"):
        parser.add_argument(f"--{name}", default=None)
    parser.add_argument("--dtype", default="float32")
    for name, number in (
        ("port", 30000),
        ("max-running-requests", 64),
        ("max-queued-requests", 1 << 30),
        ("tp-size", 1),
        ("ep-size", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=number)
    for name in ("context-length", "random-seed", "max-total-tokens"):
        parser.add_argument(f"--{name}", type=int, default=None)
    parser.add_argument("--mem-fraction-static", type=float, default=None)
    for name in ("nccl-port", "base-gpu-id"):
        parser.add_argument(f"--{name}", type=int, default=None)
    for name in ("sleep-on-idle", "incremental-streaming-output", "skip-tokenizer-init"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(arguments)
