"""What the fork server of the runs imports last: the compiled search is loaded once, not by every run."""

from realgraph.planner.solve.warm import warm

warm()
