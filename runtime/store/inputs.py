"""The inputs of calls, gathered by threads of their own as soon as it is known which call will read them: while the
device is still busy with others, and before a worker that holds them may be lost. Worker side.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from realgraph.runtime.store.assemble import Assembler, Values
from realgraph.runtime.store.bundle import PeerLostError, SlowPeerError
from realgraph.runtime.store.shares import Share
from realgraph.runtime.wire.protocol import Execute, Prefetch, SampleSource

Sources = Sequence[SampleSource]
_THREADS = 4  # one may wait for a worker that stands still
_RETRY_SECONDS = 0.5
log = logging.getLogger(__name__)


class Inputs:
    """The inputs of commands in hand. Closed at the worker's end."""

    def __init__(self, assembler: Assembler, share: Callable[[str, int], Share | None]) -> None:
        """share: of a call and the number of its task, the workers that gather the same."""
        self._assembler, self._share = assembler, share
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="inputs")
        self._ahead: dict[tuple[str, int], tuple[Prefetch, Future[Values]]] = {}
        self._begun: dict[int, Future[Values]] = {}

    async def prefetch(self, command: Prefetch, patience: float) -> bool:
        """Gather what a later call of a step reads, to be kept until its Execute comes. False where another command
        for that call has come instead. A worker that can't be reached is asked again for `patience` seconds, by each
        reader alone: either it answers, or it is found to be lost, and the step is put back. Raises TransferError."""
        until, share = time.monotonic() + patience, self._share(command.call, command.task)
        while True:
            gathered = self._threads.submit(self._gather, command.sources, share)
            self._ahead[command.call, command.step] = (command, gathered)
            try:
                await asyncio.wrap_future(gathered)
                return True
            except (PeerLostError, SlowPeerError) as error:
                log.warning("the inputs of %s of step %d can't be gathered: %s", command.call, command.step, error)
                if time.monotonic() > until:
                    raise
                share = None
            await asyncio.sleep(_RETRY_SECONDS)
            if self._ahead.get((command.call, command.step), (None, None))[0] is not command:
                return False

    def begin(self, command: Execute) -> None:
        """Begin to gather what is not here yet of the inputs of a command. What was fetched for a batch that has been
        formed anew since is let go."""
        prefetch, ahead = self._ahead.pop((command.call, command.step), (None, None))
        sources = prefetch.sources if prefetch is not None else ()
        if not set(sources) <= set(command.sources) or (ahead is not None and ahead.done() and ahead.exception()):
            sources, ahead = (), None
        self._begun[command.task] = self._threads.submit(self._complete, command, sources, ahead)

    def take(self, command: Execute) -> Values:
        """Wait for the inputs of a command that has begun; once. Raises TransferError."""
        return self._begun.pop(command.task).result()

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _complete(self, command: Execute, sources: Sources, ahead: Future[Values] | None) -> Values:
        early: Values = ahead.result() if ahead is not None else {}
        here = set(sources)
        share = self._share(command.call, command.task)
        values = self._gather([one for one in command.sources if one not in here], share)
        for key, own in early.items():
            values.setdefault(key, {}).update(own)
        return values

    def _gather(self, sources: Sources, share: Share | None) -> Values:
        samples = {sample for source in sources for sample in source.samples}
        return self._assembler.gather(sources, samples, share)
