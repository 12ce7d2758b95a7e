"""Offloaded states: nothing of them on the device between calls, and the same training bit for bit."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.run.running import prepare
from realgraph.runtime.models import host_states
from realgraph.runtime.models.host_states import HostStates
from realgraph.runtime.models.weights import whole
from realgraph.runtime.train.engine import TorchTrainEngine
from realgraph.runtime.train.offload import OffloadedEngine
from realgraph.runtime.worker.roles import Roles
from tests import tiny
from tests.engines import OneRank, call, engine, folder, no_handover, same, weights_of
from tests.run_texts import place
from tests.runs import finish, home, numbers, records, write_run

__all__ = ["folder", "home", "place"]


def held(one: TorchTrainEngine) -> int:
    """Bytes of its states and gradients on the device."""
    assert one.masters is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in [*one.state_tensors(), one.masters.flat])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_training_is_the_same_bit_for_bit_and_leaves_nothing_on_the_device(
    dtype: Any, folder: Path, tmp_path: Path
) -> None:
    plain, inner = engine(folder, {"dtype": dtype}), engine(folder, {"dtype": dtype})
    before = held(inner)
    one = OffloadedEngine(inner)
    for step in range(3):
        assert held(inner) == 0
        batch = tiny.batch(tiny.lengths(6, 30, step))
        assert torch.equal(one.inference(batch, "logprobs", 1.0), plain.inference(batch, "logprobs", 1.0))
        ours, theirs = one.train(call(), [batch]), plain.train(call(), [batch])
        assert ours == theirs
    assert held(inner) == 0
    assert all(torch.equal(b, a) for (_, a), (_, b) in zip(plain.weights(), one.weights(), strict=True))
    plain.save(tmp_path / "plain")
    one.save(tmp_path / "offloaded")
    for file in sorted((tmp_path / "plain").iterdir()):
        assert file.read_bytes() == (tmp_path / "offloaded" / file.name).read_bytes(), file.name
    again = OffloadedEngine(engine(folder, {"dtype": dtype}))
    again.load(tmp_path / "offloaded")
    again.snapshot().write(tmp_path / "again", [0])
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()
    again.train(call(), [tiny.batch([9, 12])])
    plain.train(call(), [tiny.batch([9, 12])])
    with again._states.used(changed=False):
        assert held(inner) == 0
        assert held(again._engine) == before
        assert same(weights_of(plain), weights_of(again._engine))


def test_a_failed_call_gives_the_device_back_with_the_states_as_they_were(folder: Path) -> None:
    inner = engine(folder)
    expected = {name: tensor.clone() for name, tensor in inner.weights()}
    one = OffloadedEngine(inner)
    with pytest.raises(ValueError, match="is unknown"):
        one.load_weights(whole(iter([("nothing", torch.zeros(1))])), 1)
    assert held(inner) == 0
    assert all(torch.equal(expected[name], tensor) for name, tensor in one.weights())
    assert held(inner) == 0


def test_threads_that_use_the_states_at_once_share_one_coming_and_going(folder: Path) -> None:
    inner = engine(folder)
    one = OffloadedEngine(inner)
    inside, leave = threading.Barrier(3), threading.Event()

    def use() -> None:
        with one._states.used(changed=False):
            inside.wait(30)
            assert leave.wait(30)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(30)
    assert held(inner) > 0
    assert one.snapshot().parts
    assert held(inner) > 0  # others are not done
    leave.set()
    for thread in threads:
        thread.join(30)
    assert held(inner) == 0


def test_gradients_have_memory_only_while_a_call_trains(folder: Path) -> None:
    one = engine(folder)
    masters, adam = one.masters, one.adam
    assert masters is not None and adam is not None
    step, inside = adam.step, []

    def watched(lr: float) -> None:
        inside.append(masters.flat.untyped_storage().nbytes())
        step(lr)

    adam.step = watched  # type: ignore[method-assign]
    for _ in range(2):
        assert masters.flat.untyped_storage().nbytes() == 0
        one.train(call(), [tiny.batch([9, 12])])
        one.inference(tiny.batch([5]), "logprobs", 1.0)
    assert masters.flat.untyped_storage().nbytes() == 0
    assert inside == [masters.flat.nbytes] * 2
    one.adam = None
    with pytest.raises(ValueError, match="frozen"):  # a call that fails gives them back, too
        one.train(call(), [tiny.batch([9, 12])])
    assert masters.flat.untyped_storage().nbytes() == 0


def test_views_and_tied_tensors_come_back_through_their_storage() -> None:
    flat = torch.arange(6.0)
    first, second = flat[:2], flat[2:]
    states = HostStates(lambda: [first, second, flat])
    assert states.away
    assert states.nbytes == flat.nbytes
    assert flat.untyped_storage().nbytes() == 0
    with states.used(changed=True):
        assert torch.equal(flat, torch.arange(6.0))
        first += 10
    with states.used(changed=False):
        assert torch.equal(flat, torch.tensor([10.0, 11.0, 2.0, 3.0, 4.0, 5.0]))
        assert torch.equal(first, flat[:2])
        assert torch.equal(second, flat[2:])


# --- states that come while the call before runs ----------------------------------------------------------------------


class HeldCopies:
    """Copies from host memory that say that they have begun, and end when they may, or as `error` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._copy = host_states._copy_beside
        monkeypatch.setattr(host_states, "_copy_beside", self._held)

    def _held(self, away: host_states.Away) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.begun.set()
        assert self.may_end.wait(30)
        self._copy(away)
        if self.error is not None:
            raise self.error

    def again(self) -> None:
        self.begun.clear()
        self.may_end.clear()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    return HeldCopies(monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_come_while_the_call_before_runs_are_the_same_bit_for_bit(
    dtype: Any, folder: Path, tmp_path: Path, copies: HeldCopies
) -> None:
    plain, inner, before = (engine(folder, {"dtype": dtype}) for _ in range(3))
    one = OffloadedEngine(inner)
    for step in range(3):
        copies.again()
        batch = tiny.batch(tiny.lengths(6, 30, step))
        with one.prefetched() as nbytes:
            assert nbytes == one._states.nbytes > 0
            assert copies.begun.wait(30)  # while the copy is under way, another call begins and ends
            before.inference(batch, "logprobs", 1.0)
            assert one._states.away
            copies.may_end.set()
            assert one.train(call(), [batch]) == plain.train(call(), [batch])
            assert held(inner) > 0
            assert torch.equal(one.inference(batch, "logprobs", 1.0), plain.inference(batch, "logprobs", 1.0))
        assert held(inner) == 0
    one.save(tmp_path / "early")
    plain.save(tmp_path / "plain")
    for file in sorted((tmp_path / "plain").iterdir()):
        assert file.read_bytes() == (tmp_path / "early" / file.name).read_bytes(), file.name


def test_a_failed_copy_fails_the_call_that_waits_for_it_and_loses_nothing(folder: Path, copies: HeldCopies) -> None:
    plain, inner = engine(folder), engine(folder)
    one, batch = OffloadedEngine(inner), tiny.batch([9, 12])
    copies.error = MemoryError("no room for what comes early")
    copies.may_end.set()
    with one.prefetched():
        with pytest.raises(MemoryError, match="no room for what comes early"):
            one.train(call(), [batch])
        assert held(inner) == 0
    with pytest.raises(MemoryError, match="no room"), one.prefetched():
        pass  # nobody asked for them: it is told at the end
    assert one.train(call(), [batch]) == plain.train(call(), [batch])
    assert held(inner) == 0
    assert same(weights_of(plain), {name: tensor.clone() for name, tensor in one.weights()})


def test_nobody_waits_for_ever_for_what_comes_early(
    folder: Path, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = engine(folder)
    one, expected = OffloadedEngine(inner), weights_of(engine(folder))
    monkeypatch.setattr(host_states, "ABANDONED_SECONDS", 0.05)
    with one.prefetched():
        with pytest.raises(TimeoutError, match=r"did not come from host memory in 0\.05 s"):
            one.inference(tiny.batch([5]), "logprobs", 1.0)
        monkeypatch.setattr(host_states, "ABANDONED_SECONDS", 30.0)
        copies.may_end.set()
        assert all(torch.equal(expected[name], tensor) for name, tensor in one.weights())
    assert held(inner) == 0


def test_a_worker_brings_states_early_as_the_plan_says(place: Path, copies: HeldCopies) -> None:
    """From the start of the call before, beside calls without a device, up to the end of their own; another call that
    has the device, or a checkpoint, comes between them only when they have left."""
    shutil.rmtree(place / "model")
    tiny.save(place / "model")
    pins = "allocation={train: {residency: offloaded, devices: 1}, rollout: {devices: 1}, ref_logp: {devices: 1}}"
    overrides = ("cluster.kind=cpu", "cluster.devices=1", "params.kl_coef=0.05", pins)
    job = prepare(place / "run.yaml", overrides, None).job
    assert job.plan.allocations["train"].prefetch_during == "ref_logp"
    roles = Roles(job, no_handover(), OneRank(), lambda tokens: "", lambda call: None)
    states = roles.trained["actor"]._states  # type: ignore[attr-defined]
    with roles.prefetching("rollout") as nbytes:
        assert (nbytes, copies.begun.is_set()) == (0, False)
    with roles.prefetching("ref_logp") as nbytes:
        assert nbytes == 0
        assert copies.begun.wait(30)
    with roles.prefetching("advantage") as nbytes:
        assert nbytes == 0
        assert states.away
    copies.may_end.set()
    with roles.prefetching("train") as nbytes:
        assert nbytes == states.nbytes > 0
        with states.used(changed=False):
            assert not states.away
        assert not states.away
    assert states.away
    for between in ("rollout", ""):
        with roles.prefetching("ref_logp"):
            pass
        if between:
            with roles.prefetching(between):
                assert states.away
        roles.end_prefetches()
        assert states.away
        with roles.prefetching("train") as nbytes:
            assert nbytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_states_come_to_a_gpu_by_a_stream_of_their_own_while_it_computes() -> None:
    gpu = torch.device("cuda")
    tensors = [torch.randn(1 << 22, device=gpu) for _ in range(4)]
    expected, other = [tensor.clone() for tensor in tensors], torch.randn(4096, 4096, device=gpu)
    states = HostStates(lambda: tensors)
    for _ in range(3):
        with states.prefetched():
            for _ in range(20):
                other = torch.tanh(other @ other)
            with states.used(changed=False):
                assert all(torch.equal(tensor, same) for tensor, same in zip(tensors, expected, strict=True))
        assert states.away


AWAY = {"train_actor": {"residency": "offloaded"}, "ref_logp": {"residency": "offloaded"}}
LEARNT = ("loss", "grad_norm", "reward")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
def test_a_run_with_offloaded_states_trains_as_one_without(home: Path, sharding: str) -> None:
    """The policy and the reference wait in host memory; the critic stays. Generation has a copy of its own then, which
    is given up after each use and brought again before the next, the first included: whole weights give the very
    numbers of generation that reads them in place."""
    base = {
        "graph": "ppo",
        "params": {"actor_lr": 3e-3},
        "batch": {"groups": 16},
        "steps": 3,
        "checkpoint": {"every": 2},
    }
    for name, away in (("plain", {}), ("away", AWAY)):
        train = {"train_actor": {**away.get("train_actor", {}), "sharding": sharding}}
        pins = {**away, **train, "rollout": {"devices": 2}}  # the same samples draw the same tokens side by side
        finish(home, "run", str(write_run(home, f"{sharding}-{name}", base, {"allocation": pins})))
    plan = json.loads((home / f"{sharding}-away" / "plan.json").read_text())
    assert [plan["allocations"][call]["residency"] for call in AWAY] == ["offloaded", "offloaded"]
    assert plan["allocations"]["train_actor"]["prefetch_during"] == "ref_logp"
    for record in records(home / f"{sharding}-away"):
        assert record["metrics"]["train_actor/prefetched_bytes"] > 0
        assert "ref_logp/prefetched_bytes" not in record["metrics"]  # generation comes before it
    ours, theirs = numbers(home / f"{sharding}-away"), numbers(home / f"{sharding}-plain")
    assert ours.keys() == theirs.keys() == {0, 1, 2}
    assert plan["allocations"]["rollout"]["residency"] == "reallocated"
    assert all("reallocate/seconds" in record["metrics"] for record in records(home / f"{sharding}-away"))
    for step, metrics in theirs.items():
        for key in (key for key in metrics if key.rpartition("/")[2] in LEARNT):
            if sharding == "replicated":
                assert ours[step][key] == metrics[key], (step, key)
            assert ours[step][key] == pytest.approx(metrics[key], rel=1e-4), (step, key)
    if sharding == "replicated":
        last = "checkpoints/step-000003/actor/model.safetensors"
        assert (home / f"{sharding}-away" / last).read_bytes() == (home / f"{sharding}-plain" / last).read_bytes()


def test_a_generator_whose_weights_wait_between_two_steps_draws_the_same_samples(home: Path) -> None:
    base = {"graph": "generate", "params": {"n": 2, "reward_fn": "rewards:score"}, "steps": 3}
    found = []
    for residency in ("resident", "offloaded"):
        name = f"generate-{residency}"
        pins = {"allocation": {"rollout": {"devices": 2, "residency": residency}}}
        finish(home, "run", str(write_run(home, name, base, pins)))
        rollout = json.loads((home / name / "plan.json").read_text())["allocations"]["rollout"]
        assert (rollout["residency"], rollout["host_bytes"] > 0) == (residency, residency == "offloaded")
        lines = [line for file in (home / name / "samples").iterdir() for line in file.read_text().splitlines()]
        found.append(sorted(lines))
    assert len(found[0]) == 48
    assert found[0] == found[1]
