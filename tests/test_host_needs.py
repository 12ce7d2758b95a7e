"""The needs of a run that each of its hosts is asked about as it joins."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.inputs.detect import Probe, resolve
from realgraph.run.launching import needed_of
from realgraph.run.running import prepare, with_sums
from realgraph.runtime.data.sums import sampled_sums
from realgraph.runtime.hosts.agent import _look
from realgraph.runtime.hosts.launcher import HostsLauncher, JoinTerms, Needed
from realgraph.runtime.hosts.messages import Look, Looked
from realgraph.runtime.hosts.starter import StartedByHand
from realgraph.runtime.job.manifest import sum_file
from tests.broken_runs import own
from tests.runs import GRPO, home, write_run

__all__ = ["home", "own"]


def test_models_functions_and_their_variables_are_asked_for(own: Path) -> None:
    file = write_run(own, "run", GRPO, {"calls": {"reward": {"env": ["PATH"]}}})
    prepared = prepare(file, (), None)
    needed = needed_of(prepared)
    model = {str(own / "model" / name) for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert {str(own / "rewards.py"), *model} <= set(needed.sampled)
    prepared = replace(prepared, job=with_sums(prepared.job))
    assert str(own / "train.jsonl") in needed_of(prepared).sampled
    assert needed.variables == {"PATH": "$.calls.reward.env[0]"}


def test_a_host_says_which_files_are_others_there(tmp_path: Path) -> None:
    same, other = tmp_path / "same.py", tmp_path / "other.py"
    for file in (same, other):
        file.write_text("a")
    look = Look((), "", "", sampled=sampled_sums([same, other]))
    assert _look(look).others == ()
    other.write_text("b")
    whole = Look((), "", "", {str(other): sum_file(other)}, sampled=look.sampled)
    assert (_look(whole).others, _look(whole).other_data) == ((), ()), "where data are compared whole, once is enough"
    assert _look(look).others == (f"{other} has other bytes than on the host of the run",)


def test_what_a_host_lacks_is_refused_all_at_once(tmp_path: Path) -> None:
    host, fleet = SimpleNamespace(text="host b", asked=0.0, looked=None), AsyncMock()
    answer = Looked((), True, unset=("JUDGE_KEY",), others=("rewards.py has other bytes",))
    fleet.send.side_effect = lambda host, look: setattr(host, "looked", answer)
    needed = Needed(resolve(ClusterSpec(), Probe(1, 0)), tmp_path, variables={"JUDGE_KEY": "$.calls.reward.env[0]"})
    launcher = HostsLauncher(JoinTerms("127.0.0.1"), needed, StartedByHand(print), print)
    with pytest.raises(ConfigError) as raised:
        asyncio.run(launcher._look(fleet, cast(Any, [host])))
    assert [(problem.where.path, problem.text) for problem in raised.value.problems] == [
        ("$.launch", "host b: rewards.py has other bytes"),
        ("$.calls.reward.env[0]", "host b has no environment variable 'JUDGE_KEY'"),
    ]
