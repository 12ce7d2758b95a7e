"""The SGLang servers at `rollout.urls`, asked before anything of a run is started. Imports no torch."""

import asyncio
from collections.abc import Sequence

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.graphs.spec import Generate
from realgraph.run.running import PreparedRun
from realgraph.runtime.job.launch import LocalLaunch
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import ServerUnreachable, SglangError
from realgraph.runtime.rollout.messages import Timeouts
from realgraph.runtime.rollout.opening.expected import Expected, check

TIMEOUTS = Timeouts(connect_seconds=5.0, control_seconds=30.0)
UNAUTHORIZED = 401


def check_given_servers(prepared: PreparedRun) -> Sequence[Problem]:
    """Warnings about servers that do not answer yet: their workers wait for them. Raises ConfigError with all in which
    the others are not what the run needs.

    Where workers may be on other hosts, their addresses mean nothing here, and the workers alone ask.
    """
    if not isinstance(prepared.checked.run.launch, LocalLaunch):
        return ()
    found = asyncio.run(_ask_all(expected_servers(prepared)))
    problems = [problem for wrong, _ in found for problem in wrong]
    if problems:
        raise ConfigError(problems)
    return [warning for _, warnings in found for warning in warnings]


def expected_servers(prepared: PreparedRun) -> dict[str, Expected]:
    """URL -> what has to be there."""
    calls = {name: call for name, call in prepared.job.graph.calls.items() if isinstance(call, Generate)}
    return {url: one for name, call in calls.items() for url, one in _servers_of(prepared, name, call).items()}


def _servers_of(prepared: PreparedRun, name: str, call: Generate) -> dict[str, Expected]:
    """Those of one call."""
    job = prepared.job
    model, layout = prepared.request.model(name), job.plan.allocations[name].layout
    context = job.data.max_prompt_tokens + call.most_new_tokens(job.batch.max_new_tokens)
    return {
        url: Expected(
            where=prepared.checked.where(job.rollout.url_path(name, replica)),
            model_type=model.architecture,
            vocabulary=model.vocab,
            dtype=job.graph.models[call.model].dtype,
            context=min(context, model.max_positions),
            positions=model.max_positions,
            tp=layout.tp,
            ep=layout.ep,
        )
        for replica, url in enumerate(job.rollout.urls_of(name))
    }


async def _ask_all(expected: dict[str, Expected]) -> list[tuple[Sequence[Problem], Sequence[Problem]]]:
    return await asyncio.gather(*(_ask(url, one) for url, one in expected.items()))


async def _ask(url: str, expected: Expected) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Problems and warnings of one server."""
    client = SglangClient(url, timeouts=TIMEOUTS)
    try:
        await check(client, expected)
    except ConfigError as error:
        return error.problems, ()
    except ServerUnreachable as error:
        hint = "it is waited for when the workers start (runtime.start_seconds)"
        return (), (Problem(expected.where, str(error), hint, "sglang"),)
    except SglangError as error:
        hint = "give the address of an SGLang server, 0.5.18 to 0.5.23"
        if error.status == UNAUTHORIZED:
            hint = "start it without --api-key: realgraph has the keys of those servers alone that it starts"
        return (Problem(expected.where, str(error), hint, "sglang"),), ()
    finally:
        await client.close()
    return (), ()
