"""A process that adds points to a store, says which are kept, and can be killed."""

from pathlib import Path

import children
import numpy as np

from jaxhal.watchdog import ExactStore, MilvusStore, Point

WIDTH = 8


def opened(kind, folder):
    if kind == "milvus":
        return MilvusStore(WIDTH, Path(folder) / "bound.db")
    return ExactStore(WIDTH, folder)


def vector(number):
    return np.random.default_rng(number).normal(size=(1, WIDTH)).astype(np.float32)


def point(number):
    return Point(f"p{number}", f"What is {number}?", "Wrong. " * 50, entropy=0.5)


def _add(kind, folder, first, line):
    store = opened(kind, folder)
    line.send(len(store))
    for number in range(first, first + 100_000):
        store.add([point(number)], vector(number))
        line.send(number)


class Child:
    """Adds points from a number on until it is killed."""

    def __init__(self, kind, folder, first):
        self.process, self._line = children.start(_add, kind, folder, first)
        self.found = self._line.recv()

    def kill(self, after):
        """Once it has said that so many are kept; the numbers of all it said."""
        kept = [self._line.recv() for _ in range(after)]
        self.process.kill()
        self.process.join()
        return kept + children.rest(self._line)
