"""Opens the embedded generation engine over weights of its own, or over those of an engine beside it. Worker side."""

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.engine import Decode, OwnWeights, RolloutLimits, SharedWeights, WeightSource
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.models.models import Start, build, network_over


def open_rollout(role: ModelRole, weights: WeightSource, limits: RolloutLimits, decode: Decode) -> TorchRolloutEngine:
    """Raises ConfigError for files that it can't take, ValueError for attention other than causal, full or sliding."""
    match weights:
        case OwnWeights(path=path, device=device):
            model = build(role, path, Start(device)).requires_grad_(False)
            return TorchRolloutEngine(model.network, limits, decode=decode, source=model.source)
        case SharedWeights(folder=folder, tensors=tensors):
            network = network_over(role, folder, tensors)
            return TorchRolloutEngine(network, limits, decode=decode, source=folder)
