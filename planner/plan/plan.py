"""The Plan: what runs where and in which order. Plain data with a JSON form that can be edited by hand."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from realgraph.planner.plan.option import CallOption

PLAN_FORMAT = 6
Transport = Literal["in_place", "device", "host"]  # of weights: nothing moves; device to device; through host memory
TRANSPORTS: tuple[Transport, ...] = ("in_place", "device", "host")
REALLOCATION = "reallocate:"  # begins the names of reallocation nodes


Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]  # of bytes too


class Allocation(CallOption, frozen=True):
    """The option that was chosen for a call, and what is predicted of it. Free calls (functions, advantages) have none:
    they hold no mesh.

    seconds and bytes are predictions: of one call, and of the worst device at its worst moment. `seconds` is how long
    the call holds its mesh; `latency_seconds` until all its outputs are there, where a paused generate session makes
    that longer (0: the same). microbatches: of one optimizer step on one data-parallel rank. residency: a call that
    reads the trained copy in place is `resident`; whether it does follows from the layouts. input_seconds: of
    `seconds`, to bring what the call reads from the devices that made it. step_end_seconds: of the `seconds` of a
    step's last call, those of the controller until the next step begins. prefetch_during: of an offloaded call, the
    call before it on all its devices, while which its states come from the host; '' where they come within `seconds`.
    prefetch_seconds: from the start of that call until they are there.
    """

    residency: Literal["resident", "offloaded", "reallocated"] = "resident"
    seconds: Seconds = 0.0
    peak_bytes: Count = 0
    bound_bytes: Count = 0  # below which the peak stays with the probability `memory.quantile` of the run file
    worst_term: str = ""  # of peak_bytes: weights, gradients, optimizer, activations, logits, kv_cache
    latency_seconds: Seconds = 0.0
    microbatches: Count = 0
    running: Count = 0  # sequences that decode at once on a data-parallel rank, of a generate call
    # of a generate call, of each device's cache beyond `kv_cache_tokens`: for samples that get longer than expected, in
    # memory that nothing else of the plan takes
    spare_cache_tokens: Count = 0
    # of a stream of generation: sequences beyond `running` that a rank may decode at once, where samples get longer or
    # other calls take longer than expected
    spare_running: Count = 0
    ahead: Count = 0  # of a stream of generation: batches that it has begun before the one that a session completes
    host_bytes: Count = 0  # per device, of what is offloaded
    error: Annotated[float, Meta(ge=0)] = 0.0  # standard deviation of ln(measured / predicted) of `seconds`
    input_seconds: Seconds = 0.0
    step_end_seconds: Seconds = 0.0
    prefetch_during: str = ""
    prefetch_seconds: Seconds = 0.0

    @property
    def most_cache_tokens(self) -> int | None:
        """Tokens that a device may have in its cache, of a generate call."""
        return None if self.kv_cache_tokens is None else self.kv_cache_tokens + self.spare_cache_tokens

    @property
    def most_running(self) -> int:
        """Sequences that a data-parallel rank may decode at once, of a generate call."""
        return self.running + self.spare_running


def reallocation_node(call: str) -> str:
    """The node that brings trained weights to `call`'s own copy, as turns, event graphs and search problems name it."""
    return f"{REALLOCATION}{call}"


class Turn(Struct, frozen=True):
    """In round p a device runs `call` of step p + `offset`. `reallocate:CALL` brings trained weights to that call."""

    call: str
    offset: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] = 0


class Hashes(Struct, frozen=True):
    """Hashes of what the plan was made for; a run refuses a plan whose hashes differ. SHA-256, first 16 hex digits."""

    graph: str
    workload: str
    cluster: str
    costs: str = ""  # the table of measured costs, '' for the shipped factors


class Plan(Struct, frozen=True):
    """An allocation per mesh-holding call, and the cyclic order of calls of every device."""

    allocations: dict[str, Allocation]
    orders: dict[int, tuple[Turn, ...]]  # device -> its calls, in the order of one round
    hashes: Hashes
    # steps that generation keeps ahead of training at most; the run's own bound may be larger
    staleness: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    period_seconds: Seconds = 0.0  # predicted steady-state seconds a step
    lower_bound_seconds: Seconds = 0.0  # no plan is faster, within `scope`
    scope: str = ""
    bottleneck: tuple[str, ...] = ()  # the calls of the critical circuit
    format: int = PLAN_FORMAT
    latency_seconds: Seconds = 0.0  # of one step, from the start of its generation to the end of its training
    starts: dict[str, float] = {}  # seconds: of step 0's calls and reallocations; step k is k periods later
    reallocation_seconds: dict[str, Seconds] = {}  # call -> seconds to bring trained weights to its copy
    reallocation_transport: dict[str, Transport] = {}  # call that reads trained weights -> how they get there
    stopped: str = ""  # why the search ended: proven, time limit, interrupted, exhausted
    search_seconds: Seconds = 0.0
    # between which 80 % of such periods are measured (`costs/spread.py`); (0, 0) where nothing is known of that
    period_bar_seconds: tuple[Seconds, Seconds] = (0.0, 0.0)
    # a plan that was made simpler (`search/simpler.py`): the period of the best one found, and what was left out of it
    exact_seconds: Seconds = 0.0
    simplified: tuple[str, ...] = ()

    @property
    def best_seconds(self) -> float:
        """Predicted period of the best plan that was found; the plan itself may be simpler, and take longer."""
        return self.exact_seconds or self.period_seconds

    @property
    def gap(self) -> float:
        """The most that the period may be above the best one: 0.02 is 2 %."""
        return self.period_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds > 0 else float("inf")
