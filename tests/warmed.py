"""The module that the fork server of tests imports last: it loads the compiled search once, not in every run."""

import gc

from realgraph.planner.solve.warm import warm

warm()
gc.collect()
gc.freeze()  # children share these pages for longer
