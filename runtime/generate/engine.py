"""The embedded rollout engine: a thread that decodes what callers ask for, under the weights they give. Worker side."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from realgraph.runtime.drawn.tokens import DrawnTokens
from realgraph.runtime.engine import CacheUse, Completion, EngineClosed, EngineStatus, Parts, Request, WeightSpec
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.session import (
    Aborted,
    Agreement,
    GenerationSession,
    News,
    RankState,
    Restored,
    SetAside,
    Submitted,
)
from realgraph.runtime.wire.metrics import ResidentBytes

log = logging.getLogger(__name__)

STEP_SECONDS = 1800.0  # a decode step, prefills included, takes no longer; the master's deadlines are tighter
IDLE_SECONDS = 3600.0  # callers wake the thread; this only bounds one wait
BEAT_SECONDS = 0.5  # between two exchanges of a session without work
SHARED_BEAT_SECONDS = 0.02  # the same where other heads may have some meanwhile
BLOCKED_SECONDS = 0.01  # the same where there is work, and a rank can't take part yet


class TorchRolloutEngine:
    """RolloutEngine over a batch of this process. The thread of the engine runs the decode steps, the callers' threads
    do what they ask for between two of them: a step does not begin while a caller waits.

    notify: called by the engine's thread whenever there is something to take. The thread starts with the first request.

    session: where several workers generate together (its thread runs from the start). Requests come to the engines of
    heads alone; all others are called alike on every worker.
    """

    def __init__(
        self,
        batch: ContinuousBatch,
        notify: Callable[[], None] = lambda: None,
        session: GenerationSession | None = None,
    ) -> None:
        self._batch, self._notify, self._session = batch, notify, session
        self._changed = threading.Condition()  # holds all below, and the batch unless a step runs
        self._stepping = False
        self._callers = 0  # that wait for the end of a step, or are at work between two
        self._paused = False
        self._whole = True  # the weights are those of one version
        self._finished: list[Completion] = []
        self._failure: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._news: list[News] = []  # of the head, for the next exchange
        self._aside: list[tuple[ExitStack, Exception | None]] = []  # of a follower, one for each SetAside
        self._untold = False  # the head has news, or has dismissed who follows it, since the last exchange
        self._together_busy = False  # at the last exchange somebody had sequences
        self._dismissals = 0  # by this head's callers
        self._dismissed = 0  # times that all heads have let each other and their followers go
        self._followed = 0  # times that this worker has followed until then, or does now
        self._releases = 0  # times that this worker has given up its caches
        if session is not None:
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
        self._thread.start()

    def _pass_on(self, news: News) -> None:
        """Have the followers do the same before the next step."""
        if self._session is not None:
            assert self._session.leads, "requests come to the heads of a session"
            self._news.append(news)
            self._untold = True

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine. All or none are queued."""
        with self._between_steps():
            self._check()
            self._batch.submit(requests)
            self._pass_on(Submitted(tuple(requests)))
            if self._thread is None:
                self._start()

    def take(self, timeout: float) -> list[Completion]:
        """See RolloutEngine."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._failure or self._closed, timeout)
            if not self._finished:
                self._check()
            finished, self._finished = self._finished, []
            return finished

    def drawn(self, since: Mapping[int, int]) -> Sequence[DrawnTokens]:
        """See RolloutEngine."""
        with self._between_steps():
            return self._batch.drawn(since)

    def abort(self, ids: Sequence[int]) -> None:
        """See RolloutEngine."""
        with self._between_steps():
            self._batch.abort(ids)
            self._pass_on(Aborted(tuple(ids)))
            gone = set(ids)
            self._finished = [done for done in self._finished if done.id not in gone]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """See RolloutEngine. What is left unfinished inside is forgotten."""
        aside = ExitStack()
        with self._between_steps():
            kept = self._finished, self._paused, self._failure
            self._finished, self._paused = [], False
            aside.enter_context(self._batch.set_aside())
            self._pass_on(SetAside())
        try:
            yield
        finally:
            with self._between_steps():
                aside.close()
                self._pass_on(Restored())
                self._finished, self._paused, self._failure = kept

    def pause(self) -> None:
        """See RolloutEngine."""
        with self._between_steps():
            self._paused = True

    def resume(self) -> None:
        """See RolloutEngine."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def dismiss(self) -> None:
        """See RolloutEngine."""
        if self._session is not None:
            assert self._session.leads, "followers are let go by their head"
            with self._changed:
                self._dismissals, self._untold = self._dismissals + 1, True
            self.follow()

    def follow(self) -> None:
        """See RolloutEngine."""
        with self._changed:
            assert self._session is not None, "one alone has nobody to follow"
            self._followed += 1
            paused, self._paused = self._paused, False
            self._changed.notify_all()
            ended = self._changed.wait_for(
                lambda: self._dismissed >= self._followed or self._failure or self._closed, STEP_SECONDS
            )
            self._check()
            if not ended:
                raise TimeoutError(f"a head of {self._session.name} has not gone on after {STEP_SECONDS:g} s")
        with self._between_steps():
            self._paused = paused

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._batch.version

    @property
    def source(self) -> Path | None:
        return self._batch.source

    @property
    def device(self) -> torch.device:
        return self._batch.device

    def weight_specs(self) -> Sequence[WeightSpec]:
        """See RolloutEngine."""
        return self._batch.weights.specs()

    def resident_bytes(self) -> ResidentBytes:
        """See RolloutEngine."""
        return ResidentBytes(self._batch.weights.nbytes)

    def prepare(self, parts: Parts) -> None:
        """See RolloutEngine. Where they overwrite the old ones generation stands still until `switch`; exchanges go on,
        as parts may come from workers that still wait for the outcome of one."""
        if not self._batch.weights.beside:
            with self._between_steps():
                self._whole = False
        self._batch.weights.take(parts)

    def switch(self, version: int, cache: CacheUse = "recompute") -> None:
        """See RolloutEngine."""
        with self._between_steps():
            self._batch.weights.switch()
            self._batch.weights_changed(version, cache)
            self._whole = True

    def checksums(self) -> Tensor:
        """See RolloutEngine."""
        with self._between_steps():
            return self._batch.weights.checksums()

    def release(self, *, weights: bool) -> None:
        """See RolloutEngine."""
        with self._between_steps():
            self._batch.release()
            self._releases += 1
            if weights:
                self._whole = False
                self._batch.drop_weights()

    def load(self, folder: RunPath) -> None:
        """See RolloutEngine."""
        with self._between_steps():
            self._whole = False
            self._batch.weights_changed(self._batch.weights.read(folder))
            self._whole = True

    # --- state --------------------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """See RolloutEngine."""
        batch = self._batch
        load = batch.running, batch.waiting, batch.version, batch.free_cache_tokens
        return EngineStatus(*load, failure=self._failure, drawn_tokens=batch.drawn_tokens)

    def close(self, timeout: float) -> bool:
        """See RolloutEngine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _check(self) -> None:
        """Raises what has ended generation."""
        if self._failure is not None or self._closed:
            raise self._failure or EngineClosed

    # --- the two sides of a step --------------------------------------------------------------------------------------

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """The batch is the caller's inside. Raises TimeoutError where the step in hand does not end."""
        with self._changed:
            self._callers += 1
            try:
                if not self._changed.wait_for(lambda: not self._stepping, STEP_SECONDS):
                    raise TimeoutError(f"a decode step has not ended after {STEP_SECONDS:g} s")
                yield
            finally:
                self._callers -= 1
                self._changed.notify_all()

    @property
    def _halted(self) -> bool:
        """No step may begin."""
        return bool(self._callers or self._paused or self._failure or not self._whole)

    @property
    def _ready(self) -> bool:
        """A step may begin, and has something to do."""
        return not self._halted and not self._batch.idle

    def _serve(self) -> None:
        """Decode steps while there are requests, until `close`."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._session is not None:
            try:
                self._generate_together(self._session)
            except Exception as error:  # a rank is gone, and generation with it
                self._fail(error)
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed, IDLE_SECONDS)
                if self._closed:
                    return
                self._stepping = self._ready
            if self._stepping:
                self._step(self._batch.step)

    def _step(self, step: Callable[[], list[Completion]], *, more: bool = False) -> None:
        """Run a part of generation, and hand over what it has finished. more: callers wait on, for another one."""
        finished, failure = list[Completion](), None
        try:
            finished = step()
        except Exception as error:  # whatever it is, it ends generation, and who takes is told
            log.exception("generation has failed")
            failure = error
        if self._session is not None and not self._session.leads:
            finished = []  # the head has them
        with self._changed:
            self._stepping = more
            self._finished += finished
            self._failure = self._failure or failure
            self._changed.notify_all()
        if finished or failure:
            self._notify()

    # --- a session of several workers ---------------------------------------------------------------------------------

    def _generate_together(self, session: GenerationSession) -> None:
        """Exchanges, and the steps on which all workers agree, until one of them closes or is gone."""
        blocked = False  # there was work that some worker could not take part in
        begun: Callable[[], Agreement] | None = None  # an exchange that is under way
        while True:
            agreement = (begun or self._begin_exchange(session, blocked))()
            go = self._heed(session, agreement)
            begun = self._begin_exchange(session) if go and session.steps_overlap else None
            if go:
                self._step(partial(session.run, self._batch.step), more=begun is not None)
            elif self._stepping:
                self._step(partial(session.run, self._batch.settle))
            if agreement.closed:
                return
            blocked = not agreement.go and agreement.quiet

    def _heed(self, session: GenerationSession, agreement: Agreement) -> bool:
        """Do what was agreed on, but for a step. True where one is to be made."""
        with self._changed:
            if not session.leads:
                for one in agreement.news:
                    self._take_in(one)
            self._together_busy, self._dismissed = agreement.busy, agreement.dismissals
            if agreement.releases > self._releases:  # others have no keys of the tokens so far
                self._batch.release()
                self._releases = agreement.releases
            self._closed = self._closed or agreement.closed
            if failed := agreement.failed and self._failure is None:
                self._failure = RuntimeError(f"generation has failed on another of {session.name}")
            go = agreement.go and self._failure is None
            self._stepping = go or (self._batch.under_way and self._failure is None)
            self._changed.notify_all()
        if failed:
            self._notify()
        return go

    def _begin_exchange(self, session: GenerationSession, blocked: bool | None = None) -> Callable[[], Agreement]:
        """blocked: see `_await_turn`; None: a step follows before the exchange ends."""
        with self._changed:
            if session.sets_the_pace and blocked is not None:
                self._await_turn(blocked, SHARED_BEAT_SECONDS if session.n_heads > 1 else BEAT_SECONDS)
            own = self._state()
            news, self._news, self._untold = self._news, [], False
            # callers wait for the outcome, and until what is under way has ended
            self._stepping = self._stepping or not own.halted
        return session.begin_exchange(own, news)

    def _state(self) -> RankState:
        """This worker's, for an exchange. Without sequences it takes part where it has heard that others have some;
        else its callers would wait for them."""
        busy = not self._batch.idle
        halted = self._halted or not (busy or self._together_busy)
        mine = self._closed, bool(self._failure), self.version, self._dismissals, self._releases
        return RankState(halted, busy, *mine)

    def _await_turn(self, blocked: bool, beat: float) -> None:
        """Wait for a reason to make another exchange, without any for `beat` seconds. blocked: the last one found a
        worker that could not take part."""
        if not self._together_busy and self._batch.idle:
            self._changed.wait_for(lambda: self._untold or self._ready or self._closed, beat)
        elif blocked or self._halted:
            self._changed.wait_for(lambda: self._untold or self._closed, BLOCKED_SECONDS)

    def _take_in(self, news: News) -> None:
        """Do what the head has done."""
        match news:
            case Submitted(requests=requests):
                self._batch.submit(requests)
            case Aborted(ids=ids):
                self._batch.abort(ids)
            case SetAside():
                self._aside.append((ExitStack(), self._failure))
                self._aside[-1][0].enter_context(self._batch.set_aside())
            case Restored():
                aside, self._failure = self._aside.pop()
                aside.close()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            closed, self._stepping = self._closed, False
            if not closed:
                log.error("generation has failed: %s", error)
                self._failure = self._failure or error
            self._changed.notify_all()
        if not closed:
            self._notify()
