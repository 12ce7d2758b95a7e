"""The name under which `ps` shows a process. Imports nothing heavy: the smallest of our processes use it."""

from realgraph.runtime.processes.environment import set_for_library


def set_title(title: str) -> None:
    """Sets what `ps` shows of this process, for everybody on the host: nothing that is secret."""
    set_for_library("SPT_NOENV", "1")  # or the title is written over what /proc shows of the environment
    from setproctitle import setproctitle, setthreadtitle  # late: planning alone does without it

    setproctitle(title)
    # Schedulers find the processes of a job in /proc/PID/stat, and not all of them can read a name with a space there.
    setthreadtitle(title.replace(" ", "-"))
