"""User functions in their subprocesses, by really hanging, crashing, leaking and printing."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import Function
from realgraph.runtime.functions.functions import Unit, load_applied
from realgraph.runtime.functions.host import FunctionError, FunctionHost
from realgraph.runtime.functions.process import PASSED

PARSES = """
import argparse
options = argparse.ArgumentParser().parse_args()
def score(text): return 1.0
"""
USER_MODULE = Path(__file__).parent / "user_functions.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("user")
    (place / "mine.py").write_bytes(USER_MODULE.read_bytes())
    (place / "broken.py").write_text("import no_such_module_at_all\n")
    (place / "slow.py").write_text("import time\ntime.sleep(60)\ndef score(text): return 1.0\n")
    (place / "string.py").write_text("def score(text): return 1.0\n")  # Python has imported one of its own
    (place / "parses.py").write_text(PARSES)
    (place / "leaves.py").write_text("raise SystemExit(2)\n")
    return place


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[FunctionHost]:
    with FunctionHost(str(folder), processes=2) as shared:
        yield shared


def texts(*words: str) -> list[Unit]:
    return [Unit((i,), {"text": word}) for i, word in enumerate(words)]


REWARD = {"reward": "sample float32"}


def test_values_come_back_in_order_with_arguments(host: FunctionHost) -> None:
    call = Function("mine:double", ("text",), REWARD, args={"factor": 3})
    results = host.run("reward", call, texts(*["x" * (i % 7) for i in range(100)]))
    assert [r.values for r in results] == [{"reward": 3.0 * (i % 7)} for i in range(100)]
    assert not any(r.error for r in results)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("raise", "KeyError: 'no such test case' (mine.py:"),
        ("exit", "ended its process with exit code 3"),
        ("sysexit", "SystemExit: no"),
        ("segv", "had its process killed by SIGSEGV"),
        ("recurse", "RecursionError: maximum recursion depth"),
        ("nan", "returned nan for 'reward'; expected a finite number"),
        ("words", "returned 'good' for 'reward'; expected a finite number"),
        ("huge", "returned 70 MiB, more than the 64 MiB allowed"),
        ("object", "returned a value of the type object, which is none of: bool, int"),
        ("hang", "took more than 0.4 s"),
        ("sleep", "took more than 0.4 s"),
        ("close", "closed the socket that carries its answers, and was killed"),
    ],
)
def test_a_bad_unit_is_named_and_scored_and_the_others_go_on(host: FunctionHost, word: str, said: str) -> None:
    seconds = 0.4 if word in ("hang", "sleep") else 10.0
    call = Function("mine:behave", ("text",), REWARD, timeout_seconds=seconds, on_error="score", error_value=-1.0)
    before = time.monotonic()
    results = host.run("reward", call, texts("a", "bb", word, "ccc", "dd"))
    assert time.monotonic() - before < 20
    assert said in results[2].error
    assert results[2].error.startswith("reward: mine:behave on sample 2: ")
    assert results[2].sample == 2
    assert [r.values["reward"] for r in results] == [1.0, 2.0, -1.0, 3.0, 2.0]
    assert [bool(r.error) for r in results] == [False, False, True, False, False]


def test_the_first_failure_ends_the_call(host: FunctionHost) -> None:
    call = Function("mine:behave", ("text",), REWARD, timeout_seconds=5.0)
    before = time.monotonic()
    results = host.run("reward", call, texts("a", "raise", *["sleep"] * 50))
    assert time.monotonic() - before < 4
    (failed,) = [r for r in results if r.error]
    assert failed.sample == 1
    assert "Traceback" in failed.detail
    assert "behave" in failed.detail
    assert results[0].values in ({"reward": 1.0}, {})  # whether it had ended by then
    assert results[40].values == {}
    # And the processes that were asleep are not held up for ever: the next call gets its turn.
    assert host.run("reward", call, texts("abc"))[0].values == {"reward": 3.0}


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        ("broken:score", "ModuleNotFoundError: No module named 'no_such_module_at_all' (broken.py:1)"),
        ("absent:score", "No module named 'absent'"),
        ("mine:nothing", "mine.py) has no 'nothing'"),
        ("string:score", "string.py: rename that) has no 'score'"),
        ("mine:started", "is no function but float"),
        ("mine:keep", "it is called with text, but is defined with (reward)"),
        ("leaves:score", "SystemExit: 2"),
    ],
)
def test_a_function_that_cannot_be_had_is_no_bad_sample(host: FunctionHost, fn: str, said: str) -> None:
    call = Function(fn, ("text",), REWARD, on_error="score")
    with pytest.raises(FunctionError) as error:
        host.run("reward", call, texts("a", "b"))
    assert said in str(error.value)
    with pytest.raises(FunctionError) as error:
        host.check("reward", call)
    assert said in str(error.value)


def test_a_module_may_parse_arguments(host: FunctionHost) -> None:
    (result,) = host.run("reward", Function("parses:score", ("text",), REWARD), texts("1"))
    assert result.values == {"reward": 1.0}


def test_a_module_that_never_imports_has_a_deadline(folder: Path) -> None:
    with FunctionHost(str(folder), start_seconds=1.0) as host, pytest.raises(FunctionError, match="more than 1 s"):
        host.check("reward", Function("slow:score", ("text",), REWARD))


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with FunctionHost(str(tmp_path / "gone")) as host, pytest.raises(FunctionError, match="can't start a process"):
        host.run("reward", Function("mine:double", ("text",), REWARD), texts("a"))


def test_check_accepts_what_can_be_called(host: FunctionHost) -> None:
    host.check("reward", Function("mine:double", ("text",), REWARD, args={"factor": 2.0}))
    host.check("reward", Function("exact_match", ("text", "answer"), REWARD))


def test_several_keys_groups_and_filters(host: FunctionHost) -> None:
    both = Function("mine:two", ("text",), {"reward": "sample float32", "right": "sample bool"})
    assert host.run("r", both, texts("a", "abc"))[1].values == {"reward": 1.0, "right": True}
    unit = Unit((8, 9, 10), {"text": ["4", "5", "4"], "answer": "4", "reward": [0.0, 0.5, 1.0]})
    group = Function("mine:group", ("text", "answer", "reward"), REWARD, over="group")
    assert host.run("r", group, [unit])[0].values == {"reward": [1.0, 0.5, 2.0]}
    keep = Function("mine:keep", ("reward",), {"keep": "group bool"}, over="group")
    kept = host.run("k", keep, [Unit((0, 1), {"reward": [0.0, 1.0]}), Unit((2, 3), {"reward": [0.0, 0.0]})])
    assert [r.values["keep"] for r in kept] == [True, False]
    tokens = Function("mine:numbers", ("tokens",), {"process": "token float32"})
    assert host.run("t", tokens, [Unit((0,), {"tokens": [5, 6]}, lengths=(2,))])[0].values == {"process": [5.0, 6.0]}
    wrong = host.run("t", tokens, [Unit((0,), {"tokens": [5, 6]}, lengths=(3,))])
    assert "returned a list of 2 for 'process'; expected a list of 3, one a token" in wrong[0].error


def test_coroutines_of_one_process_run_at_once(folder: Path) -> None:
    with FunctionHost(str(folder)) as host:
        call = Function("mine:wait", ("seconds",), REWARD)
        units = [Unit((i,), {"seconds": 0.3}) for i in range(30)]
        host.run("judge", call, units[:1])
        before = time.monotonic()
        results = host.run("judge", call, units)
        assert time.monotonic() - before < 3  # 9 s one after another
        assert max(r.values["reward"] for r in results) >= 25
        assert len(host.pids()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("block", "took more than 0.5 s"),
        ("exit", "exit code 4"),
        ("raise", "async bad"),
        ("timeout", "TimeoutError: the judge did not answer"),
    ],
)
def test_the_guilty_coroutine_is_found_among_many(folder: Path, word: str, said: str) -> None:
    with FunctionHost(str(folder)) as host:
        call = Function("mine:stubborn", ("text",), REWARD, timeout_seconds=0.5, on_error="score", error_value=-2.0)
        results = host.run("judge", call, texts(*["fine"] * 5, word, *["fine"] * 5))
        assert [r.values["reward"] for r in results] == [1.0] * 5 + [-2.0] + [1.0] * 5
        assert said in results[5].error
        assert "sample 5" in results[5].error


def test_a_slow_coroutine_is_cancelled_without_its_neighbours(folder: Path) -> None:
    with FunctionHost(str(folder)) as host:
        call = Function("mine:wait", ("seconds",), REWARD, timeout_seconds=0.3, on_error="score")
        seconds = [0.01, 9.0, 0.02]
        results = host.run("judge", call, [Unit((i,), {"seconds": s}) for i, s in enumerate(seconds)])
        pid = host.pids()
        assert [bool(r.error) for r in results] == [False, True, False]
        assert "took more than 0.3 s" in results[1].error
        assert host.run("judge", call, [Unit((0,), {"seconds": 0.0})])[0].error == ""
        assert host.pids() == pid  # it was not killed for it


def test_a_plain_function_may_run_an_event_loop(host: FunctionHost) -> None:
    call = Function("mine:uses_loop", ("text",), REWARD)
    assert host.run("r", call, texts("fine"))[0].values == {"reward": 1.0}


def test_megabytes_of_print_do_no_harm(host: FunctionHost, capfd: pytest.CaptureFixture[str]) -> None:
    with FunctionHost(host._user_dir) as own:
        results = own.run("reward", Function("mine:loud", ("text",), REWARD), texts("a", "b"))
    assert [r.values for r in results] == [{"reward": 1.0}] * 2
    captured = capfd.readouterr()
    assert len(captured.out) > 7_000_000
    assert len(captured.err) >= 200_000


def test_megabytes_of_input_arrive(host: FunctionHost) -> None:
    call = Function("mine:double", ("text",), REWARD)
    results = host.run("reward", call, texts(*["x" * 5_000_000] * 4))
    assert [r.values["reward"] for r in results] == [1e7] * 4


def test_a_leak_is_stopped_by_a_fresh_process(folder: Path) -> None:
    with FunctionHost(str(folder), memory_bytes=400 * 2**20) as host:
        call = Function("mine:leak", ("n",), REWARD)
        results = host.run("leak", call, [Unit((i,), {"n": 30}) for i in range(20)])
        assert not any(r.error for r in results)
        assert len({r.values["reward"] for r in results}) > 1  # process ids
        (big,) = host.run("leak", call, [Unit((0,), {"n": 1000})])
        assert "MemoryError" in big.error


def test_no_secret_no_torch_and_the_right_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALGRAPH_KEY", "secret")
    with FunctionHost(str(folder)) as host:
        assert host.run("r", Function("mine:environ", ("text",), REWARD), texts("a"))[0].values == {"reward": 0.0}
        assert host.run("r", Function("mine:tell_torch", ("text",), REWARD), texts("a"))[0].values == {"reward": 0.0}
        keyed = host.run("r", Function("mine:keyed", ("text",), REWARD, on_error="score"), texts("a"))[0]
        assert "KeyError: 'JUDGE_KEY' (mine.py:" in keyed.error and keyed.error.endswith("names: env: [JUDGE_KEY]")
        call = Function("mine:where", ("text",), {"cwd": "sample text", "file": "sample text"})
        found = host.run("r", call, texts("a"))[0].values
        assert found == {"cwd": str(folder), "file": str(folder / "mine.py")}


def test_only_named_variables_reach_a_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUDGE_API_KEY", "OTHER_API_KEY", "HTTPS_PROXY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_TIME", "C")
    keys = {"names": "sample json"}

    def names(host: FunctionHost, *env: str) -> set[str]:
        return set(host.run("r", Function("mine:variables", ("text",), keys, env=env), texts("a"))[0].values["names"])

    with FunctionHost(str(folder)) as host:
        bare = names(host)
        assert bare >= {"PATH", "LC_TIME", "OMP_NUM_THREADS"}
        assert not bare & {"JUDGE_API_KEY", "OTHER_API_KEY", "HTTPS_PROXY", "AWS_SECRET_ACCESS_KEY"}
        # Functions that name others run in processes of their own, in whatever order they are called.
        assert names(host, "JUDGE_API_KEY") == bare | {"JUDGE_API_KEY"}
        assert names(host, "OTHER_API_KEY", "JUDGE_API_KEY") == bare | {"JUDGE_API_KEY", "OTHER_API_KEY"}
        assert names(host) == bare
        assert len(host.pids()) == 3


def test_the_document_lists_the_variables_that_pass() -> None:
    text = (Path(__file__).parent.parent / "docs" / "functions.md").read_text()
    for name in PASSED.pattern.split("|"):
        shown = name.replace(r"_\w+", "_*").replace(r"\w+", "*")
        assert f"`{shown}`" in text, shown


def test_many_threads_share_a_host(host: FunctionHost) -> None:
    found: dict[int, list[float]] = {}

    def work(k: int) -> None:
        call = Function("mine:double", ("text",), REWARD, args={"factor": k})
        found[k] = [r.values["reward"] for r in host.run(f"r{k}", call, texts(*["x" * i for i in range(20)]))]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {k: [float(k * i) for i in range(20)] for k in range(1, 7)}


def test_a_deadline_of_the_whole_call_names_what_is_open(folder: Path) -> None:
    with FunctionHost(str(folder)) as host:
        call = Function("mine:behave", ("text",), REWARD, timeout_seconds=60)
        host.check("reward", call)
        with pytest.raises(
            TimeoutError, match=r"reward: no answer for 1 of 2 units within 0\.5 s; the first is sample 1"
        ):
            host.run("reward", call, texts("a", "sleep"), deadline_seconds=0.5)


def test_closing_ends_a_run_in_another_thread_and_every_process(folder: Path) -> None:
    host = FunctionHost(str(folder), processes=2)
    call = Function("mine:behave", ("text",), REWARD, timeout_seconds=60, on_error="score")
    raised: list[BaseException] = []

    def work() -> None:
        try:
            host.run("reward", call, texts("sleep", "sleep", "sleep"))
        except FunctionError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 10
    while len(host.pids()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    pids = host.pids()
    assert len(pids) == 2
    host.close()
    thread.join(10)
    assert "closed" in str(raised[0])
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        host.run("reward", call, texts("a"))
    host.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_a_function_started_dies_with_its_process(folder: Path) -> None:
    seconds = f"61.{os.getpid()}"  # a command line of this test's own

    def started() -> bool:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it may end while we look
                lines.append(path.read_bytes())
        return any(seconds.encode() in line for line in lines)

    with FunctionHost(str(folder)) as host:
        call = Function("mine:start_another", ("text",), REWARD, on_error="score")
        assert host.run("r", call, texts(seconds))[0].error
        deadline = time.monotonic() + 5
        while started() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not started()


def test_no_subprocess_outlives_a_killed_worker(folder: Path) -> None:
    script = f"""
        import sys, threading, time
        from realgraph.graphs.spec import Function
        from realgraph.runtime.functions.host import FunctionHost
        from realgraph.runtime.functions.functions import Unit
        host = FunctionHost({str(folder)!r}, processes=2)
        call = Function("mine:behave", ("text",), {REWARD!r}, timeout_seconds=60)
        units = [Unit((0,), {{"text": "hang"}}), Unit((1,), {{"text": "sleep"}})]
        threading.Thread(target=host.run, args=("r", call, units), daemon=True).start()
        while len(host.pids()) < 2: time.sleep(0.01)
        time.sleep(0.3)
        print(*host.pids(), flush=True)
        time.sleep(60)
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(word) for word in worker.stdout.readline().split()]
    assert len(pids) == 2
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)
    worker.stdout.close()


def test_a_pattern_of_the_user_runs_under_the_time_limit(host: FunctionHost) -> None:
    call = Function("format_match", ("text",), REWARD, args={"pattern": r"<a>.*</a>"}, timeout_seconds=0.5)
    assert [r.values["reward"] for r in host.run("f", call, texts("<a>\n4</a> ", "4"))] == [1.0, 0.0]
    evil = Function("format_match", ("text",), REWARD, args={"pattern": r"(a+)+b"}, timeout_seconds=0.5)
    assert "took more than 0.5 s" in host.run("f", evil, texts("a" * 40))[0].error


def test_functions_of_apply_entries_are_told_by_their_path(tmp_path: Path) -> None:
    (tmp_path / "applied_maths.py").write_text("def term(batch, outputs):\n    return outputs\n")
    entries = {"$.calls.train.loss.terms.a.fn": "applied_maths:term"}
    assert load_applied(entries, str(tmp_path))["applied_maths:term"](1, 2) == 2
    with pytest.raises(ConfigError) as error:
        load_applied({**entries, "$.calls.train.loss.terms.b.fn": "applied_maths:trem"}, str(tmp_path))
    assert "$.calls.train.loss.terms.b.fn: can't load 'applied_maths:trem': AttributeError" in str(error.value)
