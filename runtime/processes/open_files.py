"""The limit of open files that a run needs: raised as far as it may be, refused where that is too little."""

import resource

from realgraph.graphs.errors import ConfigError, Problem, Where

# Of the largest process, a worker: 38 on its own, and 3 more for each other worker, measured with 2 and 4 on CPUs.
OWN_FILES = 64
FILES_PER_WORKER = 8
USUAL_FILES = 1024  # what most systems give: libraries and functions count on it


def allow_open_files(n_workers: int) -> None:
    """Raise this process's soft limit, which its children inherit, where it is low.

    Raises ConfigError where the hard limit, which only the system can raise, is below what a run of `n_workers` needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_FILES + FILES_PER_WORKER * n_workers
    if _below(hard, needed):
        text = f"a process may open {hard} files here (ulimit -n), and this run needs {needed} in each of its workers"
        hint = f"raise the hard limit: `ulimit -Hn {USUAL_FILES}` as root, LimitNOFILE= of a service, or limits.conf"
        raise ConfigError([Problem(Where(path="limits: open files"), text, hint, "open_files")])
    wanted = max(needed, USUAL_FILES)
    if _below(soft, wanted):
        within = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (within, hard))


def _below(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number
