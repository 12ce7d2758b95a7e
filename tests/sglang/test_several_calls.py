"""A run of two calls that generate, each on a real server of its own."""

from pathlib import Path
from typing import Any

from tests.runs import home, logs, start, write_run
from tests.sglang.servers import OF_RUNS, START_SECONDS, interpreter
from tests.test_served_generates_runs import TWO_MODELS, texts_of, write_two_models

__all__ = ["home"]


def test_greedy_samples_of_real_servers_are_those_of_embedded_engines(home: Path, tmp_path: Path) -> None:
    """Two models, of which the second reads what the first has written."""
    write_two_models(home)
    served: dict[str, Any] = {"engine": "sglang", "python": str(interpreter(tmp_path)), "server_args": OF_RUNS}
    served["call_args"] = {"rollout": {"context_length": 64}, "judge": {"context-length": 64}}
    engines: dict[str, dict[str, Any]] = {"embedded": {}, "served": {"rollout": served}}
    found = {}
    for name, rollout in engines.items():
        file = write_run(home, name, TWO_MODELS, rollout, {"runtime": {"start_seconds": START_SECONDS}})
        run = start(home, "run", str(file), name=name)
        assert run.wait(START_SECONDS) == 0, run.output() + logs(run.folder)
        found[name] = texts_of(run.folder)
    assert len(set(found["embedded"])) > 3
    assert found["served"] == found["embedded"]
