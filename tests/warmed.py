"""The module that the fork server of the runs imports last: it loads the compiled search once, not in every run."""

from realgraph.planner.solve.warm import warm

warm()
