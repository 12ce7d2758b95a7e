"""Unexpected values and exceptions of functions: each is named with its call and its sample, and none hangs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from realgraph.graphs.spec import Function
from realgraph.runtime.functions.functions import Unit
from realgraph.runtime.functions.host import FunctionHost

USER_MODULE = Path(__file__).parent / "user_functions.py"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionHost]:
    place = tmp_path_factory.mktemp("user")
    (place / "mine.py").write_bytes(USER_MODULE.read_bytes())
    with FunctionHost(str(place)) as shared:
        yield shared


REWARD = {"reward": "sample float32"}
ODD = {
    "surrogate raised": r"ValueError: half a character: \udc80 (mine.py:",
    "surrogate returned": "returned what can't be sent: UnicodeEncodeError",
    "mute": "Mute: its message can't be read: RuntimeError (mine.py:",
    "group": "ExceptionGroup: several (2 sub-exceptions)",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit: 2",
    "generator": "returned a value of the type generator, which is none of: bool, int,",
    "coroutine": "returned a coroutine that nothing has awaited: write the function as `async def`",
    "set": "returned a value of the type set, which is none of: bool, int,",
    "bytes": "returned a value of the type bytes, which is none of: bool, int,",
    "complex": "returned a value of the type complex, which is none of: bool, int,",
    "decimal": "numpy, torch; convert it, for example by float(...)",
    "function": "returned a value of the type function, which is none of: bool, int,",
    "cycle": "returned what can't be sent: RecursionError",
    "deep": "returned what can't be sent: RecursionError",
    "itself": "returned what can't be sent: RecursionError",
    "quite deep": "for 'reward'; expected a finite number",
    "huge int": "returned what can't be sent: ",
    "huge float": "returned 1e+300 for 'reward'; expected a finite number within float32",
    "infinity": "returned -inf for 'reward'; expected a finite number",
    "none": "returned None for 'reward'; expected a finite number",
    "list": "returned [1.0] for 'reward'; expected a finite number",
    "write to the socket": r"wrote b'hello\nworld\n' to the socket that carries its answers",
    "write a length to the socket": "to the socket that carries its answers",
}


@pytest.mark.parametrize("fn", ["mine:odd", "mine:odd_async"])
@pytest.mark.parametrize("word", [*ODD, "stop"])
def test_the_true_cause_is_named_and_the_next_unit_runs(host: FunctionHost, fn: str, word: str) -> None:
    call = Function(fn, ("text",), REWARD, timeout_seconds=20.0, on_error="score", error_value=-1.0)
    first, odd, last = host.run("r", call, [Unit((i,), {"text": text}) for i, text in enumerate(("a", word, "b"))])
    said = ODD.get(word, "StopIteration" if fn == "mine:odd" else "RuntimeError: coroutine raised StopIteration")
    assert odd.error.startswith(f"r: {fn} on sample 1: ")
    assert said in odd.error
    assert [result.values["reward"] for result in (first, odd, last)] == [1.0, -1.0, 1.0]
    odd.error.encode()
    odd.detail.encode()


@pytest.mark.parametrize(("word", "value"), [("bool", 1.0), ("numpy", 0.5), ("numpy row", 0.25), ("write to 1", 1.0)])
def test_numbers_of_any_kind_are_numbers(host: FunctionHost, word: str, value: float) -> None:
    (result,) = host.run("r", Function("mine:odd", ("text",), REWARD), [Unit((0,), {"text": word})])
    assert (result.error, result.values) == ("", {"reward": value})


@pytest.mark.parametrize(
    ("dtype", "number", "fits"),
    [
        ("int32", 2**31 - 1, True),
        ("int32", 2**31, False),
        ("int32", -(2**31) - 1, False),
        ("int64", 2**63 - 1, True),
        ("int64", 2**63, False),
        ("int64", -(2**63), True),
        ("int64", 1e19, False),
        ("float32", 3.4e38, True),
        ("float32", -3.5e38, False),
        ("float64", 1e300, True),
        ("float32", 2**62, True),
    ],
)
def test_a_number_fits_its_dtype_or_is_refused(host: FunctionHost, dtype: str, number: float, fits: bool) -> None:
    call = Function("mine:whole", ("number",), {"n": f"sample {dtype}"})
    (result,) = host.run("r", call, [Unit((0,), {"number": number})])
    assert result.values == ({"n": number} if fits else {})
    assert (
        fits or f"for 'n'; expected a {'finite' if 'float' in dtype else 'whole'} number within {dtype}" in result.error
    )


def test_inputs_that_have_no_form_are_named(host: FunctionHost) -> None:
    call = Function("mine:double", ("text",), REWARD)
    (result,) = host.run("r", call, [Unit((4,), {"text": "half \udc80"})])
    assert "r: mine:double on sample 4: its inputs can't be sent to a subprocess: " in result.error
