"""One run of GRPO by this project or by TRL's GRPOTrainer, for `benchmarks.vs_trl`, which says what is compared.

Makes the model and the data, starts either system in processes of its own (TRL in `benchmarks.trl_process`), and reads
what its steady state took.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GROUP = 8  # samples a prompt
LR = 1e-8  # too small to move the lengths
POLL_SECONDS = 0.1
RUN_SECONDS = 240.0  # no single run takes longer


@dataclass(frozen=True)
class Setting:
    """Processes, samples in one backward pass and generation back-end with which TRL runs one step of `samples`."""

    samples: int
    processes: int
    microbatch: int  # per process
    continuous: bool = False

    def __str__(self) -> str:
        back_end = "continuous batching" if self.continuous else "generate"
        how = "2 threads" if self.processes == 1 else "2 processes"
        return f"{self.samples} a step, {self.microbatch} a pass, {how}, {back_end}"


@dataclass(frozen=True)
class Case:
    """A kind of work. warm_up: optimizer steps on right answers that the model has seen. rate: samples/s of ours,
    roughly, from which the number of steps follows."""

    name: str
    characters: str
    max_new_tokens: int
    warm_up: int
    rate: float


@dataclass
class Measured:
    """One run's steady state. cpu_seconds: of all its processes. lengths: of responses, in tokens, the end included."""

    system: str
    samples_per_step: int
    steps: int
    samples: int
    seconds: float
    cpu_seconds: float
    lengths: list[int] = field(repr=False)
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    def row(self) -> dict[str, Any]:
        """The row of the results' file: lengths as mean, 95th percentile and maximum."""
        found = asdict(self)
        lengths = sorted(found.pop("lengths"))
        mean = sum(lengths) / len(lengths)
        return found | {
            "samples_per_s": round(self.rate, 2),
            "tokens_per_s": round(self.rate * mean, 1),
            "samples_per_cpu_s": round(self.samples / max(self.cpu_seconds, 1e-9), 2),
            "length_mean": round(mean, 1),
            "length_p95": lengths[int(0.95 * (len(lengths) - 1))],
            "length_max": lengths[-1],
        }


# --- the model and the data -------------------------------------------------------------------------------------------


def score(text: str) -> float:
    """The reward of both systems: a checksum, so that no group of responses is without a signal."""
    return sum(map(ord, text)) % 97 / 97


def make_folder(home: Path, case: Case) -> None:
    """Model, tokenizer, train.jsonl and rewards.py of one case."""
    from realgraph.commands.arithmetic import problems, row

    home.mkdir(parents=True)
    pairs, _ = problems(seed=0)
    (home / "train.jsonl").write_text("".join(json.dumps(row(a, b)) + "\n" for a, b in pairs), encoding="utf-8")
    (home / "rewards.py").write_text(REWARDS, encoding="utf-8")
    make_model(home / "model", case, pairs)


REWARDS = '''"""The reward of benchmarks/vs_trl.py; notes the lengths that it has seen."""


def score(text, finished, log):
    with open(log, "a", encoding="utf-8") as file:
        file.write("".join(f"{len(t) + end:d}\\n" for t, end in zip(text, finished)))
    return [sum(map(ord, t)) % 97 / 97 for t in text]
'''


def make_model(folder: Path, case: Case, pairs: Sequence[tuple[int, int]]) -> None:
    """A Qwen3 of 0.8M parameters with small random weights: nearly uniform over its tokens, so that lengths are
    geometric with the vocabulary as their mean. For the sums it first learns their form, for some seconds."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from realgraph.commands.arithmetic import small_config
    from realgraph.rehearsal.tokenizer import write_tokenizer

    vocabulary = write_tokenizer(folder, case.characters + "$", "$", "$")
    disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ends = (vocabulary["$"], vocabulary["$"])
    model = Qwen3ForCausalLM(small_config(len(vocabulary), ends, n_layers=4, max_length=512))
    if case.warm_up:
        learn_form(model, case.warm_up, [[vocabulary[character] for character in text] for text in texts(pairs)])
    model.save_pretrained(folder)


def texts(pairs: Sequence[tuple[int, int]]) -> list[str]:
    """The sums with their answers and ends, all of one length."""
    return [f"{a:02d}+{b:02d}={a + b:03d}$" for a, b in pairs]


def learn_form(model: Any, n_steps: int, rows: Sequence[Sequence[int]]) -> None:
    """So many optimizer steps on what follows the `=` of right answers."""
    import torch

    tokens = torch.tensor(rows)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(n_steps):
        batch = tokens[torch.randint(len(tokens), (128,))]
        logits = model(batch).logits[:, 5:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 6:].flatten()).backward()
        adam.step()
        adam.zero_grad()


# --- one run of either system -----------------------------------------------------------------------------------------


class CpuClock:
    """CPU seconds of a process and all its descendants over time. Linux; elsewhere it knows nothing and says 0."""

    def __init__(self, pid: int) -> None:
        self._pid, self._seconds = pid, dict[int, float]()
        self._times: list[tuple[float, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> float:
        """CPU seconds spent between two moments of time.time()."""
        at = [next((cpu for moment, cpu in self._times if moment >= edge), self._last()) for edge in (begin, end)]
        return at[1] - at[0]

    def _last(self) -> float:
        return self._times[-1][1] if self._times else 0.0

    def _watch(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            for pid in self._family():
                self._read(pid)
            self._times.append((time.time(), sum(self._seconds.values())))

    def _family(self) -> list[int]:
        found, new = [self._pid], [self._pid]
        while new:
            new = [child for pid in new for child in _children(pid)]
            found += new
        return found

    def _read(self, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            return
        self._seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text(encoding="utf-8").split()]
    except OSError:
        return []


def execute(command: Sequence[str], threads: int, log: Path) -> CpuClock:
    """Run a command to its end, its output into `log`. Raises RuntimeError, with the last lines, where it fails."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        clock = CpuClock(process.pid)
        try:
            code = process.wait(RUN_SECONDS)
        finally:
            process.terminate()
            clock.close()
    if code != 0:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-30:])
        raise RuntimeError(f"{' '.join(command[:6])} ... failed with {code}:\n{tail}")
    return clock


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of the steps of a run, from its directory."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == "step"]


def run_ours(home: Path, case: Case, groups: int, seconds: float) -> Measured:
    """`realgraph run` for about so many seconds of steady state, on two workers."""
    out = Path(tempfile.mkdtemp(prefix="ours-", dir=home))
    log = out / "lengths.txt"
    skipped = 2
    steps = skipped + max(3, round(seconds * case.rate / (groups * GROUP)))
    (home / "run.yaml").write_text(json.dumps(run_file(case, groups, steps, log)), encoding="utf-8")
    command = [sys.executable, "-m", "realgraph.cli", "run", str(home / "run.yaml"), f"outputs.dir={out / 'run'}"]
    clock = execute(command, 1, out / "log.txt")
    steady = steps_of(out / "run")[skipped:]
    metrics: list[dict[str, float]] = [record["metrics"] for record in steady]
    took = sum(record["seconds"] for record in steady)
    lengths = [int(line) for line in log.read_text(encoding="utf-8").split()]
    return Measured(
        system="realgraph",
        samples_per_step=groups * GROUP,
        steps=len(steady),
        samples=int(sum(step["batch/samples"] for step in metrics)),
        seconds=took,
        cpu_seconds=clock.between(steady[0]["time"] - steady[0]["seconds"], steady[-1]["time"]),
        lengths=lengths[skipped * groups * GROUP :],
        extra={
            name: statistics.fmean(step[name] for step in metrics)
            for name in ("rollout/seconds", "train/seconds", "reward/seconds", "advantage/seconds", "train/skipped")
        },
    )


def run_file(case: Case, groups: int, steps: int, log: Path) -> dict[str, Any]:
    """Our run of the library's GRPO with TRL's settings."""
    return {
        "graph": "grpo",
        "params": {"group_size": GROUP, "clip_low": 0.2, "clip_high": 0.28, "lr": LR},
        "models": {"actor": {"path": "model"}},
        "data": {"path": "train.jsonl", "max_prompt_tokens": 8, "columns": {"prompt": "prompt", "answer": "answer"}},
        "batch": {"groups": groups, "max_new_tokens": case.max_new_tokens},
        "calls": {
            "reward": {
                "fn": "rewards:score",
                "over": "group",
                "reads": ["text", "finished"],
                "args": {"log": str(log)},
            },
            "train": {
                "loss": {"aggregate": {"kind": "token_mean"}, "terms": {"policy": {"off_policy": {"kind": "ignore"}}}}
            },
        },
        "cluster": {"nodes": 1, "devices": 2, "kind": "cpu"},
        "outputs": {"transcripts_every": 0},
        "steps": steps,
        "seed": 1,
    }


def run_trl(home: Path, case: Case, setting: Setting, seconds: float) -> Measured:
    """TRL's trainer, in a process of its own (or two), for about so many seconds of steady state."""
    out = Path(tempfile.mkdtemp(prefix="trl-", dir=home))
    task = {"home": str(home), "out": str(out), "new_tokens": case.max_new_tokens, "seconds": seconds}
    script = ["-m", "benchmarks.trl_process", json.dumps(task | asdict(setting))]
    if setting.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
        script = [*launcher, *script]
    clock = execute([sys.executable, *script], 2 // setting.processes, out / "log.txt")
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("rank-*.json"))]
    ends: list[float] = reports[0]["ends"]
    return Measured(
        system="trl",
        samples_per_step=setting.samples,
        steps=len(ends) - 1,
        samples=setting.samples * (len(ends) - 1),
        seconds=ends[-1] - ends[0],
        cpu_seconds=clock.between(ends[0], ends[-1]),
        lengths=[length for report in reports for length in report["lengths"]],
    )
