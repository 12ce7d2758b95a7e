"""Places of SGLang servers in plans: devices that the planner chooses, and those of several generate calls."""

import json
from pathlib import Path

import pytest

from realgraph.planner.advise.servers import with_servers
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.run.given_servers import check_given_servers
from realgraph.run.planning import plan_for
from realgraph.run.requests import request_for
from realgraph.run.running import PreparedRun, prepare
from realgraph.run_file.compose import check_run
from tests import tiny
from tests.run_texts import RUN, place, problems_of
from tests.sglang_server import standin
from tests.test_rehearsal import QWEN3
from tests.test_sglang_plans import GPUS, ON_SERVERS, URL, prepared, write_llama_70b

__all__ = ["place"]


# --- devices of servers that nothing pins -----------------------------------------------------------------------------


def period_of(place: Path, *overrides: str) -> float:
    checked = check_run(place / "run.yaml", overrides, weights=False)
    request = request_for(checked)
    plan = plan_for(checked, request)
    assert not validate(plan, request)
    return plan.best_seconds


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("kind", ["cpu", "H100-SXM"])
def test_servers_that_nothing_pins_have_the_fastest_of_all_splits(place: Path, kind: str, staleness: int) -> None:
    tiny.save(place / "model")
    asked = (ON_SERVERS[0], f"cluster={{kind: {kind}, devices: 8}}", f"staleness={staleness}")
    splits = [f"allocation={{rollout: {{first: {8 - n}, devices: {n}}}}}" for n in (1, 2, 4)]
    least = min(period_of(place, *asked, split) for split in splits)
    assert period_of(place, *asked) <= 1.02 * least


@pytest.mark.parametrize("kinds", [("H100-SXM", "L40S"), ("L40S", "H100-SXM")])
def test_servers_have_the_kind_of_devices_that_makes_the_fastest_plan(place: Path, kinds: tuple[str, str]) -> None:
    """Any place in the cluster will do."""
    (place / "model" / "config.json").write_text(json.dumps(QWEN3))
    nodes = f"cluster={{kind: {kinds[0]}, devices: 4, more: [{{kind: {kinds[1]}, nodes: 1, devices: 4}}]}}"
    batch = ("batch={groups: 64, max_new_tokens: 1024, expected_new_tokens: 400}", "data.path=nowhere/questions")
    asked = (ON_SERVERS[0], nodes, "staleness=2", *batch)
    pins = "allocation={{rollout: {{first: {}, devices: {}}}}}"
    periods = {first: period_of(place, *asked, pins.format(first, n)) for first, n in ((0, 4), (2, 2), (4, 4), (6, 2))}
    fastest = min(periods, key=lambda first: periods[first])
    assert fastest == 4 * kinds.index("H100-SXM")
    assert period_of(place, *asked) <= 1.02 * periods[fastest]
    placed = with_servers(request_for(check_run(place / "run.yaml", asked, weights=False)))
    assert placed.text.startswith("devices of SGLang servers: 4 H100-SXM for rollout, the fastest of ")


def test_servers_of_two_calls_have_the_fastest_of_all_splits(place: Path) -> None:
    tiny.save(place / "model")
    write_remax(place)
    asked = (ON_SERVERS[0], "cluster={kind: H100-SXM, devices: 4}", "staleness=1", "params.group_size=4")
    splits = [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((3, 1), (2, 1)), ((2, 1), (3, 1))]
    pins = "{{rollout: {{first: {}, devices: {}}}, greedy: {{first: {}, devices: {}}}}}"
    least = min(period_of(place, *asked, f"allocation={pins.format(*one, *two)}") for one, two in splits)
    assert period_of(place, *asked) <= 1.02 * least


def test_what_a_user_pins_of_servers_stays(place: Path) -> None:
    run = prepared(place, *ON_SERVERS, "allocation={rollout: {tp: 2}}")
    served = run.job.plan.allocations["rollout"].layout
    assert (served.tp, served.mesh) == (2, DeviceMesh(2, 2))
    begins = prepared(place, *ON_SERVERS, "allocation={rollout: {first: 1}}").job.plan.allocations["rollout"].layout
    assert begins.mesh == DeviceMesh(1, 1)


def test_whole_nodes_and_the_devices_of_other_servers_are_left_alone(place: Path) -> None:
    tiny.save(place / "model")
    write_remax(place)
    nodes = "cluster={kind: H100-SXM, devices: 8, nodes: 5}"
    checked = check_run(
        place / "run.yaml", (ON_SERVERS[0], nodes, "allocation={greedy: {first: 32, devices: 8}}"), weights=False
    )
    placed = with_servers(request_for(checked))
    mesh = placed.request.pins["rollout"]
    assert mesh.first is not None and mesh.devices is not None and mesh.first + mesh.devices <= 32
    assert placed.text.startswith(f"devices of SGLang servers: {mesh.devices} for rollout, the fastest of ")


def test_where_no_split_fits_the_reason_is_said(place: Path) -> None:
    write_llama_70b(place)
    checked = check_run(place / "run.yaml", (ON_SERVERS[0], GPUS), weights=False)
    problems = problems_of(lambda: plan_for(checked, request_for(checked)))
    assert any("memory" in problem.text or "GB" in problem.text for problem in problems), problems


def test_given_servers_need_to_be_told_their_devices(place: Path) -> None:
    problems = problems_of(lambda: prepared(place, f"rollout={{engine: sglang, urls: ['{URL}']}}", ON_SERVERS[1]))
    (problem,) = problems
    assert problem.where.path == "$.allocation.rollout" and "nothing says which devices" in problem.text


# --- several generate calls -------------------------------------------------------------------------------------------

BOTH = "allocation={rollout: {first: 2, devices: 1}, greedy: {first: 3, devices: 1}}"


TWICE = """\
name: twice
inputs: {prompt: group tokens}
models: {actor: {}}
calls:
  rollout: {kind: generate, model: actor, reads: [prompt], n: 2}
  greedy: {kind: generate, model: actor, reads: [prompt], temperature: 0}
"""
ONLY_GENERATES = """\
graph: twice.yaml
models: {actor: {path: model}}
data: {path: data/train.jsonl, columns: {prompt: question}}
batch: {groups: 4, max_new_tokens: 16}
steps: 3
"""


def write_remax(place: Path) -> None:
    """A run of ReMax, whose two calls generate with one model."""
    text = RUN.replace("graph: grpo", "graph: remax").replace("  group_size: 2\n", "")
    (place / "run.yaml").write_text(text)


def of_two_calls(place: Path, *overrides: str) -> PreparedRun:
    tiny.save(place / "model")
    write_remax(place)
    return prepare(place / "run.yaml", overrides, None)


@pytest.mark.parametrize("staleness", [0, 1])
def test_each_generate_call_has_devices_of_its_own(place: Path, staleness: int) -> None:
    run = of_two_calls(place, *ON_SERVERS, BOTH, f"staleness={staleness}")
    layouts = {name: allocation.layout for name, allocation in run.job.plan.allocations.items()}
    assert (layouts["rollout"].mesh, layouts["greedy"].mesh) == (DeviceMesh(2, 1), DeviceMesh(3, 1))
    assert set(layouts["train"].mesh.devices) <= {0, 1}
    assert not validate(run.job.plan, run.request)


def test_calls_of_a_graph_that_only_generates_have_devices_of_their_own_too(place: Path) -> None:
    tiny.save(place / "model")
    (place / "twice.yaml").write_text(TWICE)
    (place / "run.yaml").write_text(ONLY_GENERATES)
    run = prepare(place / "run.yaml", (*ON_SERVERS, BOTH), None)
    meshes = {name: allocation.layout.mesh for name, allocation in run.job.plan.allocations.items()}
    assert meshes == {"rollout": DeviceMesh(2, 1), "greedy": DeviceMesh(3, 1)}


def urls(given: str) -> tuple[str, ...]:
    return f"rollout={{engine: sglang, urls: {given}}}", "cluster={kind: cpu, devices: 4}", BOTH


@pytest.mark.parametrize(
    ("overrides", "path", "text", "hint"),
    [
        (
            (*ON_SERVERS, "allocation={rollout: {first: 2, devices: 2}, greedy: {first: 3, devices: 1}}"),
            "$.allocation.greedy",
            "'greedy' is pinned to devices of 'rollout'",
            "pin it to others",
        ),
        (
            (ON_SERVERS[0], "cluster={kind: cpu, devices: 2}"),
            "$.cluster",
            "'rollout', 'greedy' and the other calls need 3 devices at least, and there are 2",
            "more devices",
        ),
        (
            (*ON_SERVERS, "allocation={rollout: {first: 0, devices: 2}, greedy: {first: 2, devices: 2}}"),
            "$.allocation",
            "have all 4 devices",
            "leave devices to them",
        ),
        (
            urls(f"['{URL}']"),
            "$.rollout.urls",
            "nothing says which servers are whose",
            "{rollout: [URL], greedy: [URL]}",
        ),
        (urls(f"{{rollout: ['{URL}']}}"), "$.rollout.urls", "no server is given for 'greedy'", "add greedy: [URL]"),
        (
            urls(f"{{rollout: ['{URL}'], gredy: ['{URL}1']}}"),
            "$.rollout.urls.gredy",
            "'gredy' is no generate call",
            "'greedy'",
        ),
        (
            (*ON_SERVERS, "rollout.call_args={gredy: {quantization: fp8}}"),
            "$.rollout.call_args.gredy",
            "'gredy' is no generate call",
            "'greedy'",
        ),
        (
            urls(f"{{rollout: ['{URL}'], greedy: ['{URL}']}}"),
            "$.rollout.urls.greedy[0]",
            "is named twice",
            "one replica of one call",
        ),
        (
            urls(f"{{rollout: ['{URL}'], greedy: ['{URL}1', '{URL}2']}}"),
            "$.rollout.urls.greedy",
            "'greedy' has 1 devices, and 2 servers",
            "one for each dp replica",
        ),
    ],
)
def test_servers_of_several_calls_that_do_not_fit_them_are_refused(
    place: Path, overrides: tuple[str, ...], path: str, text: str, hint: str
) -> None:
    problems = problems_of(lambda: of_two_calls(place, *overrides))
    assert any(p.where.path == path and text in p.text and hint in p.hint for p in problems), problems


def test_given_servers_of_each_call_are_asked_what_that_call_needs(place: Path, tmp_path: Path) -> None:
    """The second has less context than its own call needs, at its place in the file."""
    model = tiny.save(tmp_path / "right")
    with standin(model, tmp_path / "a") as one, standin(model, tmp_path / "b", "--context-length", "16") as other:
        run = of_two_calls(place, *urls(f"{{rollout: ['{one.url}'], greedy: ['{other.url}']}}"))
        (problem,) = problems_of(lambda: check_given_servers(run))
    assert problem.where.path == "$.rollout.urls.greedy[0]" and other.url in problem.text and " 16 " in problem.text
