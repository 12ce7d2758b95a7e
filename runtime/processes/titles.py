"""The name under which `ps` shows a process. Imports nothing heavy: the smallest of our processes use it."""

import os


def set_title(title: str) -> None:
    """What `ps` shows of this process, for everybody on the host: nothing that is secret."""
    os.environ["SPT_NOENV"] = "1"  # or the title is written over what /proc shows of the environment
    from setproctitle import setproctitle  # late: planning alone does without it

    setproctitle(title)
