"""The module that the fork server of tests imports last: it does once what every run would do again.

It loads the compiled search and, by checking a run file, what the command line imports and reads at its first use.
"""

import contextlib
import gc
import io
from pathlib import Path

from realgraph.cli import app
from realgraph.planner.solve.warm import warm

CHECKED = Path(__file__).parent.parent / "configs/gsm8k_grpo_qwen3_1.7b_8xh100.yaml"

warm()
with contextlib.redirect_stdout(io.StringIO()):
    app(["check", str(CHECKED)], standalone_mode=False)
gc.collect()
gc.freeze()  # children share these pages for longer
gc.enable()  # it was disabled by tests.uncollected
