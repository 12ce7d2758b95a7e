"""The fork server of a test process: whatever a test starts beside itself is forked from it, heavy modules loaded.

multiprocessing has one such server in a process, with the modules that were named when it started. So all tests name
the same ones, here: ranks, runs, and what the runs fork themselves.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

_KINDS = ("qwen3", "llama", "gemma2", "qwen2", "gemma3", "mistral", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
_NETWORKS = tuple(f"transformers.models.{kind}.modeling_{kind}" for kind in _KINDS)
PRELOAD = (
    "tests.uncollected",
    "torch",
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "setproctitle",
    "xxhash",
    "realgraph.runtime.worker.worker",
    "realgraph.runtime.train.engine",
    "realgraph.__main__",
    "realgraph.commands.run",
    "tests.tiny",
    "tests.runs",
    *_NETWORKS,
    "tests.warmed",
)

CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(PRELOAD))
