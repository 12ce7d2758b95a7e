"""New weights reach each engine when it is ready: what the others and training do while one of them is slow."""

import random
from typing import Any

import pytest

from realgraph.runtime.scheduler.concurrency.unlimited import Unlimited
from realgraph.runtime.scheduler.groups.ledger import Group, Ledger
from realgraph.runtime.scheduler.groups.transitions import GroupState
from realgraph.runtime.wire.protocol import Command, Execute, Reallocate, Submit
from tests.shapes import Shape
from tests.simulator import Simulator, ended_steps

SLOW = 1  # the engine that takes its time; 0 is the other one, 2 and 3 train
SECONDS = 60.0


class SlowEngine(Simulator):
    """Worker SLOW takes a minute for every update of its weights, all else seconds."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        super().__init__(shape, rng)
        self.updating: set[int] = set()  # tasks that SLOW has not answered
        self.meanwhile: list[tuple[int, Command]] = []  # what workers were told during such a task

    def seconds(self, what: str) -> float:
        return SECONDS if what == f"rollout 0 {SLOW}" else super().seconds(what)

    def command(self, number: int, command: Command) -> None:
        if self.updating:
            self.meanwhile.append((number, command))
        super().command(number, command)
        if isinstance(command, Reallocate) and number == SLOW:
            self.updating.add(command.task)

    def feed(self, event: Any) -> None:
        if getattr(event, "worker", -1) == SLOW:
            self.updating.discard(getattr(event, "task", -1))
        super().feed(event)


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_slow_engine_does_not_hold_up_the_others(seed: int, staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets groups by the weights that it has, as far as the bound lets those: the others more, by newer ones."""
    shape = Shape(n_workers=4, split=True, groups=6, staleness=staleness, steps=8, seed=seed)
    simulator = SlowEngine(shape, random.Random(seed))
    admit, admitted = Ledger.admit, list[tuple[int, int]]()

    def checked(ledger: Ledger, owner: int, version: int) -> Group:
        assert simulator.workers[owner].copies["rollout"] >= version, "an engine is given groups by weights it lacks"
        assert len(ledger.live) + ledger.n_trained < (version + ledger.ahead + 1) * ledger.per_batch
        admitted.append((owner, version))
        return admit(ledger, owner, version)

    monkeypatch.setattr(Ledger, "admit", checked)
    halt = simulator.run()
    assert halt is not None and halt.error is None
    assert len(ended_steps(simulator)) == 8
    told = simulator.meanwhile
    newer = [(number, command) for number, command in told if isinstance(command, Submit)]
    assert {number for number, _ in newer} >= {0}
    assert max(command.version for number, command in newer if number == 0) > 0
    assert {owner for owner, _ in admitted} == {0, SLOW}


@pytest.mark.slow
def test_training_goes_on_while_an_engine_is_slow() -> None:
    """But for a few runs, in which its groups are the very ones that a batch lacks."""
    n_trained = 0
    for seed in range(40):
        simulator = SlowEngine(
            Shape(n_workers=4, split=True, groups=6, staleness=1, steps=8, seed=seed), random.Random(seed)
        )
        halt = simulator.run()
        assert halt is not None and halt.error is None
        told = [command for _, command in simulator.meanwhile if isinstance(command, Execute)]
        n_trained += any(command.call == "train" for command in told)
    assert n_trained >= 30


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_step_is_trained_to_its_end_while_an_engine_takes_the_weights_between(staleness: int) -> None:
    """The second of two train calls needs nothing of engines that copy what the first has made."""
    n_between = 0
    for seed in range(6):
        shape = Shape(again=True, n_workers=4, split=True, groups=6, staleness=staleness, steps=8, seed=seed)
        simulator = SlowEngine(shape, random.Random(seed))
        halt = simulator.run()
        assert halt is not None and halt.error is None
        told = [command for _, command in simulator.meanwhile]
        between = {one.version for one in told if isinstance(one, Reallocate) and one.version % 2}
        assert between <= {one.version for one in told if isinstance(one, Execute) and one.call == "train_again"}
        n_between += len(between)
    assert n_between


class OneByOne(Simulator):
    """Engines that take their new weights one soon after another; groups take longer."""

    def seconds(self, what: str) -> float:
        call, _, place = what.partition(" ")
        return 1e-6 * (1 + int(place.split()[-1])) if call == "rollout" else super().seconds(what)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_no_engine_takes_what_new_weights_let_in_for_all(
    seed: int, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has new weights first is given its share of the groups: the others are there soon."""
    shape = Shape(n_workers=12, split=True, groups=12, staleness=staleness, steps=8, seed=seed)
    simulator = OneByOne(shape, random.Random(seed))
    simulator.scheduler._collection._concurrency = Unlimited()  # all that the bound lets in
    admit, shares = Ledger.admit, list[tuple[int, int]]()

    def checked(ledger: Ledger, owner: int, version: int) -> Group:
        group = admit(ledger, owner, version)
        admitted = [one for one in ledger.live.values() if one.state is GroupState.ADMITTED]
        places = (version + ledger.ahead + 1) * ledger.per_batch - ledger.n_trained
        shares.append((sum(one.owner == owner for one in admitted), places // 6 + 1))
        return group

    monkeypatch.setattr(Ledger, "admit", checked)
    halt = simulator.run()
    assert halt is not None and halt.error is None
    assert len(ended_steps(simulator)) == 8
    assert all(n_groups <= share for n_groups, share in shares)
