"""Decode steps over SGLang's HTTP interface, against a stand-in that sleeps: the arithmetic and the errors, no more."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.planner.costs.calibrate.measurements import config_json, toy_model
from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.inputs.detect import Probe, resolve
from realgraph.planner.inputs.devices import device_kind
from realgraph.profile.sglang import holds, open_server, prompt, sglang_costs, step_seconds

NODE = resolve(ClusterSpec(kind="H100-SXM", devices=2), Probe(cores=2, host_memory_bytes=8_000_000_000))
MODEL = toy_model(1024, 4, 32768)
BASE, PER_SEQUENCE = 16e-4, 16e-6  # seconds of the stand-in's decode step


class StandIn(ThreadingHTTPServer):
    """Answers as SGLang does; `args` is its /get_server_info."""

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.args: dict[str, Any] = {"tp_size": 2, "max_req_input_len": 600}
        self.missing = 0  # tokens that an answer lacks
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    @property
    def stand_in(self) -> StandIn:
        assert isinstance(self.server, StandIn)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the screen."""

    def _answer(self, value: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self) -> None:
        known: dict[str, Any] = {"/get_model_info": {"model_path": str(self.stand_in.model)}}
        known["/get_server_info"] = self.stand_in.args
        self._answer(known.get(self.path, {}), 200 if self.path in known else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        new, running = body["sampling_params"]["max_new_tokens"], len(body["input_ids"])
        time.sleep(0.01 + new * (BASE + PER_SEQUENCE * running))
        self._answer([{"meta_info": {"completion_tokens": new - self.stand_in.missing}} for _ in range(running)])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    (tmp_path / "config.json").write_text(json.dumps(config_json(MODEL, "bfloat16")))
    found = StandIn(tmp_path)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    thread.join(20)
    found.server_close()


def problem(url: str) -> str:
    with pytest.raises(ConfigError) as raised:
        open_server(url)
    return str(raised.value.problems[0])


def test_a_step_is_what_longer_answers_take_longer(server: StandIn) -> None:
    found = open_server(server.url + "/")
    assert (found.model, found.tp, found.longest) == (MODEL, 2, 600)
    for running in (1, 64):
        assert step_seconds(found, running, 16) == pytest.approx(BASE + PER_SEQUENCE * running, rel=0.5)


def test_a_server_is_asked_without_the_proxies_of_the_environment(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="refused"):
        urllib.request.build_opener().open(server.url + "/get_server_info", timeout=20)  # by the proxy
    assert step_seconds(open_server(server.url), 1, 16) > 0


def test_the_server_s_steps_take_the_place_of_the_engine_s(server: StandIn) -> None:
    start = device_kind("H100-SXM").costs
    costs, stage = sglang_costs(start, open_server(server.url), NODE)
    assert stage.count == 4  # contexts of 4,096 do not fit this server
    assert stage.error < 0.5
    assert costs.gemm == start.gemm
    assert costs.step_seconds != start.step_seconds


def test_what_can_t_be_measured_is_told(server: StandIn) -> None:
    assert "no SGLang server answers /get_model_info" in problem("http://127.0.0.1:9")
    for url in ("server", "127.0.0.1:30000", "file:///etc"):
        assert f"command line: --sglang: {url!r} is no address of a server" in problem(url)
    server.args = {"tp_size": "two"}
    assert "/get_server_info answered something else" in problem(server.url)
    server.args = {"max_req_input_len": 100}
    with pytest.raises(ConfigError, match="requests of 100 tokens at most"):
        sglang_costs(device_kind("H100-SXM").costs, open_server(server.url), NODE)
    server.args = {"tp_size": 2, "dp_size": 2}
    assert "replicas" in problem(server.url)
    server.args = {"quantization": "awq"}
    assert "'awq'" in problem(server.url)
    server.args = {"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}
    found = open_server(server.url)
    assert (found.weight_bytes, found.cache_bytes) == (1, 1)
    server.missing = 1
    with pytest.raises(ConfigError) as raised:
        step_seconds(open_server(server.url), 2, 16)
    assert "answers of [0]" in str(raised.value.problems[0])


def test_prompts_share_no_beginning() -> None:
    for vocabulary in (400, 32768):
        prompts = [prompt(number, 16, vocabulary) for number in range(256)]
        assert len({one[0] for one in prompts}) == 256
        assert all(0 <= token < vocabulary for one in prompts for token in one)
    assert len(prompt(3, 512, 32768)) == 512


def test_no_more_is_asked_for_than_fits_at_once(server: StandIn) -> None:
    """Requests that wait would be counted as time of steps."""
    server.args = {"max_req_input_len": 600, "max_running_requests": 8, "max_total_num_tokens": 5000}
    found = open_server(server.url)
    assert holds(found, 8, 512) and not holds(found, 9, 512) and not holds(found, 8, 600)
    server.args["max_total_num_tokens"] = 8 * 552 - 1
    assert not holds(open_server(server.url), 8, 512)
