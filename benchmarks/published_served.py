"""The room for caches in the engines of TensorRT-LLM's benchmark: what they are built for is published, and takes room.

An engine holds buffers for the most sequences that it is built for, whether they come or not: of a model with a large
vocabulary more than its weights on eight devices. trtllm-bench of version 0.14 takes these numbers from a table.
"""

from benchmarks.published import Row
from realgraph.planner.costs.memory.terms import COMMUNICATOR_BYTES, usable_bytes
from realgraph.planner.costs.setting import Setting

# Most sequences that an engine is built for, by model and tp (tensorrt_llm/bench/build/benchmark_config.yml,
# NVIDIA/TensorRT-LLM@8fcf9fc; Llama 3.1 as Llama 3, whose speeds on the same page are the same; eight devices of
# Mixtral, which the table has not, as four). By whole length in tokens where the table has one of its own.
MOST_SEQUENCES: dict[tuple[str, int], int] = {
    ("LLaMA v3.1 8B", 1): 2048,
    ("LLaMA v3.1 70B", 2): 256,
    ("LLaMA v3.1 70B", 4): 2048,
    ("LLaMA v3.1 70B", 8): 8192,
    ("Mixtral 8x7B", 2): 2048,
    ("Mixtral 8x7B", 4): 8192,
    ("Mixtral 8x7B", 8): 8192,
}
MOST_SEQUENCES_OF_LENGTH: dict[tuple[str, int, int], int] = {("LLaMA v3.1 70B", 2, 4096): 2048}
DEFAULT_SEQUENCES = 2048  # of an engine built without the table (`BuildConfig.max_batch_size` of that version)
CACHE_SHARE = 0.99  # of what is left (its docs, performance/perf-overview.md)
# Of each number of a row of logits for each of these sequences: an engine for 2,048 sequences over 151,936 tokens
# allocates 773 MiB of execution context, 2.66 GiB of runtime buffers and 5.76 GiB of decoder, of a model so small that
# its activations hardly count (NVIDIA/TensorRT-LLM, issue 1188): logits in 16 and 32 bits, and the sampler's copies.
LOGIT_BYTES = (773 * 2**20 + (2.66 + 5.76) * 2**30) / (2048 * 151_936)
TABLE_BYTES = 2  # of an embedding's number, and of the head's: in 16 bits, whatever the layers have


def most_sequences(row: Row, tokens: int) -> int:
    """The most sequences that the row's engine is built for; tokens: the whole length of one."""
    model, tp = row.model, row.count("tp", 1) or 1
    known = MOST_SEQUENCES.get((model, tp), DEFAULT_SEQUENCES)
    return MOST_SEQUENCES_OF_LENGTH.get((model, tp, tokens), known)


def cache_room(setting: Setting, sequences: int) -> float:
    """Bytes of one device that are left for caches in an engine built for so many sequences.

    Every rank holds the whole embedding (`use_parallel_embedding`, off by default), and its part of the head.
    """
    model, layout = setting.model, setting.layout
    cut, table = layout.tp * layout.pp, model.vocab * model.hidden
    layers = (setting.engine.weight_bytes or setting.element) * (model.n_params() - 2 * table) / cut
    tables = TABLE_BYTES * table * (1 + 1 / layout.tp)
    groups = COMMUNICATOR_BYTES if layout.tp > 1 else 0
    buffers = LOGIT_BYTES * sequences * model.vocab
    return CACHE_SHARE * (usable_bytes(setting.cluster) - groups - layers - tables - buffers)
