"""Refusals with their own reason and place: of pins by their fields, of planning problems by their calls."""

import pytest
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import Generate, ModelCall, ModelRole, Train
from realgraph.planner.feasibility.shortage import Shortage, shortage
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.constraints import constraint_problems
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import Limits
from realgraph.planner.problem_file.codec import build_problem
from realgraph.planner.problem_file.spec import CallSpec, EdgeSpec, OptionSpec, ProblemFile, TieSpec
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.planner.search.search import search
from tests.planner_cases import cluster, graph, ppo, request

PPO = request(ppo(), "meta-llama/Llama-3.1-8B", cluster(nodes=2), workload=Workload(256, 1, 512, 1024, 500.0))
QUICK = Limits(gap=0.05, seconds=5.0)
GB = 1e9


@pytest.mark.parametrize(
    ("call", "pin", "field", "says"),
    [
        ("actor_train", Pin(dp=3), "dp", "no mesh can hold"),
        ("actor_train", Pin(devices=16, dp=16, pp=2), "dp", "is 32, the mesh has 16 devices"),
        ("generate", Pin(devices=1, tp=8), "tp", "is 8, the mesh has 1 device:"),
        ("actor_train", Pin(ep=2), "ep", "the model has none"),
        ("actor_train", Pin(tp=5), "tp", "does not divide 32 attention heads"),
        ("actor_train", Pin(pp=33), "pp", "more than the 32 layers"),
        ("actor_train", Pin(first=99), "first", "device 99 is none of the cluster's"),
        ("ref", Pin(dp=1, sharding="fsdp"), "sharding", "of which this pin leaves one"),
        ("ref", Pin(devices=4, tp=4, sharding="fsdp"), "sharding", "of which this pin leaves one"),
        ("ref", Pin(devices=4, pp=4, sharding="fsdp"), "sharding", "of which this pin leaves one"),
        ("generate", Pin(sharding="fsdp"), "sharding", "whole weights on a device"),
        ("values", Pin(residency="offloaded"), "residency", "weights that 'critic_train' trains"),
        ("generate", Pin(residency="offloaded"), "residency", "weights that 'actor_train' trains"),
        ("generate", Pin(kv_cache_tokens=10), "kv_cache_tokens", "holds no sample"),
        ("generate", Pin(max_tokens_per_microbatch=4096), "max_tokens_per_microbatch", "this one has kv_cache_tokens"),
        ("ref", Pin(kv_cache_tokens=4096), "kv_cache_tokens", "belongs to generate calls"),
    ],
)
def test_a_pin_is_refused_with_its_own_reason_and_place(call: str, pin: Pin, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(replace(PPO, pins={call: pin}), QUICK)
    found = [problem for problem in caught.value.problems if says in problem.text]
    assert found and found[0].where.path == f"$.allocation.{call}.{field}", caught.value


def test_an_offloaded_pin_names_the_constraint_that_forbids_it() -> None:
    asked = replace(PPO, pins={"ref": Pin(residency="offloaded")}, constraints=Constraints(offload=False))
    with pytest.raises(ConfigError, match=r"ref\.residency.*constraints\.offload is false"):
        search(asked, QUICK)


@pytest.mark.parametrize(
    ("staleness", "follows", "says"),
    [(0, False, ""), (1, False, "run all the time where samples may be stale"), (0, True, "follow the training")],
)
def test_only_a_generator_that_rests_and_that_nothing_changes_waits_in_host_memory(
    staleness: int, follows: bool, says: str
) -> None:
    calls: dict[str, ModelCall] = {"generate": Generate(model="teacher"), "train": Train("student", Loss({}))}
    teacher = ModelRole(dtype="bfloat16", path="x")
    if follows:
        teacher = replace(teacher, init="student", ema_rate=0.1)
    roles = {"teacher": teacher, "student": ModelRole(trainable=True, dtype="bfloat16", path="x")}
    workload = Workload(64, 8, 512, 1024, 400.0, staleness=staleness)
    asked = request(graph(calls, [("generate", "train")], roles), workload=workload)
    options = candidates(asked, "generate", DeviceMesh(0, 8), asked.cluster)
    assert any(option.residency == "offloaded" for option in options) == (not says)
    problems = constraint_problems(replace(asked, pins={"generate": Pin(residency="offloaded")}))
    assert [says in problem.text for problem in problems] == [True] * bool(says)


def test_more_ranks_than_samples_are_refused() -> None:
    few = replace(PPO, workload=Workload(4, 1, 512, 1024, 500.0), pins={"ref": Pin(dp=16)})
    with pytest.raises(ConfigError, match=r"ref\.dp: dp 16 is more than the 4 samples of a step"):
        search(few, QUICK)


# --- planning problems ------------------------------------------------------------------------------------------------


def whole(name: str, resident: float, role: str = "", host: float = 0.0, mesh: tuple[int, int] = (0, 2)) -> CallSpec:
    options = (OptionSpec(1.0, resident * GB, 0.0, mesh, host=host * GB),)
    return CallSpec(name, options, role, name.endswith("train"))


def lacking(spec: ProblemFile) -> Shortage:
    found = shortage(build_problem(spec).problem, Limits())
    assert found is not None
    return found


def test_the_pair_that_does_not_fit_is_named_with_what_it_lacks() -> None:
    calls = (whole("small", 1.0), whole("actor_train", 50.0, "actor"), whole("critic_train", 45.0, "critic"))
    found = lacking(ProblemFile(2, 80 * GB, calls, (EdgeSpec("small", "actor_train"),)))
    assert found.calls == ("actor_train", "critic_train") and found.roles == ("actor", "critic")
    assert found.what == "memory" and found.missing == pytest.approx(15 * GB, rel=2e-3)
    assert "(role 'actor') and 'critic_train'" in found.text and "15.0 GB are missing on a device" in found.text


def test_a_call_that_fits_nowhere_is_named_alone() -> None:
    found = lacking(ProblemFile(2, 80 * GB, (whole("small", 1.0), whole("large", 90.0))))
    assert found.calls == ("large",) and "'large' does not fit: 10.0 GB are missing" in found.text


def test_three_calls_of_which_any_two_fit_are_all_named() -> None:
    found = lacking(ProblemFile(2, 80 * GB, tuple(whole(name, 30.0) for name in ("one", "two", "three"))))
    assert found.calls == ("one", "two", "three") and found.missing == pytest.approx(10 * GB, rel=2e-3)


def test_host_memory_and_ties_are_told_apart_from_devices() -> None:
    calls = (whole("one", 1.0, host=30.0), whole("two", 1.0, host=30.0))
    found = lacking(ProblemFile(2, 80 * GB, calls, host_memory=100 * GB))
    assert found.what == "host_memory" and found.missing == pytest.approx(20 * GB, rel=2e-3)
    apart = (whole("left", 1.0, mesh=(0, 1)), whole("right", 1.0, mesh=(1, 1)))
    tied = lacking(ProblemFile(2, 80 * GB, apart, ties=(TieSpec(("left", "right")),)))
    assert tied.what == "places" and "no mesh and layout in common" in tied.text
