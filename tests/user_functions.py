"""Functions that a user might write, good and bad. `test_functions.py` copies them; they are not imported here."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time

started = time.time()
running = 0
kept: "list[object]" = []


def double(text, factor=2.0):
    return factor * len(text)


def behave(text):
    """Do what the text says."""
    match text:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "sysexit":
            sys.exit("no")
        case "segv":
            ctypes.string_at(0)
        case "raise":
            raise KeyError("no such test case")
        case "recurse":
            return behave(text)
        case "nan":
            return float("nan")
        case "words":
            return "good"
        case "huge":
            return "x" * (70 * 2**20)
        case "object":
            return object()
        case "close":
            os.closerange(3, 1 << 16)  # its number is as high as the files its parent has open
    return float(len(text))


def start_another(text):
    subprocess.Popen(["sleep", text])
    os._exit(1)


def loud(text):
    for _ in range(40):
        print("y" * 100_000)
    print("z" * 100_000, file=sys.stderr)
    print("z" * 100_000, file=sys.stderr)
    return 1.0


def two(text):
    return {"reward": 1.0, "right": len(text) > 2}


def group(text, answer, reward):
    return [float(t == answer) + r for t, r in zip(text, reward, strict=True)]


def keep(reward):
    return max(reward) > 0


def numbers(tokens):
    class Row:
        def tolist(self):
            return [float(token) for token in tokens]

    return Row()


def leak(n):
    kept.append(bytearray(n * 2**20))
    return float(os.getpid())


def tell_torch(text):
    return float("torch" in sys.modules)


def environ(text):
    return float(any(name.startswith("REALGRAPH_") for name in os.environ))


def keyed(text):
    return float(os.environ["JUDGE_KEY"])


def where(text):
    return {"cwd": os.getcwd(), "file": __file__}


async def wait(seconds):
    global running
    running += 1
    peak = running
    await asyncio.sleep(seconds)
    peak = max(peak, running)
    running -= 1
    return float(peak)


async def stubborn(text):
    match text:
        case "block":
            time.sleep(60)
        case "exit":
            os._exit(4)
        case "raise":
            raise ValueError("async bad")
        case "timeout":
            raise TimeoutError("the judge did not answer")
    await asyncio.sleep(0.05)
    return 1.0


def uses_loop(text):
    return asyncio.run(stubborn(text))


def variables(text):
    return sorted(os.environ)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Deep:
    def tolist(self):
        return [self]


def odd(text):
    """Raises, returns or writes what the text names."""
    match text:
        case "surrogate raised":
            raise ValueError("half a character: \udc80")
        case "surrogate returned":
            return "half a character: \udc80"
        case "mute":
            raise Mute
        case "group":
            raise ExceptionGroup("several", [KeyError("a"), ValueError("b")])
        case "interrupt":
            raise KeyboardInterrupt
        case "exit":
            raise SystemExit(2)
        case "stop":
            raise StopIteration
        case "coroutine":
            return odd_async("a")
        case "generator":
            return (x for x in "ab")
        case "set":
            return {1, 2}
        case "bytes":
            return b"abc"
        case "complex":
            return 1j
        case "cycle":
            rows = []
            rows.append(rows)
            return rows
        case "deep":
            rows = []
            for _ in range(100_000):
                rows = [rows]
            return rows
        case "quite deep":
            rows = 1.0
            for _ in range(400):
                rows = [rows]
            return rows
        case "itself":
            return Deep()
        case "huge int":
            return 10**400
        case "huge float":
            return 1e300
        case "infinity":
            return float("-inf")
        case "none":
            return None
        case "decimal":
            import decimal

            return decimal.Decimal("1.5")
        case "function":
            return odd
        case "list":
            return [1.0]
        case "write to the socket":
            for fd in sockets():
                os.write(fd, b"hello\nworld\n")
            time.sleep(60)
        case "write a length to the socket":
            for fd in sockets():
                os.write(fd, bytes([0, 0, 0, 9]) + b"\xff" * 9)
        case "write to 1":
            os.write(1, b"straight to the log\n")
            return 1.0
        case "bool":
            return True
        case "numpy":
            import numpy

            return numpy.float32(0.5)
        case "numpy row":
            import numpy

            return numpy.array([0.25])[0]
    return 1.0


def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return found


def odd_text(text):
    return odd(text)


def whole(number):
    return number


async def odd_async(text):
    return odd(text)
