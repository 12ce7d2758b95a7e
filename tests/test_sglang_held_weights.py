"""Checksums of what SGLang servers hold, held against what they were given."""

from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from realgraph.runtime.engine import Request
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.checksums import WeightsDiffer
from realgraph.runtime.rollout.weights.agreement import UpdateWords
from realgraph.runtime.weights.server_checksums import ChecksumComparison
from tests.rollouts import drained
from tests.sglang_engines import MODELS, SECONDS, assert_exact, folder, given, running, switch
from tests.waiting import until

__all__ = ["folder"]


@pytest.mark.slow
def test_weights_that_a_server_does_not_hold_as_it_was_given_them_are_found(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By itself where it is told to read them again, by another server, and by those that it held before."""
    with given(folder, tmp_path / "a") as (one, first), given(folder, tmp_path / "b") as (two, second):
        words = UpdateWords(HashStore(), "rollout", SECONDS, lambda worker: False)
        held = [ChecksumComparison(words, range(2), place) for place in range(2)]
        second.submit([Request(0, (5, 9, 2), 400, seed=0)])
        assert until(lambda: running(second), SECONDS)
        for engine in (first, second):
            switch(engine, 1)
        held[0].compare(first, broadcast=False)
        held[1].compare(second, broadcast=True)  # requests go on over their caches
        assert_exact(Request(0, (5, 9, 2), 400, seed=0), drained(second, 1)[0])
        two.fault("twisted")
        for engine in (first, second):
            switch(engine, 2)
        held[0].compare(first, broadcast=False)
        with pytest.raises(WeightsDiffer, match=f"{two.url}, version 2, .* that server 0"):
            held[1].compare(second, broadcast=False)
        two.fault()
        with pytest.raises(WeightsDiffer, match=r"version 2, does not hold '0.model.embed_\w+.weight' as it was"):
            held[1].compare(second, broadcast=True)
        one.fault("stale")
        first.prepare(whole((name, values) for name, values in MODELS[0].named_parameters()))
        first.switch(3)
        with pytest.raises(WeightsDiffer, match="version 3, holds what it held before"):
            held[0].compare(first, broadcast=False)
        one.fault("unchecked")
        for _ in range(2):
            held[0].compare(first, broadcast=False)
        assert len([text for text in caplog.messages if "404" in text and "not compared" in text]) == 1
        one.fault()
