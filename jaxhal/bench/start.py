"""How long does it take until something is said, and what has to be installed for it?

Each round is a process of its own; programs were compiled and files downloaded before.
"""

import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from jaxhal.bench import row
from jaxhal.bench.server import OURS, started

ROUNDS = 5
_IMPORT = """
import time
began = time.perf_counter()
import jaxhal
print(time.perf_counter() - began)
"""
_ROW = '{"context": "The bridge opened in 1832.", "response": "It opened in 1932."}'


def rows() -> Iterator[dict]:
    took = {
        ("import jaxhal, seconds", 0.1): _imported,
        ("jaxhal detect on one row, seconds", 8.0): _detected,
        ("jaxhal serve until it answers, seconds", 60.0): _served,
    }
    for (metric, target), once in took.items():
        once()
        low, middle, high = np.percentile([once() for _ in range(ROUNDS)], [25, 50, 75])
        yield row("start", "a new process", metric, middle, target, spread=(low, high))
    names = installed("jaxhal")
    size = sum(map(_bytes, names)) / 2**20
    yield row("start", "pip install jaxhal", "packages", float(len(names)))
    yield row("start", "pip install jaxhal", "their files, MiB", size)


def _imported() -> float:
    command = [sys.executable, "-c", _IMPORT]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def _detected() -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "jaxhal", "detect", "--input", "-"]
    done = subprocess.run(command, input=_ROW.encode(), capture_output=True)
    if done.returncode not in (0, 1):  # 1: hallucinated
        raise RuntimeError(done.stderr.decode())
    return time.perf_counter() - began


def _served() -> float:
    with started(*OURS) as server:
        return server.seconds


def installed(requirement: str) -> set[str]:
    """The distributions that installing one brings, of those that are here."""
    found: set[str] = set()
    left = [(Requirement(requirement), "")]
    while left:
        wanted, extra = left.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        for key, extra in ((f"{name}[{one}]", one) for one in ("", *wanted.extras)):
            if key not in found:
                found.add(key)
                specs = importlib.metadata.requires(name) or ()
                left += [(Requirement(spec), extra) for spec in specs]
    return {key.partition("[")[0] for key in found}


def _bytes(name: str) -> int:
    files = importlib.metadata.files(name) or ()
    places = (Path(str(file.locate())) for file in files)
    return sum(place.stat().st_size for place in places if place.is_file())
