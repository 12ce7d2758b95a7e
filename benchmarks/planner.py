"""The planner's search against rules and other systems' searches, on equal costs: period, proven gap, seconds.

Run from the repository root: `python -m benchmarks.planner` (eight cases), `--full` (all), `--mcmc SECONDS` (CPU time
of ReaL's chain per case, 60 unless told), `--cp-sat SECONDS` (its limit, 60 unless told), `--only NAME`. Peers:
planner_peers.py (HybridFlow's Algorithm 1), planner_chain.py (ReaL's MCMC), planner_cp_sat.py (a constraint program,
where ortools is installed) and the rules of planner/search/baselines.py. All see the same option tables and all but
CP-SAT, which rounds, are timed by the same exact evaluator. Cases with staleness: planner_streams.py. The search runs
with its compiled code warm; the whole command `realgraph plan`, in a new process, is timed beside it. Machines differ
and may be busy: CPU seconds are printed beside wall seconds, and the limits are held against the smaller of the two.

Results go to results/planner.json or results/planner_full.json. With `--tables` the problems that were solved, up to
`LARGEST` pairs of meshes, are written to results/planner_problems/, as files that `realgraph plan --problem` reads
(`xz -d` first). Each row has the hash of its problem; the same commit makes it again.
"""

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.machine import describe
from benchmarks.planner_chain import chained
from benchmarks.planner_cp_sat import ConstraintProgram, programmed
from benchmarks.planner_peers import mapped
from benchmarks.problem_export import problem_spec, problem_text
from realgraph.planner.options.tables import problem_of
from realgraph.planner.plan.problem import Limits, SearchProblem, Solution
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.baselines import baselines_of
from realgraph.planner.solve.solver import solve
from realgraph.run.requests import request_for
from realgraph.run_file.compose import check_run

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GAP = 0.002
LARGEST = 20_000  # pairs of meshes of a problem that is written down: moves differ from pair to pair
EQUAL = 1e-9  # relative: what counts as no worse
NINE = "ppo_nine_calls"
MODELS = {
    "8B": "meta-llama/Llama-3.1-8B-Instruct",
    "32B": "Qwen/Qwen2.5-32B-Instruct",
    "70B": "meta-llama/Llama-3.1-70B-Instruct",
    "235B": "Qwen/Qwen3-235B-A22B",
}
BATCH = {8: 256, 16: 512, 32: 512, 64: 512, 128: 1024, 256: 1024, 512: 4096, 1024: 4096, 2048: 8192, 4096: 16384}


class Case(Struct, frozen=True):
    """An algorithm with one model for all roles on nodes of eight H100s."""

    algorithm: str
    model: str
    devices: int
    staleness: int = 0

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.model} {self.devices}" + f" staleness {self.staleness}" * (self.staleness > 0)

    @property
    def seconds(self) -> float:
        """Seconds in which the gap is to be proven."""
        return 60.0 if self.algorithm == NINE else 10.0 if self.devices > 1024 else 2.0

    @property
    def gap(self) -> float:
        return 0.03 if self.algorithm == NINE else GAP


DEFAULT = (
    Case("ppo", "8B", 8),
    Case("ppo", "70B", 64),
    Case("ppo", "70B", 1024),
    Case("ppo", "70B", 4096),
    Case("grpo", "8B", 128),
    Case("grpo", "70B", 512),
    Case("grpo", "235B", 1024),
    Case(NINE, "70B", 128),
)
FULL = (
    *(Case(algorithm, "8B", n) for algorithm in ("ppo", "grpo") for n in (8, 16, 64, 128, 512, 1024)),
    *(Case(algorithm, "32B", n) for algorithm in ("ppo", "grpo") for n in (32, 256)),
    *(Case(algorithm, "70B", n) for algorithm in ("ppo", "grpo") for n in (64, 128, 512, 1024, 4096)),
    *(Case(algorithm, "235B", n) for algorithm in ("ppo", "grpo") for n in (512, 1024, 4096)),
    Case(NINE, "8B", 64),
    Case(NINE, "70B", 128),
    Case(NINE, "70B", 1024),
)


class Row(Struct, frozen=True):
    """Results of one case: periods in seconds (None: nothing that fits), and what the search took."""

    case: str
    calls: int
    options: int
    meshes: int
    period: float
    bound: float
    gap: float
    wall_s: float
    cpu_s: float
    first_answer_s: float
    nodes: int
    stopped: str
    tables_s: float
    symmetric: float | None
    megatron: float | None
    colocated: float | None
    real_heuristic: float | None
    algorithm_1: float | None
    algorithm_1_s: float
    mcmc: float | None
    mcmc_s: float
    mcmc_proposals: int
    cp_sat: ConstraintProgram
    cold_wall_s: float | None
    cold_cpu_s: float | None
    problem_sha256: str

    @property
    def peers(self) -> dict[str, float]:
        """The periods of all rules and searches that found a plan."""
        names = ("symmetric", "megatron", "colocated", "real_heuristic", "algorithm_1", "mcmc")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def run_file(case: Case) -> str:
    """The run file of a case: prompts of 512 tokens, responses of 1,024 on average and 4,096 at most."""
    path = MODELS[case.model]
    size = 8 if case.algorithm == "grpo" else 1
    roles = {
        "ppo": ("actor", "critic", "ref", "reward_model"),
        "grpo": ("actor", "ref"),
        NINE: ("actor", "critic", "judge", "helpful", "harmless", "ref"),
    }
    params = {
        "ppo": {"reward_fn": "", "reward_model": path, "minibatches": 4},
        "grpo": {"kl_coef": 0.001, "minibatches": 4},
        NINE: {"minibatches": 4},
    }
    graph = str(HERE / f"{NINE}.yaml") if case.algorithm == NINE else case.algorithm
    whole = {
        "graph": graph,
        "params": params[case.algorithm],
        "models": {role: {"path": path, "dtype": "bfloat16"} for role in roles[case.algorithm]},
        "data": {
            "path": "openai/gsm8k",
            "columns": {"prompt": "question", "answer": "answer"},
            "max_prompt_tokens": 512,
        },
        "batch": {"groups": BATCH[case.devices] // size, "max_new_tokens": 4096, "expected_new_tokens": 1024},
        "cluster": {"nodes": case.devices // 8, "devices": 8, "kind": "H100-SXM"},
        "staleness": case.staleness,
        "steps": 100,
    }
    return json.dumps(whole)  # JSON is YAML


def requested(case: Case, folder: Path) -> PlanRequest:
    file = folder / "run.yaml"
    file.write_text(run_file(case), encoding="utf-8")
    shutil.copy(HERE / "bench_rewards.py", folder)  # functions are looked for beside the run file
    return request_for(check_run(file, ()))


# --- one case ---------------------------------------------------------------------------------------------------------


def searched(problem: SearchProblem, seconds: float) -> tuple[Solution, float, float, float]:
    """The solution, wall and CPU seconds of the search, and wall seconds until it first had a plan and a bound.

    seconds: of CPU time, so that a busy machine does not cut the search short.
    """
    first: list[float] = []

    def progress(period: float, bound: float) -> None:
        if not first and bound > 0 and period < float("inf"):
            first.append(time.monotonic() - wall)

    wall, cpu = time.monotonic(), time.process_time()

    def stop() -> bool:
        return time.process_time() - cpu > seconds

    found = solve(problem, Limits(gap=GAP, seconds=10 * seconds, stop=stop, progress=progress))
    wall_s, cpu_s = time.monotonic() - wall, time.process_time() - cpu
    assert isinstance(found, Solution), found
    return found, wall_s, cpu_s, first[0] if first else wall_s


def cold(folder: Path) -> tuple[float | None, float | None]:
    """Wall and CPU seconds of `realgraph plan` in a new process; None where it failed, which it says itself.

    Its modules are compiled, as those of an installed package are, whatever the environment says.
    """
    command = [sys.executable, "-m", "realgraph.cli", "plan", str(folder / "run.yaml"), "--json"]
    began, before = time.monotonic(), os.times()
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    ended = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)
    if ended.returncode != 0:
        return None, None
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, used


def measure(case: Case, limits: tuple[float, float], tables: bool) -> Row:
    """limits: seconds of ReaL's chain and of CP-SAT."""
    mcmc_seconds, cp_sat_seconds = limits
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = requested(case, folder)
        began = time.process_time()
        prepared = problem_of(request)
        tables_s = time.process_time() - began
        problem = prepared.problem
        found, wall_s, cpu_s, first_s = searched(problem, 60.0)
        rules = baselines_of(prepared, Limits(gap=GAP, seconds=60.0))
        mapping = mapped(problem)
        chain = chained(problem, mcmc_seconds) if mcmc_seconds > 0 else None
        program = programmed(problem, cp_sat_seconds)
        cold_wall, cold_cpu = cold(folder)
    return Row(
        case=case.name,
        calls=len(problem.tasks),
        options=sum(len(table) for table in problem.tables),
        meshes=len(problem.meshes),
        period=found.period,
        bound=found.bound,
        gap=found.gap,
        wall_s=wall_s,
        cpu_s=cpu_s,
        first_answer_s=first_s,
        nodes=found.nodes,
        stopped=found.stopped,
        tables_s=tables_s,
        symmetric=rules.symmetric.period if rules.symmetric else None,
        megatron=rules.megatron.period if rules.megatron else None,
        colocated=rules.colocated.period if rules.colocated else None,
        real_heuristic=rules.real.period if rules.real else None,
        algorithm_1=_finite(mapping.period),
        algorithm_1_s=mapping.seconds,
        mcmc=_finite(chain.period) if chain else None,
        mcmc_s=chain.seconds if chain else 0.0,
        mcmc_proposals=chain.tried if chain else 0,
        cp_sat=program,
        cold_wall_s=cold_wall,
        cold_cpu_s=cold_cpu,
        problem_sha256=written(case, problem, tables),
    )


def _finite(period: float) -> float | None:
    return period if period < float("inf") else None


def written(case: Case, problem: SearchProblem, keep: bool) -> str:
    """SHA-256 of the numbers of a problem; with `keep` its file is written beside the results."""
    digest = hashlib.sha256()
    for table in problem.tables:
        for column in table.__struct_fields__:
            digest.update(getattr(table, column).tobytes())
    rest = (problem.devices, problem.meshes, problem.precedences, problem.moves, problem.ties, problem.floor_seconds)
    digest.update(msgspec.json.encode((rest, [(task.name, sorted(task.tables.items())) for task in problem.tasks])))
    if keep and len(problem.meshes) ** 2 <= LARGEST:
        text = problem_text(problem_spec(problem, case.name))
        folder = RESULTS / "planner_problems"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{case.name.replace(' ', '_')}.json.xz"
        file.write_bytes(lzma.compress(text.encode(), preset=9))
    return digest.hexdigest()[:16]


# --- the table --------------------------------------------------------------------------------------------------------


def faults(case: Case, row: Row) -> list[str]:
    """The claims that a row misses."""
    took = min(row.wall_s, row.cpu_s)
    found = []
    if row.gap > case.gap:
        found.append(f"gap {row.gap:.2%} above {case.gap:.1%}")
    if took > case.seconds and case.algorithm != NINE:  # nine calls are cut off there: what counts is their gap
        found.append(f"{took:.1f} s above {case.seconds:.0f} s")
    if row.first_answer_s > 1.0:
        found.append(f"first answer after {row.first_answer_s:.2f} s")
    cold_s = min(row.cold_wall_s or 0.0, row.cold_cpu_s or 0.0)
    if row.cold_wall_s is None:
        found.append("`realgraph plan` failed")
    if cold_s > 8.0 and case.algorithm != NINE:
        found.append(f"cold {cold_s:.1f} s above 8 s")
    found += [f"worse than {name}" for name, period in row.peers.items() if row.period > period * (1 + EQUAL)]
    return found


HEAD = (
    f"{'case':24}{'period':>9}{'gap':>8}{'wall s':>8}{'cpu s':>8}{'first':>7}{'cold s':>8} |"
    f"{'symm.':>8}{'coloc.':>8}{'Megat.':>8}{'ReaL h.':>8}{'Alg. 1':>8}{'MCMC':>8}{'CP-SAT':>14}"
)


def line(row: Row) -> str:
    """Periods of peers as excess over ours."""

    def excess(period: float | None) -> str:
        return "     -  " if period is None else f"{100 * (period / row.period - 1):+7.1f}%"

    peers = (row.symmetric, row.colocated, row.megatron, row.real_heuristic, row.algorithm_1, row.mcmc)
    return (
        f"{row.case:24}{row.period:9.2f}{row.gap:8.2%}{row.wall_s:8.2f}{row.cpu_s:8.2f}{row.first_answer_s:7.2f}"
        f"{row.cold_wall_s or 0:8.2f} |" + "".join(map(excess, peers)) + _cp_sat_text(row)
    )


def _cp_sat_text(row: Row) -> str:
    """CP-SAT's period beside the search's and its seconds, or the reason why it was left out."""
    found = row.cp_sat
    if found.note:
        return f"  {found.note}"
    excess = "  no plan" if found.period is None else f"{100 * (found.period / row.period - 1):+8.1f}%"
    return f"{excess} {found.seconds:.0f} s"


def record(name: str, limits: tuple[float, float], rows: list[Row], missed: list[str]) -> None:
    """Write what is known so far, so that an interrupted run leaves its rows."""
    report = {
        "machine": describe(),
        "mcmc_seconds": limits[0],
        "cp_sat_seconds": limits[1],
        "passed": not missed,
        "missed": missed,
        "rows": msgspec.to_builtins(rows),
    }
    (RESULTS / name).write_bytes(msgspec.json.format(json.dumps(report).encode(), indent=1) + b"\n")


def main() -> int:
    """Measure, print, write the results; 1 where a claim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--mcmc", type=float, default=60.0)
    parser.add_argument("--cp-sat", type=float, default=60.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    limits = (asked.mcmc, asked.cp_sat)
    cases = [case for case in (FULL if asked.full else DEFAULT) if asked.only in case.name]
    with tempfile.TemporaryDirectory() as folder:  # compiled code is loaded before anything is timed
        solve(problem_of(requested(Case("grpo", "8B", 8), Path(folder))).problem, Limits(seconds=5.0))
        cold(Path(folder))
    print(HEAD)
    rows: list[Row] = []
    missed: list[str] = []
    for case in cases:
        row = measure(case, limits, asked.tables)
        rows.append(row)
        wrong = faults(case, row)
        missed += [f"{case.name}: {text}" for text in wrong]
        print(line(row) + ("  " + "; ".join(wrong) if wrong else ""), flush=True)
        if not asked.only:
            record("planner_full.json" if asked.full else "planner.json", limits, rows, missed)
    verdict = "PASS" if not missed else "FAIL"
    print(f"{verdict}: gap <= 0.2 % in 2 s (10 s above 1,024 devices; nine calls 3 % in 60 s), no peer is better")
    return 0 if not missed else 1


if __name__ == "__main__":
    sys.exit(main())
