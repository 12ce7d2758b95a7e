"""The environment variables that functions name, looked up before anything starts. Reads no value."""

import difflib
from collections.abc import Collection

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.graphs.spec import Function
from realgraph.run_file.compose import Checked


def refuse_unset(checked: Checked, variables: Collection[str]) -> None:
    """Raises ConfigError for every variable that a function names and that is not among `variables`."""
    problems = []
    for name, call in checked.graph.calls.items():
        for i, variable in enumerate(call.env if isinstance(call, Function) else ()):
            if variable not in variables:
                close = difflib.get_close_matches(variable, variables, n=1, cutoff=0.75)
                hint = f"did you mean {close[0]!r}?" if close else "set it where you start the run, or leave it out"
                text = f"the environment variable {variable!r} is not set"
                problems.append(Problem(checked.where(f"$.calls.{name}.env[{i}]"), text, hint, "function_environment"))
    if problems:
        raise ConfigError(problems)
