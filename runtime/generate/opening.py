"""Opens the embedded generation engine over weights of its own, or over those of an engine beside it. Worker side."""

from collections.abc import Callable

from torch import nn

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.engine import Decode, OwnWeights, RolloutLimits, SharedWeights, WeightSource
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.generate.session import ReplicaSession
from realgraph.runtime.models.models import Start, build, network_over
from realgraph.runtime.parallel.experts.block import join_experts
from realgraph.runtime.parallel.groups import LayoutRanks
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
    together = ranks is not None and ranks.tp.size > 1

    def cut_up(network: nn.Module) -> None:
        if ranks is not None and together:
            cut_network(network, role.head, ranks.tp, ranks.ep)
            join_experts(network, ranks.ep)

    match weights:
        case OwnWeights(path=path, device=device, offloaded=offloaded):
            start = Start(device, shard=lambda model: cut_up(model.network))
            model = build(role, path, start).requires_grad_(False)
            batch = ContinuousBatch(model.network, limits, decode=decode, source=model.source)
            if offloaded:
                batch.offload()
        case SharedWeights(folder=folder, tensors=tensors):
            network = network_over(role, folder, tensors, cut_up)
            batch = ContinuousBatch(network, limits, decode=decode, source=folder)
    return TorchRolloutEngine(batch, notify, ReplicaSession(ranks.session) if ranks is not None and together else None)
