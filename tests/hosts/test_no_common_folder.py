"""Runs over two hosts that do not all see the run directory: an empty file system of their own lies at its place."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.broken_runs import own
from tests.host_runs import Hosts, agent
from tests.namespaces import Network, network, why_not
from tests.runs import Special, home, numbers, records, write_run

__all__ = ["home", "own"]

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
STEPS = 4
SAVED: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every": 2, "keep": 9}}
LAST = f"checkpoints/step-{STEPS:06d}"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # devices of a host, and pins
    "dp 4": (2, {}),
    "fsdp 4": (2, {"train": {"sharding": "fsdp", "devices": 4}}),
    "tp 2": (1, {"rollout": {"tp": 2, "devices": 2}, "train": {"tp": 2, "devices": 2}}),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    with network(2) as made:
        yield made


@contextmanager
def seen_by(running: Hosts, name: str) -> Iterator[int]:
    """The folder that a host has at the place of the run directory, open: it stays when the host has ended."""
    handle = os.open(f"/proc/{running.agents[name].pid}/root{running.home}/run", os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def sums(checkpoint: Path) -> Mapping[str, Any]:
    """The checksums of a checkpoint's files, the Scheduler's state left out, which has times."""
    found: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: found[name] for name in found if name != "state.json"}


def after_step_2(whole: Path, target: Path) -> None:
    """Make a run directory as that of `whole` was once its second step was saved."""
    shutil.rmtree(target)
    shutil.copytree(whole, target, symlinks=True)
    shutil.rmtree(target / LAST)
    (target / "metrics.jsonl").unlink()


@pytest.mark.parametrize("name", LAYOUTS)
def test_hosts_train_save_and_go_on_as_with_a_common_folder(two: Network, own: Path, name: str) -> None:
    """Bit for bit, and on one host of them to rounding. The one apart writes nothing at the directory's place."""
    devices, pins = LAYOUTS[name]
    run, common = own / "run", own / "common"
    layout = {"allocation": pins, "cluster": {"devices": devices}}
    Hosts(own, SAVED, layout, network=two).ends(0)
    run.rename(common)
    expected = numbers(common)

    running = Hosts(own, SAVED, layout, network=two, apart="b").at_step(1)
    with seen_by(running, "b") as folder:
        output = running.ends(0)
        assert os.listdir(folder) == []
    assert re.findall(r"host (\w) \([\d.]+\) does not see", output) == ["b"]
    assert numbers(run) == expected
    for checkpoint in ("checkpoints/step-000002", LAST):
        assert sums(run / checkpoint) == sums(common / checkpoint)
    check_loads(run / LAST / "actor")
    check_logs(own, output, devices)

    after_step_2(common, run)
    Hosts(own, words=("run", "--resume", str(run)), network=two, apart="b").ends(0)
    assert numbers(run) == {step: expected[step] for step in (2, 3)}
    assert sums(run / LAST) == sums(common / LAST)

    after_step_2(common, run)
    words = ("run", "--resume", str(run), "--replan", "allocation=null", "cluster.nodes=1", "cluster.devices=2")
    Hosts(own, words=words, network=two, names="b", apart="b").ends(0)
    assert numbers(run).keys() == {2, 3}
    for step, metrics in numbers(run).items():
        assert metrics["train/loss"] == pytest.approx(expected[step]["train/loss"], rel=1e-3, abs=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(expected[step]["train/grad_norm"], rel=1e-3)


def check_loads(actor: Path) -> None:
    """transformers reads the weights, and misses none."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(actor, output_loading_info=True)
    found = loaded[1]
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def check_logs(own: Path, output: str, devices: int) -> None:
    """The logs of b's workers are whole on it, with their ends in the run directory."""
    place = re.search(r"their logs are there, in (\S+)", output)
    assert place is not None
    logs = Path(place[1])
    assert logs.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in logs.iterdir()) == [f"worker-{devices + i}.log" for i in range(devices)]
    for log in logs.iterdir():
        told = (own / "run/logs" / log.name).read_text()
        assert str(log) in told
        assert log.read_text()
        assert told.endswith(log.read_text())


def test_a_master_whose_host_is_no_node_writes_for_all(two: Network, own: Path) -> None:
    """No node sees the directory; resumed on hosts that see it, and on others again."""
    layout = {"allocation": LAYOUTS["fsdp 4"][1]}
    output = Hosts(own, SAVED, layout, network=two, apart="ab").ends(0)
    assert len(re.findall(r"host [ab] \([\d.]+\) does not see", output)) == 2
    (own / "run").rename(own / "whole")
    for apart in ("", "ab"):
        (own / "run").mkdir(exist_ok=True)
        after_step_2(own / "whole", own / "run")
        Hosts(own, words=("run", "--resume", str(own / "run")), network=two, apart=apart).ends(0)
        assert numbers(own / "run") == {step: numbers(own / "whole")[step] for step in (2, 3)}
        assert sums(own / "run" / LAST) == sums(own / "whole" / LAST)


@pytest.mark.parametrize("victim", ["worker", "host"])
def test_after_a_loss_the_survivors_save_and_the_run_goes_on(two: Network, own: Path, victim: str) -> None:
    """A worker of the host apart is killed, whose neighbour saves its share from there; or all of that host."""
    running = Hosts(own, network=two, apart="b").at_step(2)
    try:
        killed = running.running.workers()[3] if victim == "worker" else running.agents["b"].pid
        os.kill(killed, signal.SIGKILL)
        error = running.error()
        assert re.search(r"host b \([\d.]+\)", error), error
    finally:
        running.close()
    saved = records(own / "run")[-1]["step"] + 1
    assert (own / f"run/checkpoints/step-{saved:06d}/manifest.json").is_file()
    words = ("run", "--resume", str(own / "run"), f"steps={saved + 2}")
    Hosts(own, words=words, network=two, apart="b").ends(0)
    assert records(own / "run")[-1]["step"] == saved + 1


def test_a_run_that_restarts_by_itself_goes_on_apart(two: Network, own: Path) -> None:
    running = Hosts(own, {"runtime": {"restarts": 1}, "steps": 20}, network=two, apart="b").at_step(3)
    try:
        os.kill(running.running.workers()[2], signal.SIGKILL)
        output = running.ends(0, 120)
    finally:
        running.close()
    assert len(re.findall(r"host b \([\d.]+\) does not see", output)) == 2
    assert [start["restarts"] for start in records(own / "run", "start")] == [0, 1]
    assert set(numbers(own / "run")) == set(range(20))


def test_a_host_with_other_data_is_refused(two: Network, own: Path) -> None:
    """They change once the host of the run has read them."""
    running = Hosts(own, SAVED, network=two, names="")
    with (own / "train.jsonl").open("a") as data:
        data.write("{}\n")
    seen = {"a": "", "b": str(own / "run")}
    for (name, hidden), space in zip(seen.items(), two.spaces, strict=True):
        special = Special(namespace=space, hidden=hidden)
        running.agents[name] = agent(own, running.listen, name, special=special)
    output = " ".join(running.ends(2).split())
    told = rf"\$\.data\.path: host b \([\d.]+\): {own}/train.jsonl has [\d,]+ bytes, and [\d,]+ on the host of the run"
    assert len(re.findall(told, output)) == 1, output
    assert "host a" not in output.partition("$.data.path")[2]


def test_samples_of_a_run_without_training_come_to_the_host_of_the_run(two: Network, own: Path) -> None:
    """All of them, each once, in the file of its worker."""
    graph = {"graph": "generate", "params": {"n": 2, "reward_fn": "rewards:score"}}
    where = {"cluster": {"nodes": 2, "devices": 2}}
    file = write_run(own, "run", graph, where, {"steps": 3})
    listen = "launch={kind: hosts, listen: '" + two.addresses[0] + ":7000', join_seconds: 60}"
    Hosts(own, words=("run", str(file), listen), network=two, apart="b").ends(0)
    files = sorted((own / "run/samples").iterdir())
    assert [path.name for path in files] == [f"worker-{i}.jsonl" for i in range(4)]
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    samples = [(group, place) for group in range(3 * 8) for place in range(2)]
    assert sorted((line["group"], line["sample"]) for line in lines) == samples
