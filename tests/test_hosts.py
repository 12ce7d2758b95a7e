"""Runs over several hosts whose agents dial in: the training of one host, and every end of either side."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.inputs.detect import Gpu, Probe, resolve
from realgraph.runtime.hosts.agent import _look
from realgraph.runtime.hosts.checks import faults, in_order
from realgraph.runtime.hosts.facts import is_public, own_versions, split_address
from realgraph.runtime.hosts.fleet import clock_ahead
from realgraph.runtime.hosts.join_key import make_join_key, read_join_key, write_join_key
from realgraph.runtime.hosts.messages import HostFacts, Look
from realgraph.runtime.master.inbox import _by_our_clock
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.interfaces import address_of_interface, interface_of_address
from realgraph.runtime.wire.protocol import Bye, Done
from tests.broken_runs import own
from tests.host_runs import SHORT, TWO_BY_TWO, Hosts, agent, free_port
from tests.runs import GRPO, Special, finish, home, numbers, records, set_fault, start, write_run
from tests.traces import processes_at, title_of

__all__ = ["home", "own"]

STEPS = {"steps": 4}


@pytest.fixture
def hosts(own: Path) -> Iterator[Hosts]:
    running = Hosts(own)
    yield running
    running.close()


@pytest.mark.slow
def test_two_hosts_train_as_one_does_and_all_end_together(own: Path, home: Path) -> None:
    running = Hosts(own, STEPS)
    output = running.ends(0)
    assert "host a (127.0.0.1) has joined: 1 of 2" in output or "host b (127.0.0.1) has joined: 1 of 2" in output
    assert all(one.wait() == 0 for one in running.agents.values())
    assert not (own / "run/join.key").exists()
    finish(own, "run", str(write_run(own, "one", GRPO, STEPS, {"cluster": {"devices": 4}})), name="one")
    found, expected = numbers(own / "run"), numbers(own / "one")
    assert found.keys() == expected.keys() == set(range(4))
    for step, metrics in expected.items():
        for name in ("train/loss", "train/grad_norm", "reward/mean"):
            if name in metrics:
                assert found[step][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), (step, name)


@pytest.mark.slow
def test_a_worker_a_host_and_an_agent_that_are_killed_are_named_and_the_run_goes_on(hosts: Hosts) -> None:
    """An agent's end ends its workers with it."""
    hosts.at_step(2)
    os.kill(hosts.running.workers()[3], signal.SIGKILL)
    error = hosts.error()
    assert re.search(r"worker 3 was lost .*: was killed by SIGKILL, on host [ab] \(127\.0\.0\.1\)", error), error
    saved = records(hosts.running.folder)[-1]["step"] + 1
    again = Hosts(hosts.home, words=("run", "--resume", str(hosts.home / "run"), f"steps={saved + 100_000}"))
    try:
        again.at_step(saved + 2)
        os.kill(again.agents["b"].pid, signal.SIGKILL)
        error = again.error()
        assert re.search(r"host b \(127\.0\.0\.1\)", error), error
    finally:
        again.close()


@pytest.mark.slow
def test_a_call_past_its_deadline_shows_where_the_workers_of_all_hosts_are(own: Path) -> None:
    """Stacks come over the agents."""
    running = Hosts(own, {"runtime": {"min_deadline_seconds": 5}}).at_step(2)
    try:
        set_fault(own, compute_sleep=1000)
        running.running.until((own / "computing").exists, "the long call")
        assert "has not ended on workers 0, 1, 2, 3 after" in running.error()
        output = running.running.output()
        here = r"workers? [0-3, ]+ (is|are) here \(most recent call first\):\n    .*/rewards.py:\d+ in spoil\n"
        assert re.search(here, output), output
        assert "no stack of" not in output
        detail = (own / "run/logs/failure.txt").read_text()
        assert all(f"stacks of worker {worker}:\n" in detail for worker in range(4))
        assert "in spoil" in detail
    finally:
        running.close()


SILENT = Special(limits={"hosts.fleet.SILENT_SECONDS": 2.0})  # an agent that has not been heard of


@pytest.mark.slow
def test_a_host_that_stands_still_gives_no_stacks_and_is_not_waited_for(own: Path) -> None:
    running = Hosts(own, {"runtime": {"heartbeat_seconds": 0.2, "lost_after_seconds": 2.5}}, special=SILENT)
    running.at_step(2)
    stopped = [running.agents["b"].pid, *(pid for worker, pid in running.running.workers().items() if worker > 1)]
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert running.running.wait(60) == 3
        said = r"no stack of worker [23]: host b \(127.0.0.1\) does not answer"
        assert re.search(said, running.running.output()), running.running.output()
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # an agent that goes on ends its workers first
                os.kill(pid, signal.SIGCONT)
        for one in running.agents.values():
            one.wait(60)
        running.close()
    running.traces.gone(10)


def test_an_agent_that_is_interrupted_ends_its_host_alone_and_says_so(hosts: Hosts) -> None:
    hosts.at_step(1)
    os.kill(hosts.agents["a"].pid, signal.SIGINT)
    assert "on host a (127.0.0.1), which leaves: its agent was interrupted" in hosts.error()
    assert hosts.agents["a"].wait() == 130


def test_nothing_outlives_a_master_that_is_killed(hosts: Hosts) -> None:
    hosts.at_step(1)
    os.kill(hosts.running.pid, signal.SIGKILL)
    hosts.running.wait()
    for one in hosts.agents.values():
        assert one.wait(20) == 1
        assert "is gone: ending" in one.output()
    hosts.traces.gone()


def test_a_host_too_many_is_sent_away(hosts: Hosts) -> None:
    hosts.running.until(lambda: "has joined: 2 of 2" in hosts.running.output(), "two hosts")
    third = agent(hosts.home, hosts.listen, "c") if (hosts.home / "run/join.key").exists() else None
    hosts.at_step(1)
    hosts.running.interrupt()
    hosts.ends(130)
    if third is not None:
        assert third.wait(30) == 2
        assert re.search(r"the run has its 2 hosts: a, b|the key file can't be read", third.output())


@pytest.mark.slow
def test_a_host_that_never_joins_is_missed_and_the_directory_is_free_again(own: Path) -> None:
    for names, found in (("a", "1 of 2 hosts have joined (a)"), ("", "0 of 2 hosts have joined (none)")):
        running = Hosts(own, {"launch": {"join_seconds": 2}}, names=names)
        assert f"{found}: no more within 2 s (launch.join_seconds)" in running.error()
        assert [one.wait() for one in running.agents.values()] == [0] * len(names)


@pytest.mark.slow
def test_a_host_whose_agent_was_killed_before_all_had_joined_joins_again(own: Path) -> None:
    running = Hosts(own, STEPS, names="a", special=SILENT)
    try:
        running.running.until(lambda: "host a" in running.running.output(), "host a")
        os.kill(running.agents["a"].pid, signal.SIGKILL)
        running.agents["a"].wait()
        time.sleep(SILENT.limits["hosts.fleet.SILENT_SECONDS"] + 1)
        running.agents = {name: agent(own, running.listen, name) for name in "ab"}
        running.ends(0)
    finally:
        running.close()


def test_one_host_that_joins_twice_is_an_error_of_its_user(own: Path) -> None:
    running = Hosts(own, names=["a"])
    second = agent(own, running.listen, "a")
    output = running.ends(2)
    second.wait(30)
    assert "host a has joined 2 times" in output
    assert "start one agent on each host" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("open", r"others can read the key file \(its mode is 644\)"),
        ("missing", "the key file can't be read: No such file or directory"),
        ("empty", "no join key"),
        ("reused", "does not take this key within 2 s"),
        ("nobody", r"nothing listens on 127\.0\.0\.1:\d+"),
        ("address", "'here' is no address"),
    ],
)
def test_an_agent_that_cannot_join_says_why(own: Path, case: str, wanted: str) -> None:
    listen, key = f"127.0.0.1:{free_port()}", own / "join.key"
    write_join_key(make_join_key(make_keys()), key)
    running = None
    match case:
        case "open":
            key.chmod(0o644)
        case "missing":
            key.unlink()
        case "empty":
            key.write_text("realgraph-join-1 a b c\n")
        case "reused":
            running = Hosts(own, names="")
            listen = running.listen
        case "address":
            listen = "here"
    one = start(own, "worker", "--connect", listen, "--key", str(key), name="agent", special=SHORT)
    try:
        assert one.wait() == 2
        assert re.search(wanted, one.output()), one.output()
    finally:
        if running is not None:
            running.close()


def test_a_key_that_is_read_while_a_new_one_is_written_is_one_of_the_two(tmp_path: Path) -> None:
    """Whoever waits for the file, and reads it at once, finds all of it."""
    path, n_read = tmp_path / "join.key", 0
    write_join_key(make_join_key(make_keys()), path)

    def write() -> None:
        for _ in range(300):
            write_join_key(make_join_key(make_keys()), path)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            read_join_key(str(path))
            n_read += 1
        writing.result()
    assert n_read > 10
    assert [entry.name for entry in tmp_path.iterdir()] == ["join.key"]


def test_a_listen_address_of_another_host_is_refused_at_its_place(own: Path) -> None:
    launch = {"launch": {"kind": "hosts", "listen": "192.0.2.1:7000"}}
    run = finish(own, "run", str(write_run(own, "run", GRPO, STEPS, TWO_BY_TWO, launch)), code=2)
    assert "$.launch.listen: this host can't listen on 192.0.2.1:7000" in run.output()
    launch = {"launch": {"kind": "hosts", "listen": "8.8.8.8:7000"}}
    run = finish(own, "run", str(write_run(own, "other", GRPO, STEPS, TWO_BY_TWO, launch)), name="other", code=2)
    assert "8.8.8.8 is a public address" in run.output()


def test_the_secret_of_the_join_key_is_on_no_command_line_and_in_no_log(hosts: Hosts) -> None:
    hosts.running.until((hosts.home / "run/join.key").exists, "the key")
    secret = read_join_key(str(hosts.home / "run/join.key")).client.secret
    hosts.at_step(1)
    said = "".join(title_of(pid) for pid in processes_at(hosts.home))
    files = [path for path in (hosts.home / "run").rglob("*") if path.is_file()]
    assert files
    assert secret not in said
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in hosts.running.output() + "".join(one.output() for one in hosts.agents.values())


# --- what hosts are ---------------------------------------------------------------------------------------------------

H100 = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 85_899_345_920)


def facts(name: str, gpu: Gpu = H100, **changes: Any) -> HostFacts:
    machine = Probe(64, 2_000_000_000_000, (gpu,) * 8)
    return replace(HostFacts(name, f"id of {name}", "10.0.0.1", machine, own_versions()), **changes)


def cluster(nodes: int = 2, **changes: Any) -> Cluster:
    spec = ClusterSpec(nodes=nodes, devices=8, kind="H100-SXM", memory_gb=85.0, host_memory_gb=1900.0)
    return resolve(replace(spec, **changes), Probe(1, 0))


def said(hosts: list[HostFacts], of: Cluster, trusted: bool = False) -> list[str]:
    return [problem.text for problem in faults(hosts, of, own_versions(), trusted_network=trusted)]


def test_hosts_become_nodes_by_their_kind_and_name_the_masters_first() -> None:
    names = [host.name for host in in_order([facts("n10"), facts("n9"), facts("n1")], cluster(3), "id of n9")]
    assert names == ["n9", "n1", "n10"]
    mixed = cluster(2)
    assert not said([facts("a"), facts("b")], mixed)


def test_every_fault_of_every_host_is_said_at_once() -> None:
    few = Probe(64, 1_000_000_000_000, (H100,) * 4)
    hosts = [
        facts("a"),
        facts("a"),
        replace(facts("b"), machine=few),
        facts("c", A100),
        replace(facts("d"), versions={**own_versions(), "torch": "2.9.0"}),
        replace(facts("e"), address="8.8.8.8"),
        replace(facts("f"), machine=replace(few, gpus=(), gpu_error="nvidia-smi failed")),
        replace(facts("g"), machine=replace(few, gpus=(replace(H100, memory_bytes=10**10),) * 8)),
    ]
    found = said(hosts, cluster(8))
    assert found == [
        "host a has joined 2 times",
        "the plan is for 8 x H100-SXM a node, and host b has 4 x NVIDIA H100 80GB HBM3",
        "the plan counts on 1900.0 GB of memory a host, and host b has 1000.0 GB",
        "the plan is for 8 x H100-SXM a node, and host c has 8 x NVIDIA A100-SXM4-80GB",
        f"host d has torch 2.9.0, and this host {own_versions()['torch']}",
        "host e would listen on 8.8.8.8, a public address",
        "the GPUs of host f can't be read: nvidia-smi failed",
        "the plan counts on 1900.0 GB of memory a host, and host f has 1000.0 GB",
        "the plan counts on 85.0 GB a device, and a GPU of host g has 10.0 GB",
        "the plan counts on 1900.0 GB of memory a host, and host g has 1000.0 GB",
    ]
    assert said([replace(facts("a"), address="8.8.8.8"), facts("b")], cluster(2), trusted=True) == []
    twins = [facts("a"), replace(facts("a"), id="another")]
    assert said(twins, cluster(2)) == ["2 hosts are named a"]


def test_a_host_says_what_it_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "token").write_text("abc")
    paths = (str(tmp_path / "model"), str(tmp_path / "data.jsonl"))
    found = _look(Look(paths, str(tmp_path / "token"), "abc"))
    assert (found.missing, found.shares_run_folder) == ((str(tmp_path / "data.jsonl"),), True)
    assert not _look(Look(paths, str(tmp_path / "token"), "abd")).shares_run_folder
    assert _look(Look((), "", "", variables=("PATH", "NO_SUCH_KEY"))).unset == ("NO_SUCH_KEY",)
    assert not _look(Look(paths, str(tmp_path / "none"), "abc")).shares_run_folder


def test_interfaces_and_addresses() -> None:
    assert address_of_interface("lo") == "127.0.0.1"
    assert (interface_of_address("127.0.0.1"), interface_of_address("192.0.2.1")) == ("lo", "")
    with pytest.raises(ConfigError, match="no network interface 'nope'"):
        address_of_interface("nope")
    assert split_address("node-1:7000") == ("node-1", 7000)
    for text in ("7000", "host:", "host:0", "host:70000", ":7000", "[fd00::1]:7000"):
        with pytest.raises(ConfigError, match="is no address"):
            split_address(text)
    assert is_public("8.8.8.8")
    assert not any(map(is_public, ("127.0.0.1", "10.1.2.3", "192.168.0.1")))


def test_status_shows_workers_and_hosts_while_the_run_lives_and_no_longer(hosts: Hosts) -> None:
    hosts.at_step(2)
    folder = str(hosts.home / "run")
    file = hosts.home / "run/status.json"
    hosts.running.until(lambda: file.exists() and '"step_seconds":0.0,' not in file.read_text(), "a step's seconds")
    shown = finish(hosts.home, "status", folder, name="status").output()
    assert re.search(r"grpo: step \d+ of 100000 done, process \d+", shown), shown
    assert re.search(r"[\d.]+ s a step, about .* to the end", shown)
    rows = [line.split() for line in shown.splitlines() if re.match(r"\d ", line)]
    assert [row[:3] for row in rows] == [[str(i), name, "(127.0.0.1)"] for i, name in enumerate("aabb")]
    assert all(float(row[-2]) > 0.01 and row[-1] == "GB" for row in rows)
    hosts.running.interrupt()
    hosts.ends(130)
    assert not (hosts.home / "run/status.json").exists()
    assert "no process runs it; newest checkpoint: " in finish(hosts.home, "status", folder, name="ended").output()
    nothing = finish(hosts.home, "status", str(hosts.home), name="nothing", code=2).output()
    assert "this is not a run directory" in nothing


def test_times_of_a_host_whose_clock_is_ahead_become_the_masters() -> None:
    """A question takes as long as its answer, and the host thinks about it for 2 s."""
    assert clock_ahead((100.0, 107.25), (109.25, 102.5)) == pytest.approx(7.0)
    done = Done(3, 1, "train", started=107.0, ended=109.0)
    ours = _by_our_clock(done, 7.0)
    assert isinstance(ours, Done) and (ours.started, ours.ended) == (100.0, 102.0)
    assert _by_our_clock(done, 0.0) is done
    assert _by_our_clock(Bye(3), 7.0) == Bye(3)
