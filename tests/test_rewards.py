"""Built-in rewards and filters, and the check of what a function returns. No subprocess."""

from pathlib import Path

import pytest

from realgraph.graphs.functions import BUILTINS, GATHERED, SIGNATURES
from realgraph.graphs.keys import parse_key_type
from realgraph.graphs.spec import Function
from realgraph.runtime.functions.functions import Unit, check_output, error_output
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.functions.rewards import FUNCTIONS, INLINE, best_of, final_number, last_number, reward_spread

REWARD = {"reward": "sample float32"}


def test_builtins_are_those_of_the_graph_language() -> None:
    assert set(FUNCTIONS) - {GATHERED} == set(BUILTINS) == set(SIGNATURES)


def test_quick_builtins_start_no_process(tmp_path: Path) -> None:
    with FunctionHost(str(tmp_path)) as host:
        for fn in INLINE - {GATHERED}:
            signature = SIGNATURES[fn]
            over = signature.over or "sample"
            values = {"text": " 42\n", "answer": "42", "reward": [0.0, 1.0]}
            given = {"low": 0.0, "high": 40.0, "template": "So {text}"}
            args = {name: given[name] for name in signature.args}
            kwargs = {key: values[key] for key in signature.keys}
            writes = {"reward_spread": {"keep": "group bool"}, "fill_template": {"asked": "sample text"}}.get(
                fn, REWARD
            )
            samples = (0, 1) if over == "group" else (0,)
            call = Function(fn, signature.keys, writes, args=args, over=over)
            (result,) = host.run("r", call, [Unit(samples, kwargs)])
            assert result.error == ""
            assert (
                result.values
                == {
                    "exact_match": {"reward": 1.0},
                    "last_number": {"reward": 1.0},
                    "length": {"reward": 4.0},
                    "best_of": {"reward": [0.0, 1.0]},
                    "reward_spread": {"keep": True},
                    "number_in": {"reward": 40.0},
                    "fill_template": {"asked": "So "},
                }[fn]
            )
        assert host.pids() == ()
        bad = Function("last_number", ("text", "answer"), REWARD)
        results = host.run("r", bad, [Unit((i,), {"text": "1", "answer": a}) for i, a in enumerate(["1", "none", "1"])])
        assert results[1].error == "r: last_number on sample 1: ValueError: the answer 'none' holds no number"
        assert results[2].values == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 apples and 1,234.5 pears.", 1234.5),
        ("so 5\n#### 42", 42.0),
        ("#### -7 (not 8)", 8.0),
        ("it costs $1,000", 1000.0),
        ("12+34=46", 46.0),
        ("12-34", 34.0),  # an operator; a sign stands at the beginning, or after a space or a sign
        ("x=-34", -34.0),
        ("答案是-34", -34.0),
        ("it is \u22125", -5.0),
        ("1, 2,3", 3.0),
        ("roots 1,2,30", 30.0),
        ("in all 1,234,567", 1234567.0),
        ("none", None),
        ("x = .5", 0.5),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert final_number(text) == number
    if number is not None:
        assert last_number(text, f"reason\n#### {number}") == 1.0
        assert last_number(text + " 99999", f"{number}") == 0.0


def test_best_and_spread() -> None:
    assert best_of([0.0, 1.0, 1.0]) == [0.0, 1.0, 0.0]
    assert best_of([0.0, 1.0, 2.0], k=2) == [0.0, 1.0, 1.0]
    assert best_of([0.0, 0.0], least=0.5) == [0.0, 0.0]
    assert reward_spread([0.0, 0.1]) is True
    assert reward_spread([1.0, 1.0]) is False
    assert reward_spread([0.0, 0.1], least=0.2) is False


@pytest.mark.parametrize(
    ("over", "writes", "returned", "expected"),
    [
        ("sample", {"a": "sample float32"}, 1, {"a": 1.0}),
        ("sample", {"a": "sample bool"}, 1.0, {"a": True}),
        ("sample", {"a": "sample int32"}, 2.0, {"a": 2}),
        ("sample", {"a": "sample int32"}, 2.5, "expected a whole number"),
        ("sample", {"a": "sample bool"}, 2, "expected true or false"),
        ("sample", {"a": "sample text"}, "x", {"a": "x"}),
        ("sample", {"a": "sample json"}, {"a": [1, None]}, {"a": [1, None]}),
        ("sample", {"a": "sample tokens"}, [1, 2], {"a": [1, 2]}),
        ("sample", {"a": "sample float32"}, {"a": 2.0}, {"a": 2.0}),
        ("sample", {"a": "sample float32"}, None, "returned None for 'a'; expected a finite number"),
        ("sample", {"a": "sample float32"}, {"score": 1.0, "acc": 1}, r"number .* each of its keys, score, acc, under"),
        ("sample", {"a": "sample float32", "b": "sample bool"}, 1.0, "expected a mapping with the keys a, b"),
        ("sample", {"a": "sample float32", "b": "sample bool"}, {"a": 1}, r"returned the keys \['a'\]"),
        ("sample", {}, None, {}),
        ("group", {"a": "sample float32"}, [1, 2, 3], {"a": [1.0, 2.0, 3.0]}),
        ("group", {"a": "sample float32"}, 1.0, "expected a list of 3, one a sample"),
        ("group", {"a": "group bool"}, True, {"a": True}),
        ("group", {"a": "token float32"}, [[1], [1, 2], []], {"a": [[1.0], [1.0, 2.0], []]}),
        ("batch", {"a": "group bool"}, [True, False], {"a": [True, False]}),
        ("batch", {"a": "group bool"}, [True], "expected a list of 2, one a group"),
    ],
)
def test_what_a_function_returns_is_checked(
    over: str, writes: dict[str, str], returned: object, expected: object
) -> None:
    samples = (4,) if over == "sample" else (4, 5, 6)
    groups = (0, 0, 1) if over == "batch" else ()
    unit = Unit(samples, {}, groups=groups, lengths=(1, 2, 0)[: len(samples)])
    call = Function("m:f", writes=writes, over=over)  # type: ignore[arg-type]
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            check_output(call, unit, returned)
    else:
        assert check_output(call, unit, returned) == expected
    scored = error_output(call, unit)
    for name, text in writes.items():  # an error's values pass the same check
        if parse_key_type(text).dtype != "json":
            assert check_output(call, unit, scored)[name] == scored[name]
