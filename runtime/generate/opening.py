"""Opens the embedded generation engine over weights of its own, or over those of an engine beside it. Worker side."""

from collections.abc import Callable

from torch import nn

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.engine import Decode, OwnWeights, RolloutLimits, SharedWeights, WeightSource
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.generate.session import GenerationSession
from realgraph.runtime.models.building import Start, build, network_over
from realgraph.runtime.models.weights import whole_shapes
from realgraph.runtime.parallel.experts.block import join_experts
from realgraph.runtime.parallel.experts.passes import share_passes
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.stage import cut_stages, layer_stages
from realgraph.runtime.parallel.tensor.network import cut_network


def open_rollout(
    role: ModelRole,
    weights: WeightSource,
    limits: RolloutLimits,
    decode: Decode,
    notify: Callable[[], None],
    ranks: LayoutRanks | None = None,
) -> TorchRolloutEngine:
    """notify: called whenever the engine has something to take. ranks: of the call's layout; default: one worker alone.

    Raises ConfigError for files that it can't take, ValueError for attention other than causal, full or sliding."""
    session = (
        GenerationSession(ranks, own_stream=limits.own_stream) if ranks is not None and ranks.session.size > 1 else None
    )

    def cut_up(network: nn.Module) -> None:
        shapes = whole_shapes(network)
        if ranks is not None and (ranks.tp.size > 1 or ranks.ep.size > 1):
            cut_network(network, role.head, ranks.tp, ranks.ep)
            join_experts(network, ranks.ep)
        if ranks is not None and ranks.pp.size > 1:
            cut_stages(network, layer_stages(network.config, role.head, ranks.layout), ranks.pp, shapes)
        if ranks is not None and session is not None and session.n_heads > 1:
            # those of each stage apart, where its experts are spread over all that generate together
            alone = ranks.ep.size == ranks.tp.size * session.n_heads
            share_passes(network, ranks.ep if alone else ranks.session, of_all_stages=not alone)

    match weights:
        case OwnWeights(path=path, device=device, offloaded=offloaded, beside=beside):
            start = Start(device, shard=lambda model: cut_up(model.network))
            model = build(role, path, start).requires_grad_(False)
            batch = ContinuousBatch(
                model.network, limits, decode=decode, source=model.source, keeps_routes=role.routing_replay
            )
            batch.weights.beside = beside
            if offloaded:
                batch.weights.offload()
        case SharedWeights(folder=folder, tensors=tensors):
            network = network_over(role, folder, tensors, cut_up)
            batch = ContinuousBatch(network, limits, decode=decode, source=folder, keeps_routes=role.routing_replay)
    return TorchRolloutEngine(batch, notify, session)
