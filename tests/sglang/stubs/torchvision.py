"""Pictures, which no model of the tests takes: PyPI's wheels are CUDA builds, and break beside a CPU build of torch."""

from absent import stand_in  # type: ignore[import-not-found]  # beside this file, on the server's path

__version__ = "0.28.0"
stand_in(__name__)
