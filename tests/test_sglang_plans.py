"""Runs on SGLang servers as the run file asks for them and the planner places them: every mistake with its place."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realgraph.commands.run import RunOptions, run_command
from realgraph.planner.costs.generate.decode import cache_bytes_per_token
from realgraph.planner.costs.memory.memory import generation
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.options.calls import setting_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.request.engine_support import SGLANG
from realgraph.run.given_servers import check_given_servers
from realgraph.run.planning import plan_for
from realgraph.run.requests import request_for
from realgraph.run.running import PreparedRun, prepare
from realgraph.run_file.compose import check_run
from tests import tiny
from tests.run_texts import RUN, place, problems_of, refused
from tests.sglang_server import free_port, standin

__all__ = ["place"]
URL = "http://127.0.0.1:30000"
ON_SERVERS = ("rollout={engine: sglang, python: /bin/sh}", "cluster={kind: cpu, devices: 4}")
PINNED = (*ON_SERVERS, "allocation={rollout: {first: 2, devices: 2}}")


@pytest.mark.parametrize(
    ("section", "path", "text"),
    [
        ("{engine: sglnag}", "$.rollout.engine", "one of embedded, sglang"),
        ("{python: /bin/sh}", "$.rollout.python", "rollout.engine is embedded"),
        (f"{{urls: ['{URL}']}}", "$.rollout.urls", "rollout.engine is embedded"),
        ("{server_args: {log_level: info}}", "$.rollout.server_args", "rollout.engine is embedded"),
        ("{engine: sglang}", "$.rollout.engine", "nothing says where SGLang is"),
        (f"{{engine: sglang, python: /bin/sh, urls: ['{URL}']}}", "$.rollout.urls", "python has servers started"),
        ("{engine: sglang, python: /no/such/python}", "$.rollout.python", "/no/such/python is not there"),
        ("{engine: sglang, python: ./run.yaml}", "$.rollout.python", "run.yaml can't be run"),
        ("{engine: sglang, urls: ['ftp://here']}", "$.rollout.urls[0]", "'ftp://here' is no address"),
        ("{engine: sglang, urls: ['http://me:secret@here']}", "$.rollout.urls[0]", "holds a password"),
        (f"{{engine: sglang, urls: ['{URL}', '{URL}']}}", "$.rollout.urls[1]", "is named twice"),
        (f"{{engine: sglang, urls: ['{URL}'], server_args: {{a: 1}}}}", "$.rollout.server_args", "of servers that are"),
        ("{engine: sglang, python: /bin/sh, server_args: {port: 3}}", "$.rollout.server_args.port", "set by realgraph"),
        ("{engine: sglang, python: /bin/sh, server_args: {tp-size: 2}}", "$.rollout.server_args.tp-size", "the plan"),
        ("{call_args: {rollout: {log_level: info}}}", "$.rollout.call_args", "rollout.engine is embedded"),
        (
            "{engine: sglang, python: /bin/sh, call_args: {rollout: {--dp: 3}}}",
            "$.rollout.call_args.rollout.--dp",
            "the plan",
        ),
        (
            "{engine: sglang, python: /bin/sh, call_args: {rollout: {kv-cache-dtype: fp8_e5m2}}}",
            "$.rollout.call_args.rollout.kv-cache-dtype",
            "one kv_cache_dtype of all servers",
        ),
        (
            "{engine: sglang, python: /bin/sh, server_args: {skip_tokenizer_init: true}}",
            "$.rollout.server_args.skip_tokenizer_init",
            "without its tokenizer a server breaks off streams",
        ),
        ("{weights: disk}", "$.rollout.weights", "rollout.engine is embedded"),
        (f"{{engine: sglang, urls: ['{URL}'], weights: broadcast}}", "$.rollout.weights", "only those that realgraph"),
        ("{engine: sglang, python: /bin/sh, interrupt: keep_kv}", "$.rollout.interrupt", "for the embedded engine"),
    ],
)
def test_mistakes_of_the_section_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, section: str, path: str, text: str
) -> None:
    monkeypatch.chdir(place)
    (problem,) = refused(place, f"rollout={section}")
    assert (problem.where.path, text in problem.text, bool(problem.hint or "one of" in text)) == (path, True, True)


def test_passwords_in_urls_are_not_shown(place: Path) -> None:
    (problem,) = refused(place, "rollout={engine: sglang, urls: ['http://me:secret@here']}")
    assert "secret" not in problem.text + problem.hint


def prepared(place: Path, *overrides: str) -> PreparedRun:
    if (place / "model" / "config.json").stat().st_size < 100:
        tiny.save(place / "model")
    return prepare(place / "run.yaml", overrides, None)


@pytest.mark.parametrize(
    ("overrides", "path", "text"),
    [
        ((*ON_SERVERS, "allocation={rollout: {devices: 4}}"), "$.allocation", "have all 4 devices"),
        ((*PINNED, "allocation.train={first: 2, devices: 1}"), "$.allocation.train", "pinned to devices that SGLang"),
        ((*PINNED, "constraints={colocated: true}"), "$.constraints.colocated", "that no other call has"),
        (
            (*PINNED, "allocation.rollout.pp=2"),
            "$.allocation.rollout.pp",
            "generate under dp, tp and ep only",
        ),
        (
            (*PINNED, "graph=raft", "calls.rollout.top_p=0.9"),
            "$.calls.rollout.top_p",
            "log-probabilities without top_p",
        ),
        ((*PINNED, "models.actor.dtype=float64"), "$.models.actor.dtype", "SGLang servers don't compute in float64"),
        (
            (*PINNED, "models.actor.routing_replay=true"),
            "$.models.actor.routing_replay",
            "routing_replay is for mixtures",
        ),
    ],
)
def test_what_servers_can_not_do_is_refused_before_any_starts(
    place: Path, overrides: tuple[str, ...], path: str, text: str
) -> None:
    problems = problems_of(lambda: prepared(place, *overrides))
    assert any(problem.where.path == path and text in problem.text for problem in problems), problems


# --- servers that run already -----------------------------------------------------------------------------------------


def on_urls(place: Path, *urls: str) -> tuple[PreparedRun, int]:
    """A run on servers that are given, one a device, and the line of the first of them."""
    listed = "".join(f"    - {url}\n" for url in urls)
    more = f"rollout:\n  engine: sglang\n  urls:\n{listed}cluster: {{kind: cpu, devices: 4}}\n"
    (place / "run.yaml").write_text(f"{RUN}{more}allocation: {{rollout: {{first: 2, devices: {len(urls)}}}}}\n")
    return prepared(place), RUN.count("\n") + 4


def test_given_servers_that_the_run_does_not_need_are_refused_before_anything_starts(
    place: Path, tmp_path: Path
) -> None:
    """With file and line, the address, both values and a fix; also where their model can't be seen from here."""
    right, wrong = tiny.save(tmp_path / "right"), tiny.save(tmp_path / "llama", "llama", vocab_size=70)
    different = ("--context-length", "32", "--dtype", "bfloat16", "--tp-size", "4")
    with standin(right, tmp_path / "a") as one, standin(wrong, tmp_path / "b", *different) as other:
        (wrong / "config.json").unlink()
        run, line = on_urls(place, one.url, other.url)
        problems = problems_of(lambda: check_given_servers(run))
        assert {(Path(p.where.file).name, p.where.line) for p in problems} == {("run.yaml", line + 1)}
        assert {problem.where.path for problem in problems} == {"$.rollout.urls[1]"}
        sizes = ((" 70,", str(tiny.VOCABULARY)), ("bfloat16", "float32"), (" 32 ", "512"), ("4", "1"))
        for problem, values in zip(problems, (("llama", "qwen3"), *sizes), strict=True):
            assert other.url in problem.text and problem.hint and all(value in problem.text for value in values)
        for options in (RunOptions(), RunOptions(dry_run=True)):
            again = problems_of(partial(run_command, place / "run.yaml", (), options))
            assert again == problems
        assert not run.folder.root.exists()
        run, _ = on_urls(place, one.url)
        assert check_given_servers(run) == []


def test_given_servers_that_do_not_answer_are_named(place: Path, tmp_path: Path) -> None:
    """One that is not there yet is waited for by its worker; one with a key is of no use."""
    model = tiny.save(tmp_path / "right")
    run, line = on_urls(place, absent := f"http://127.0.0.1:{free_port()}")
    (warning,) = check_given_servers(run)
    assert warning.where.line == line and absent in warning.text and "runtime.start_seconds" in warning.hint
    with standin(model, tmp_path / "a", "--api-key", "secret") as locked:
        run, _ = on_urls(place, locked.url, absent)
        (problem,) = problems_of(lambda: check_given_servers(run))
    assert "401" in problem.text and "--api-key" in problem.hint


@pytest.mark.parametrize(("n", "pin"), [(3, "{first: 2, devices: 2}"), (1, "{first: 2, devices: 2, dp: 2}")])
def test_as_many_servers_are_given_as_the_call_has_replicas(place: Path, n: int, pin: str) -> None:
    given = f"rollout={{engine: sglang, urls: {[f'{URL}{i}' for i in range(n)]}}}"
    (problem,) = problems_of(lambda: prepared(place, given, ON_SERVERS[1], f"allocation={{rollout: {pin}}}"))
    assert (problem.where.path, f"2 devices, and {n} servers" in problem.text) == ("$.rollout.urls", True)


@pytest.mark.parametrize(("n", "pin", "layout"), [(0, "tp: 2", (1, 2)), (1, "dp: 1", (1, 2)), (2, "dp: 2", (2, 1))])
def test_a_server_has_the_tensor_parallel_ranks_of_the_plan(
    place: Path, n: int, pin: str, layout: tuple[int, int]
) -> None:
    given = f"rollout={{engine: sglang, urls: {[f'{URL}{i}' for i in range(n)]}}}" if n else ON_SERVERS[0]
    run = prepared(place, given, ON_SERVERS[1], f"allocation={{rollout: {{first: 2, devices: 2, {pin}}}}}")
    served = run.job.plan.allocations["rollout"].layout
    assert (served.dp, served.tp) == layout
    assert not validate(run.job.plan, run.request)


def write_llama_70b(place: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "vocab_size": 128256}
    config |= {"num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64}
    config |= {"num_key_value_heads": 8, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    (place / "model" / "config.json").write_text(json.dumps(config))


def test_the_planner_cuts_what_does_not_fit_one_device_of_a_server(place: Path) -> None:
    """Llama-3-70B in bf16 on GPUs of 80 GB."""
    write_llama_70b(place)
    gpus = ("cluster={kind: H100-SXM, devices: 8, nodes: 8}", "allocation={rollout: {first: 32, devices: 32}}")
    checked = check_run(place / "run.yaml", (ON_SERVERS[0], *gpus), weights=False)
    layout = plan_for(checked, request_for(checked)).allocations["rollout"].layout
    assert layout.tp >= 2 and layout.dp * layout.tp == 32


def test_a_float8_cache_takes_half_the_bytes_of_bfloat16(place: Path) -> None:
    tiny.save(place / "model")
    arguments = ("{}", "{kv-cache-dtype: fp8_e5m2}")
    asked = [(*PINNED, "models.actor.dtype=bfloat16", f"rollout.server_args={one}") for one in arguments]
    requests = [request_for(check_run(place / "run.yaml", overrides)) for overrides in asked]
    layout, costs = Layout(DeviceMesh(2, 1)), []
    for request in requests:
        setting = setting_of(request, "rollout", layout, request.cluster)
        model, role = request.model("rollout"), request.role("rollout")
        held = generation(model, role, layout, 4096, request.engine.cache_bytes)
        costs.append((held.kv_cache, cache_bytes_per_token(setting)))
        assert setting_of(request, "train", layout, request.cluster).engine.cache_bytes is None
    assert [whole / half for whole, half in zip(*costs, strict=True)] == [2, 2]


@pytest.mark.parametrize("staleness", [0, 2])
def test_servers_share_their_devices_with_no_call(place: Path, staleness: int) -> None:
    run = prepared(place, *PINNED, f"staleness={staleness}")
    allocations = run.job.plan.allocations
    assert allocations["rollout"].layout.mesh == DeviceMesh(2, 2)
    assert all(set(one.layout.mesh.devices) <= {0, 1} for name, one in allocations.items() if name != "rollout")
    assert not validate(run.job.plan, run.request)
    moved = msgspec.structs.replace(allocations["rollout"].layout, mesh=DeviceMesh(0, 2))
    beside = {**allocations, "rollout": msgspec.structs.replace(allocations["rollout"], layout=moved)}
    problems = validate(msgspec.structs.replace(run.job.plan, allocations=beside), run.request)
    assert any("SGLang servers share none" in problem.text for problem in problems)


GPUS = "cluster={kind: H100-SXM, devices: 4}"


@pytest.mark.parametrize(
    ("weights", "overrides", "transport"),
    [
        ("auto", PINNED, "host"),
        ("broadcast", PINNED, "device"),
        ("auto", (*PINNED, GPUS), "device"),
        ("disk", (*PINNED, GPUS), "host"),
        ("auto", (*PINNED, GPUS, f"rollout={{python: null, urls: ['{URL}', '{URL}1']}}"), "host"),
    ],
)
def test_new_weights_are_broadcast_where_that_is_allowed_and_faster(
    place: Path, weights: str, overrides: tuple[str, ...], transport: str
) -> None:
    if (place / "model" / "config.json").stat().st_size < 100:
        tiny.save(place / "model")
    checked = check_run(place / "run.yaml", (*overrides, f"rollout.weights={weights}"))
    request = request_for(checked)
    plan = plan_for(checked, request)
    assert plan.reallocation_transport["rollout"] == transport
    assert not validate(plan, request)


def test_no_broadcast_leaves_its_host(place: Path) -> None:
    two = "cluster={kind: H100-SXM, devices: 4, nodes: 2}"
    (problem,) = problems_of(lambda: prepared(place, *PINNED, two, "rollout.weights=broadcast"))
    assert (problem.where.path, "on one host only" in problem.text) == ("$.rollout.weights", True)


def test_mixtures_do_not_replay_what_servers_do_not_tell(place: Path) -> None:
    assert not SGLANG.records_routes
    tiny.save(place / "model", "qwen3_moe")
    problems = problems_of(lambda: prepared(place, *PINNED, "models.actor.routing_replay=true"))
    assert any("do not tell which experts" in problem.text for problem in problems)


def written(place: Path, **changes: Any) -> str:
    """The run file's text with other sections."""
    return (place / "run.yaml").read_text() + "\n".join(f"{key}: {json.dumps(value)}" for key, value in changes.items())


def test_mistakes_have_the_line_of_the_file(place: Path) -> None:
    text = written(place, rollout={"engine": "sglang", "python": "/bin/sh", "urls": [URL]})
    (place / "run.yaml").write_text(text)
    (problem,) = refused(place)
    assert (problem.where.file, problem.where.line) == (str(place / "run.yaml"), text.count("\n") + 1)


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pin", "layout"), [("", (2, 1, 1)), ("tp: 2", (1, 2, 1)), ("tp: 2, ep: 2", (1, 2, 2))])
def test_a_pin_spreads_experts_over_the_ranks_of_a_server(place: Path, pin: str, layout: tuple[int, int, int]) -> None:
    tiny.save(place / "model", "qwen3_moe")
    run = prepared(place, *ON_SERVERS, f"allocation={{rollout: {{first: 2, devices: 2, {pin}}}}}")
    plan = run.job.plan
    served = plan.allocations["rollout"].layout
    assert (served.dp, served.tp, served.ep) == layout
    assert not validate(plan, run.request)
    spread = msgspec.structs.replace(served, dp=2, tp=1, ep=2)
    changed = {**plan.allocations, "rollout": msgspec.structs.replace(plan.allocations["rollout"], layout=spread)}
    problems = validate(msgspec.structs.replace(plan, allocations=changed), run.request)
    (problem,) = [one for one in problems if one.where.path == "$.allocations.rollout.layout.ep"]
    assert "SGLang servers spread experts over the tensor-parallel ranks of one replica" in problem.text


@pytest.mark.parametrize("pin", ["ep: 2", "dp: 2, ep: 2", "tp: 1, ep: 2"])
def test_experts_of_a_server_are_not_spread_over_others(place: Path, pin: str) -> None:
    tiny.save(place / "model", "qwen3_moe")
    problems = problems_of(
        lambda: prepared(place, *ON_SERVERS, f"allocation={{rollout: {{first: 2, devices: 2, {pin}}}}}")
    )
    (problem,) = [one for one in problems if one.where.path == "$.allocation.rollout.ep"]
    assert "ep 2 does not divide tp 1" in problem.text and problem.hint == "set tp to 2, or to a multiple of it"


@pytest.mark.parametrize("ep", [1, 4])
def test_the_planner_gives_experts_the_ranks_that_it_finds(place: Path, ep: int) -> None:
    """Qwen3-30B-A3B on GPUs: by itself it spreads none over servers, nor over the ranks of one."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048}
    config |= {"num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
    config |= {"num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    config |= {"max_position_embeddings": 40960, "torch_dtype": "bfloat16", "vocab_size": 151936}
    (place / "model" / "config.json").write_text(json.dumps(config))
    pin = "{first: 32, devices: 32}" if ep == 1 else f"{{first: 32, devices: 32, ep: {ep}}}"
    gpus = ("cluster={kind: H100-SXM, devices: 8, nodes: 8}", f"allocation={{rollout: {pin}}}")
    checked = check_run(place / "run.yaml", (ON_SERVERS[0], *gpus), weights=False)
    request = request_for(checked)
    plan = plan_for(checked, request)
    layout = plan.allocations["rollout"].layout
    assert layout.ep == ep and layout.tp % ep == 0 and layout.dp * layout.tp == 32
    assert not validate(plan, request)
