"""The weights of a network that generates: taken, given up, put away and counted. Knows no cache and no request.

New ones overwrite the old, or lie beside them until they are switched to, so that generation goes on meanwhile.
"""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from realgraph.runtime.engine import Parts, WeightSpec
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.models.host_states import DroppedStorages, HostStates
from realgraph.runtime.models.train_state import read_counters
from realgraph.runtime.models.weights import local_parts, read_into, take_weights, weight_specs
from realgraph.runtime.parallel.checksums import checksum
from realgraph.runtime.parallel.exchange import WeightPart


class RolloutWeights:
    """The parameters of a module, of which there may be a part here."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._dropped = DroppedStorages()
        self._states: HostStates | None = None  # weights that wait in host memory
        self._use = ExitStack()  # of them
        self.beside = False  # new ones are taken beside those in use
        self._next: dict[str, WeightPart] = {}  # memory for them, once some have come
        self._came = False  # all of them, and they are not in use yet

    @property
    def nbytes(self) -> int:
        """Bytes of the weights where they are on the device."""
        return sum(parameter.nbytes for parameter in self._module.parameters())

    def specs(self) -> tuple[WeightSpec, ...]:
        """All weights, in the order in which they are sent."""
        return weight_specs(self._module)

    @torch.no_grad()
    def checksums(self) -> Tensor:
        """See RolloutEngine."""
        parts, specs = local_parts(self._module), self.specs()
        sums = torch.zeros(len(specs), dtype=torch.int64, device=next(self._module.parameters()).device)
        for i, spec in enumerate(specs):
            if spec.name in parts:
                sums[i] = checksum(parts[spec.name], spec.shape)
        return sums

    def take(self, parts: Parts) -> None:
        """Take weights, part by part: in place, or beside those in use. Raises ValueError for parts that are missing or
        have no place."""
        if not self.beside:
            self._dropped.restore()
            take_weights(self._module, parts)
            return
        self._came = False
        if not self._next:
            local = local_parts(self._module)
            self._next = {name: part._replace(values=torch.empty_like(part.values)) for name, part in local.items()}
        take_weights(self._module, parts, self._next)
        self._came = True

    def switch(self) -> None:
        """Use what came beside; its memory and that of the old ones change places."""
        if self._came:
            for name, parameter in self._module.named_parameters():
                old, new = parameter.data, self._next[name]
                parameter.data, self._next[name] = new.values, new._replace(values=old)
            self._came = False

    def drop(self) -> None:
        """Give up the memory of weights that are here; `take` has it again."""
        assert not self.beside, "a stream keeps its weights"
        self._dropped.drop(self._module.parameters())

    def read(self, folder: RunPath) -> int:
        """Take the weights that `TrainEngine.save` wrote; returns their version."""
        read_into(self._module, folder, "lm")
        return read_counters(folder).version

    def offload(self) -> None:
        """Weights, which nobody changes, wait in host memory from now on, and from each `leave` to the next `bring`."""
        self._states = HostStates(self._module.parameters)

    def bring(self) -> None:
        """Bring those that wait in host memory."""
        if self._states is not None and self._states.away:
            self._use.enter_context(self._states.used(changed=False))

    def leave(self) -> None:
        """They may wait in host memory again."""
        self._use.close()
