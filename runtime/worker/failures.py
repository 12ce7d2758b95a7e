"""Exceptions of a worker as the message that ends the run: its kind decides what the user is told."""

import traceback
from typing import Literal

import torch
import torch.distributed

from realgraph.graphs.errors import ConfigError
from realgraph.runtime.algorithms.applied import AppliedError
from realgraph.runtime.functions.host import FunctionError
from realgraph.runtime.job.run_folder import disk_text
from realgraph.runtime.logprob_gap import LogprobGap
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.store.bundle import PeerLostError, SlowPeerError
from realgraph.runtime.train.errors import LostPart, NumericsError
from realgraph.runtime.wire.protocol import Failed
from realgraph.runtime.worker.function_calls import FunctionFailed

_TORCH, _DISTRIBUTED = f"{torch.__path__[0]}/", f"{torch.distributed.__path__[0]}/"
Kind = Literal["call", "function", "data", "numerics", "disk", "start", "worker", "deadline"]


def failure(worker: int, call: str, error: Exception) -> Failed:
    """The failure in `call` of `worker`, in one line, with the sample to blame where one is known."""
    kind, text, sample = _judge(call, error)
    detail = getattr(error, "detail", "") or "".join(traceback.format_exception(error))
    late = (error.worker,) if isinstance(error, SlowPeerError) else ()
    return Failed(worker, call, text, kind, sample, detail, late)


def _judge(call: str, error: Exception) -> tuple[Kind, str, int]:
    text = str(error)
    match error:
        case FunctionFailed(sample=sample):
            return "function", text, sample
        case FunctionError() | AppliedError():
            return "function", text, -1
        case ConfigError():
            return "data" if call else "start", text, -1
        case NumericsError(samples=samples):
            return "numerics", text, samples[0] if samples else -1
        case LostPart():
            return "disk", text, -1
        case LogprobGap():
            return "numerics", text, -1
        case CollectiveError():
            return "worker", text, -1
        case PeerLostError():  # the end of the peer's process, which follows, says more
            return "worker", f"{type(error).__name__}: {text}", -1
        case RuntimeError() if _is_collective(error):
            return "worker", f"{type(error).__name__}: {text}", -1
        case OSError() if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            return "disk", disk_text(error), -1
        case _:
            return "call", f"{type(error).__name__}: {text}" if text else type(error).__name__, -1


def _is_collective(error: RuntimeError) -> bool:
    """True where torch.distributed raised it: transfers and gathers that torch itself starts end so where a peer
    has."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    callers = [file for file in files if file.startswith(_DISTRIBUTED) or not file.startswith(_TORCH)]
    return bool(callers) and callers[-1].startswith(_DISTRIBUTED)
