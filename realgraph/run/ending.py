"""The last lines of a run, however it ended: the newest checkpoint, and which commands come next."""

import shlex
from collections.abc import Iterator

from realgraph.graphs.spec import Generate, Train
from realgraph.run.running import PreparedRun
from realgraph.runtime.master.master import RunOutcome


def next_lines(outcome: RunOutcome, prepared: PreparedRun) -> Iterator[str]:
    """Lines for below the last one of the run; none for an evaluation, which is its own result."""
    job, root = prepared.job, prepared.folder.root
    calls = job.graph.calls.values()
    if not job.steps:
        return
    if not any(isinstance(call, Train) for call in calls):
        yield f"  samples: {prepared.folder.samples}"
        return
    if outcome.saved is None:
        yield "  nothing was saved"
        return
    place = shlex.quote(str(root))
    yield f"  saved: {outcome.saved}"
    more = "" if outcome.steps < job.steps else f" steps={2 * job.steps}"
    if not more or all(call.optimizer.schedule == "constant" for call in calls if isinstance(call, Train)):
        yield f"  go on: realgraph run --resume {place}{more}"
    if job.eval is not None and job.eval.data is not None:
        yield f"  score it: realgraph eval {shlex.quote(str(prepared.folder.config))} --checkpoint {place}"
    if any(isinstance(call, Generate) for call in calls):
        yield f'  try it: realgraph generate {place} "..."'
