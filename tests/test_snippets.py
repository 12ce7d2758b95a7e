"""The graphs and functions of the documents: each compiles without a warning, and passes a dry run on real rows."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")

from realgraph.graphs.yaml.document import read_document
from realgraph.planner.plan.plan import Hashes, Plan
from realgraph.run.requests import request_for
from realgraph.run.running import job_of
from realgraph.run_file.compose import check_run
from realgraph.run_file.open_graph import graph_and_warnings
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.preflight.preflight import preflight
from tests.runs import make_home

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("functions.md", "graphs.md")
ROW = {
    "prompt": "12+3=",
    "answer": "15",
    "response": "15",
    "chosen": "15",
    "rejected": "16",
    "good": 1.0,
    "difficulty": 0.5,
    "weight": 2.0,
}


def snippets() -> dict[str, str]:
    """File name -> text, of every block that begins with `# name.yaml` or `# name.py`."""
    found: dict[str, str] = {}
    for page in PAGES:
        for language, block in re.findall(r"```(\w+)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            if language not in ("yaml", "python"):
                continue
            name = re.match(r"# (\w+\.(?:yaml|py))\b", block)
            assert name, f"{page}: a block without a file name is no test"
            assert name[1] not in found, f"{page}: {name[1]} stands there twice"
            found[name[1]] = block
    return found


SNIPPETS = snippets()
GRAPHS = sorted(name for name in SNIPPETS if name.endswith(".yaml"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all snippets, a tiny model, one with a score head, and rows that have every column."""
    folder = make_home(tmp_path_factory.mktemp("snippets"))
    shutil.copytree(folder / "model", folder / "scorer")
    weights = folder / "scorer" / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "score.weight": np.zeros((1, len(tensors["model.norm.weight"])), np.float32)}, weights)
    for name, text in SNIPPETS.items():
        (folder / name).write_text(text)
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 8)
    return folder


def write_run(home: Path, name: str) -> Path:
    graph, _ = graph_and_warnings(read_document(home / name, name))
    run = {
        "graph": name,
        "models": {
            role: {"path": "model" if model.head == "lm" or model.trainable else "scorer"}
            for role, model in graph.models.items()
            if model.init is None
        },
        "data": {"path": "rows.jsonl"},
        "batch": {"groups": 4, "max_new_tokens": 4},
        "cluster": {"kind": "cpu", "devices": 1},
        "steps": 1,
    }
    file = home / f"run_{name}"
    file.write_text(json.dumps(run))
    return file


def test_the_pages_have_the_graphs_that_they_promise() -> None:
    promised = {"dpo", "reward_model", "distill", "debate", "best_of_n", "kto", "online_dpo", "rewards"}
    promised |= {"demonstrations", "own_maths"}
    assert {name.removesuffix(".yaml") for name in GRAPHS} == promised


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_the_documents_compiles_and_passes_a_dry_run(home: Path, name: str) -> None:
    graph, warnings = graph_and_warnings(read_document(home / name, name))
    assert warnings == ()
    file = write_run(home, name)
    checked = check_run(file)
    assert checked.warnings == ()
    no_plan = Plan({}, {}, Hashes("", "", ""))  # none is needed to look at rows and functions
    lines = "\n".join(preflight(job_of(checked, request_for(checked), no_plan, RunFolder(home / "run"))))
    functions = set(re.findall(r'fn: "(\w+:\w+)"', SNIPPETS[name]))
    assert all(function in lines for function in functions)
    assert "not tried" not in lines and "no gradient" not in lines, lines
    assert graph.name == name.removesuffix(".yaml")


@pytest.mark.parametrize("name", ["debate.yaml", "demonstrations.yaml"])
def test_graphs_that_are_said_to_run_ahead_are_no_mistake_there(home: Path, name: str) -> None:
    assert check_run(write_run(home, name), ["staleness=1"]).run.staleness == 1


def test_every_function_of_the_documents_is_used() -> None:
    used = set(re.findall(r'fn: "(\w+):(\w+)"', "".join(SNIPPETS[name] for name in GRAPHS)))
    for name in SNIPPETS:
        if name.endswith(".py"):
            defined = set(re.findall(r"^(?:async )?def (\w+)", SNIPPETS[name], re.MULTILINE))
            unused = {function for function in defined if (name.removesuffix(".py"), function) not in used}
            assert unused <= {"log_ratios"}  # what two of them share
