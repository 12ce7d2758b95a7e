"""Writes requirements.txt beside it: `python -m tests.sglang.pin`, with pip 23 or newer and a registry.

All that a server of the tests imports, at exact versions with the hashes of wheels for Linux on x86-64 (glibc). torch
is left out: its build is chosen by the Makefile's TORCH. SGLang and two of its libraries come without what they ask
for, which is CUDA's; what they import all the same is listed here.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PYTHONS = ("3.11", "3.12", "3.13")
ALIASES = ("manylinux2014", "manylinux2010", "manylinux1")
LIBRARIES = (*(f"manylinux_2_{minor}" for minor in range(34, 4, -1)), *ALIASES)  # SGLang's wheel wants glibc 2.34
TORCH = "torch==2.13.0"
ALONE = ("sglang==0.5.23", "compressed-tensors==0.18.0", "xgrammar==0.2.7")
WITH_THEIRS = (
    *("transformers==5.19.0", "tokenizers==0.23.2", "openai==2.8.0", "sentencepiece==0.2.1", "aiohttp", "fastapi"),
    *("uvicorn", "uvloop", "orjson", "pyzmq", "requests", "psutil", "setproctitle", "python-multipart", "pillow"),
    *("msgspec", "pybase64", "ipython", "dill", "apache-tvm-ffi", "loguru", "gguf", "partial_json_parser", "einops"),
    *("jsonschema", "soundfile"),
)
OF_TORCH = ("torch", "triton", "nvidia-", "cuda-")  # its builds bring their own
OUTPUT = Path(__file__).with_name("requirements.txt")
SECONDS = 1200.0


def resolved(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The packages that pip would install. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    text = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, timeout=SECONDS, check=True).stdout
    packages: list[dict[str, Any]] = json.loads(text)["install"]
    return packages


def pins() -> list[str]:
    """name==version of everything but torch, in the order of their names."""
    packages = resolved([TORCH, *WITH_THEIRS])
    named = {package["metadata"]["name"].lower(): package["metadata"]["version"] for package in packages}
    rest = {f"{name}=={version}" for name, version in named.items() if not name.startswith(OF_TORCH)}
    return sorted(rest | set(ALONE))


def hashes(pinned: Sequence[str]) -> dict[str, set[str]]:
    """The hashes of each package's wheels, for every Python."""
    found: dict[str, set[str]] = defaultdict(set)
    platforms = [argument for library in LIBRARIES for argument in ("--platform", f"{library}_x86_64")]
    for python in PYTHONS:
        wheels = ["--no-deps", "--only-binary=:all:", "--target", "/nonexistent", "--python-version", python]
        for package in resolved([*wheels, *platforms, *pinned]):
            name = package["metadata"]["name"].lower()
            found[name].add(package["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def main() -> None:
    """Write the file."""
    pinned = pins()
    of_name = hashes(pinned)
    lines = ["# Written by `python -m tests.sglang.pin`."]
    for pin in pinned:
        wheels = sorted(of_name[pin.partition("==")[0].lower()])
        lines.append(" \\\n    ".join([pin, *(f"--hash=sha256:{each}" for each in wheels)]))
    OUTPUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
