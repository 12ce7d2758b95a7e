"""The machine of a benchmark, for the head of its results. Reads /proc and package metadata; imports no torch."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("realgraph", "torch", "transformers", "numpy", "msgspec", "pyzmq", "ray", "trl", "accelerate")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def _gpus() -> list[str]:
    """The names of NVIDIA GPUs, if the driver's tool is there."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe() -> dict[str, object]:
    """CPU model, usable cores, memory, GPUs, operating system, Python and package versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gb": _memory_gb(),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": _versions(),
    }
