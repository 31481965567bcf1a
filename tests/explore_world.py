"""A small world to explore: an agent that fails where queries are deep, and a process
that explores it and can be killed."""

import dataclasses
import hashlib
import re
import time

import children
import numpy as np

from jaxhal.io.files import append
from jaxhal.reading.keys import digest
from jaxhal.watchdog import (
    CallableAgent,
    CallableEvaluator,
    ExactStore,
    Explorer,
    Generator,
    Plan,
    Training,
)
from jaxhal.watchdog.policy import TRANSFORMATIONS

WAYS = {"more specific": "x", "alike": "y", "more general": "z"}
SEEDS = [f"What of {n}?" for n in range(40)]
WIDTH = 32
PLAN = Plan(
    gamma=0.95,
    least=10,
    budget=60,
    starts=4,
    width=4,
    samples=3,
    steps=4,
)


def share(text):
    """A number in [0, 1) that follows from a text."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def answer(query, temperature):
    """Wrong where the query is deep; samples differ with the temperature."""
    deep = len(re.findall("[xyz]", query))
    wrong = share(query) < 0.35 + 0.3 * deep
    return f"{'wrong' if wrong else 'right'} {temperature:.0f}"


def change(asked, temperature):
    way = next(mark for words, mark in WAYS.items() if words in asked)
    query = asked.split("\n\n")[1]
    return f"1. {query[:-1]} {way}?"


def evaluate(query, text):
    return None if share(f"unsure {query}") < 0.1 else int("wrong" in text)


@dataclasses.dataclass(frozen=True)
class Same:
    """Only equal texts mean the same."""

    name: str = "equality"

    def __call__(self, pairs):
        same = np.array([a == b for a, b in pairs])
        return np.stack([~same, np.zeros_like(same), same], 1).astype(float)


def explorer(
    folder, encoder, say=answer, store=None, plan=PLAN, judge=evaluate, write=change
):
    return Explorer(
        CallableAgent(say, "agent"),
        CallableEvaluator(judge),
        Generator(CallableAgent(write, "writer"), "things", attempts=1),
        SEEDS,
        ExactStore(WIDTH, folder) if store is None else store,
        folder,
        plan=plan,
        training=Training(epochs=3),
        encoder=str(encoder),
        entailment=Same(),
    )


def _explore(folder, encoder, log, delay, line):
    def asks(kind, query):
        """As the journal names it."""
        append(log, [f"{kind} {digest(query)}"])
        time.sleep(delay)

    def say(query, temperature):
        asks("answer" if temperature == 0.1 else "samples", query)
        return answer(query, temperature)

    def write(asked, temperature):
        found = change(asked, temperature)
        way = TRANSFORMATIONS["xyz".index(found[-2])]
        asks(way, asked.split("\n\n")[1])
        return found

    def judge(query, text):
        asks("verdict", query)
        return evaluate(query, text)

    line.send("ready")
    explorer(folder, encoder, say, judge=judge, write=write).run(progress=False)
    line.send("done")


class Child:
    """A process that explores a folder; what it asks stands in a log."""

    def __init__(self, folder, encoder, log, delay):
        options = (folder, encoder, log, delay)
        self.process, self._line = children.start(_explore, *options)
        assert self._line.recv() == "ready"

    def kill(self, after):
        """As soon as something is true."""
        while not after():
            assert self.process.exitcode is None, "it came to its end"
            time.sleep(0.001)
        self.process.kill()
        self.process.join()
