"""SGLang's C++ kernels: their wheels are for GPUs and for CPUs with AMX, and without these no layer calls them."""

from absent import stand_in  # type: ignore[import-not-found]  # beside this file, on the server's path

__version__ = "0.4.10"
stand_in(__name__)
