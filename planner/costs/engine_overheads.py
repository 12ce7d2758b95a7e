"""Seconds that the engines and the runtime of one system take besides arithmetic, memory and links. Pure data.

A system has one `EngineOverheads`: this project's are beside its `EngineSupport`, those of other systems are data of
`benchmarks/published_overheads.yaml`. What a machine's own table of measured factors holds already is left out of them.
"""

from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from realgraph.planner.costs.overhead import elementwise_share, pass_layer_seconds
from realgraph.planner.inputs.devices import EfficiencyFactors

Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class EngineOverheads(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """Overheads of one system in seconds, per what each name says; 0 is none.

    Units other than seconds stand at the end of a field's name.
    """

    # host work of a decode step: what is done between two passes of the model on the device, and of each sequence in it
    decode_step_seconds: Seconds = 0.0
    decode_sequence_seconds: Seconds = 0.0
    decode_layer_seconds: Seconds = 0.0  # of each layer in it: kernels too small to hide their launches
    decode_nodes_seconds: Seconds = 0.0  # of a step, where the ranks of one replica lie on several nodes
    # of an engine that goes on after other calls had its devices: caches and captured graphs are made again; and of
    # each of the model's layers
    wake_seconds: Seconds = 0.0
    wake_layer_seconds: Seconds = 0.0
    interrupt_seconds: Seconds = 0.0  # of sequences in flight at new weights, besides the move and their new prefill
    # of a move of trained weights to a generate call, and of each weight tensor in it
    sync_seconds: Seconds = 0.0
    sync_tensor_seconds: Seconds = 0.0
    # the most that one device takes in; 0: what links and host memory carry
    sync_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    sync_whole: bool = False  # every device takes in the whole model, and cuts its part out of it
    microbatch_seconds: Seconds = 0.0  # of each micro-batch of training and inference
    pass_layer_seconds: Seconds = 0.0  # of each layer in its forward pass
    # bytes that element-wise operations move, over those of fused kernels: a number, no seconds
    elementwise: Annotated[float, Meta(ge=1, le=100)] = 1.0
    call_seconds: Seconds = 0.0  # of each call on a mesh: command, gathering, reply
    call_device_seconds: Seconds = 0.0  # of each call, for each device of its mesh: the controller's events
    sample_seconds: Seconds = 0.0  # of each sample of a call on a device: gathered, packed, stored
    admission_seconds: Seconds = 0.0  # of each sample that generation takes in and gives out
    # of each token of a batch padded to its longest allowed sample, which passes through one process for each call that
    # reads what others wrote
    padded_token_seconds: Seconds = 0.0
    function_seconds: Seconds | None = None  # of a sample in a function; None: `options.calls.FUNCTION_SECONDS`
    function_workers: Annotated[int, Meta(ge=0)] = 0  # processes that run functions side by side; 0: one a device
    step_seconds: Seconds = 0.0  # of the controller at the end of each step: metrics, records, the next prompts


NO_OVERHEADS = EngineOverheads()


def beside_factors(overheads: EngineOverheads) -> EngineOverheads:
    """The part that is left beside factors that were measured with the engines themselves, which hold the rest."""
    return replace(
        overheads,
        decode_step_seconds=0.0,
        decode_sequence_seconds=0.0,
        decode_layer_seconds=0.0,
        microbatch_seconds=0.0,
        pass_layer_seconds=0.0,
        elementwise=1.0,
        call_seconds=0.0,
        sample_seconds=0.0,
        admission_seconds=0.0,
        function_seconds=None,
    )


@lru_cache(maxsize=256)
def with_overheads(costs: EfficiencyFactors, overheads: EngineOverheads, apart: bool) -> EfficiencyFactors:
    """The factors with the engine's overheads beside the device's own. apart: the ranks of a replica lie on several
    nodes."""
    return replace(
        costs,
        layer_seconds=costs.layer_seconds + overheads.decode_layer_seconds,
        pass_layer_seconds=pass_layer_seconds(costs) + overheads.pass_layer_seconds,
        elementwise=elementwise_share(costs) / overheads.elementwise,
        step_seconds=costs.step_seconds + overheads.decode_step_seconds + apart * overheads.decode_nodes_seconds,
        sequence_seconds=costs.sequence_seconds + overheads.decode_sequence_seconds,
        microbatch_seconds=costs.microbatch_seconds + overheads.microbatch_seconds,
        call_seconds=costs.call_seconds + overheads.call_seconds,
        sample_seconds=costs.sample_seconds + overheads.sample_seconds,
        admission_seconds=costs.admission_seconds + overheads.admission_seconds,
    )
