"""`realgraph doctor`: what is made of facts, as properties; and this machine for real, with and without torch."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from realgraph.planner.inputs.detect import Gpu, Probe
from realgraph.runtime.doctor.checks import between, findings, together
from realgraph.runtime.doctor.facts import (
    UNLIMITED,
    Disk,
    HostReport,
    Network,
    PairReport,
    ProcessLimits,
    TorchFacts,
)
from realgraph.runtime.doctor.probes import look_at_disk, look_at_network
from realgraph.runtime.doctor.session import rounds
from tests.host_runs import free_port
from tests.test_cli import NO_TORCH
from tests.traces import processes_at

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30)
VERSIONS = {
    "python": "3.11.7",
    "realgraph": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.2.0",
    "pyzmq": "27.1.0",
    "safetensors": "0.7.0",
    "msgspec": "0.20.0",
}
GOOD = HostReport(
    name="n0",
    id="0",
    network=Network("10.0.0.1", "eth0", 28_232),
    machine=Probe(cores=64, host_memory_bytes=10**12, gpus=(H100,) * 8),
    available_bytes=9 * 10**11,
    shm_bytes=5 * 10**11,
    shm_free_bytes=5 * 10**11,
    limits=ProcessLimits(open_files=1 << 20, processes=UNLIMITED, locked_bytes=UNLIMITED),
    disk=Disk("/runs", 10**13, 10**12, 1e9),
    versions=VERSIONS,
    infiniband=True,
    torch=TorchFacts("12.8", "2.27.5", 8),
)


def machine(**changes: object) -> Callable[[HostReport], HostReport]:
    return lambda host: replace(host, machine=replace(host.machine, **changes))


def limits(**changes: object) -> Callable[[HostReport], HostReport]:
    return lambda host: replace(host, limits=replace(host.limits, **changes))


def disk(**changes: object) -> Callable[[HostReport], HostReport]:
    return lambda host: replace(host, disk=replace(host.disk, **changes))


def at(**changes: object) -> Callable[[HostReport], HostReport]:
    return lambda host: replace(host, network=replace(host.network, **changes))


def own(**changes: object) -> Callable[[HostReport], HostReport]:
    return lambda host: replace(host, **changes)


FAULTS: dict[str, tuple[Callable[[HostReport], HostReport], bool]] = {  # what is said of it, and if a run would fail
    "torch is not installed": (
        lambda host: replace(host, versions={k: v for k, v in VERSIONS.items() if k != "torch"}),
        True,
    ),
    r"torch can use 7 of 8 GPUs": (own(torch=TorchFacts("12.8", "2.27.5", 7)), True),
    r"the GPUs can't be read: no driver": (machine(gpu_error="no driver"), True),
    r"may open 100 files, and 8 workers need 128 each": (limits(open_files=100), True),
    r"may have 1000 processes and threads": (limits(processes=1000), False),
    r"may lock 8 MB of memory": (limits(locked_bytes=8 << 20), True),
    r"50\.0 of 1000\.0 GB of memory are free": (own(available_bytes=50 * 10**9), False),
    r"/dev/shm has 60 MB free, and NCCL": (own(shm_free_bytes=60 * 10**6), True),
    r"nothing can be written to /runs: read-only": (disk(error="read-only file system"), True),
    r"/runs has 10\.0 GB free": (disk(free_bytes=10**10), False),
    r"/runs takes 5 MB/s": (disk(write_bytes_per_s=5e6), False),
    r"nothing can listen on 10\.0\.0\.1 .*: Cannot assign": (at(error="Cannot assign requested address"), True),
    r"has 100 ports to give away": (at(ports=100), False),
}


def test_a_good_host_and_good_pairs_have_nothing_to_fix() -> None:
    assert list(findings([GOOD, replace(GOOD, name="n1", id="1")], [PairReport("n0", "n1", "nccl", 4e10, 4e10)])) == []


@pytest.mark.parametrize("seed", range(100))
def test_every_fault_is_said_once_with_its_host_and_those_that_fail_come_first(seed: int) -> None:
    rng = random.Random(seed)
    chosen = rng.sample(sorted(FAULTS), rng.randint(1, len(FAULTS)))
    if any("written to" in text for text in chosen):  # of such a disk there is nothing else to say
        chosen = [text for text in chosen if not text.startswith("/runs")]
    host = GOOD
    for text in chosen:
        host = FAULTS[text][0](host)
    found = list(findings([host], []))
    assert len(found) == len(chosen), found
    for text in chosen:
        (one,) = [finding for finding in found if re.search(text, finding.text)]
        assert (one.where, one.fails) == ("n0", FAULTS[text][1])
        assert len(one.fix) > 10
    assert [one.fails for one in found] == sorted((one.fails for one in found), reverse=True)


def test_hosts_that_differ() -> None:
    def said(*hosts: HostReport) -> list[tuple[str, str, bool]]:
        return [(one.where, one.text, one.fails) for one in together(hosts)]

    other = replace(GOOD, name="n1", id="1")
    assert said(GOOD, other) == []
    newer = replace(other, versions={**VERSIONS, "torch": "2.14.0"})
    assert said(GOOD, newer) == [("n1", "it has torch 2.14.0, and n0 has 2.13.0", True)]
    assert said(GOOD, replace(other, name="n0")) == [("n0", "2 hosts have this name", True)]
    assert said(GOOD, replace(other, id="0")) == [("n0 = n1", "2 agents run on this one host", False)]
    for python, known in (("3.11.9", []), ("3.12.1", [("n1", "it has python 3.12.1, and n0 has 3.11.7", True)])):
        assert said(GOOD, replace(other, versions={**VERSIONS, "python": python})) == known
    fewer = replace(other, machine=replace(GOOD.machine, gpus=(H100,) * 4))
    assert [where for where, text, fails in said(GOOD, fewer) if "4 x" in text and not fails] == ["n1"]
    behind = replace(other, clock_ahead_seconds=-3.5)
    assert said(GOOD, behind) == [("n1", "its clock is 3.5 s behind that of the host of this command", False)]
    alone = replace(other, shares_folder=False)
    assert said(GOOD, alone) == [("n1", "it does not see /runs of the host of this command", False)]


@pytest.mark.parametrize("seed", range(50))
def test_the_slow_pairs_are_found_by_the_speed_of_the_others(seed: int) -> None:
    rng = random.Random(seed)
    usual = rng.uniform(1e9, 5e10)
    pairs = [
        PairReport(f"n{i}", f"n{j}", "nccl", usual * rng.uniform(0.8, 1.2), usual * rng.uniform(0.8, 1.2), 1e-5)
        for i, j in itertools.combinations(range(5), 2)
    ]
    assert list(between(pairs)) == []
    slow, broken, thin = rng.sample(range(10), 3)
    pairs[slow] = replace(pairs[slow], back_bytes_per_s=usual / 5)
    pairs[broken] = replace(pairs[broken], error="connect timeout")
    pairs[thin] = replace(pairs[thin], there_bytes_per_s=0.117e9)
    found = {one.where: one for one in between(pairs)}
    named = [f"{pairs[i].first} - {pairs[i].second}" for i in (slow, broken, thin)]
    assert sorted(found) == sorted(named)
    assert [found[name].fails for name in named] == [False, True, False]
    assert "as over 1 Gbit/s" in found[named[2]].text


@pytest.mark.parametrize("n_workers", range(1, 34))
def test_rounds_have_every_pair_once_and_no_worker_twice(n_workers: int) -> None:
    found = rounds(n_workers)
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(n_workers), 2))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in found)
    assert len(found) <= n_workers, "as few rounds as there can be"


def test_a_disk_and_a_network_as_they_are(tmp_path: Path) -> None:
    found = look_at_disk(tmp_path)
    assert found.error == "" and found.write_bytes_per_s > 1e6 and 0 < found.free_bytes <= found.total_bytes
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert look_at_disk(tmp_path / "none").error == "no such file or directory"
    assert look_at_network("127.0.0.1", "lo").error == ""
    assert look_at_network("192.0.2.77", "").error == "Cannot assign requested address"


# --- for real ---------------------------------------------------------------------------------------------------------


def doctor(folder: Path, *words: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    start = ("-c", code) if code else ("-m", "realgraph")
    argv = [sys.executable, *start, "doctor", "--dir", str(folder), *words]
    variables = {**os.environ, **environment}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=variables, cwd=folder)


@pytest.mark.slow
def test_this_machine_is_checked_in_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    done = doctor(tmp_path, "--json")
    seconds = time.monotonic() - began
    report = json.loads(done.stdout)
    fatal = [one for one in report["findings"] if one["fails"]]
    assert done.returncode == (2 if fatal else 0), done.stderr
    assert seconds < 30, "15 s on a machine that does nothing else"
    (host,) = report["hosts"]
    assert host["versions"].keys() >= VERSIONS.keys()
    assert host["torch"] is not None and host["network"]["error"] == "" and host["disk"]["write_bytes_per_s"] > 0
    pair = report["pairs"][0]
    assert (pair["backend"], pair["error"]) == ("gloo", "")
    assert 0.05e9 < min(pair["there_bytes_per_s"], pair["back_bytes_per_s"]) < 1e12
    assert 0 < pair["latency_seconds"] < 0.1
    assert not list(tmp_path.iterdir()) and not processes_at(tmp_path), "nothing is left behind"


@pytest.mark.slow
def test_tables_for_people(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--interface", "lo")
    assert "127.0.0.1 on lo" in done.stdout
    for part in ("versions", "/dev/shm", "limits", "disk", "GB/s there", "gloo", "warning"):
        assert part in done.stdout, part


def test_a_machine_without_torch_is_checked_but_for_its_pairs(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json", code=NO_TORCH)
    report = json.loads(done.stdout)
    assert done.returncode == 2, done.stderr
    assert [one["text"] for one in report["findings"] if one["fails"]] == [
        "torch is not installed",
        "transformers is not installed",
    ]
    assert (len(report["hosts"]), report["pairs"], report["hosts"][0]["torch"]) == (1, [], None)


def test_a_torch_that_does_not_load_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')\n"
    )
    done = doctor(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert re.search(r"problem: .*: torch can't be loaded: ImportError: libcudart.so.12", done.stdout), done.stdout
    assert "fix: python -c 'import torch' must work" in done.stdout


def test_an_interrupted_check_leaves_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "realgraph", "doctor", "--hosts", "2", "--listen", f"127.0.0.1:{free_port()}"]
    process = subprocess.Popen([*argv, "--dir", str(tmp_path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "doctor.key").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    cases = {
        ("--hosts", "2"): "--hosts and --listen go together",
        ("--listen", "127.0.0.1:7000"): "--hosts and --listen go together",
        ("--slurm", "--hosts", "2"): "the hosts are those of the allocation",
        ("--slurm",): "command line: --slurm: this shell is in no allocation of Slurm",
        ("--hosts", "2", "--listen", "here"): "command line: --listen: 'here' is no address",
        ("--hosts", "2", "--listen", "192.0.2.77:7000"): "this host can't listen on 192.0.2.77:7000",
        ("--interface", "nope"): "command line: --interface: this host has no network interface 'nope'",
        ("--hosts", "2", "--listen", "8.8.8.8:7000"): "8.8.8.8 is a public address",
        ("--dir", str(tmp_path / "none")): f"there is no folder {tmp_path / 'none'}",
    }
    for words, text in cases.items():
        done = doctor(tmp_path, *words)
        assert done.returncode == 2 and text in done.stderr, (words, done.stderr)
        assert "hint: " in done.stderr
