"""A process that reads answers into a store, says what it does, and can be killed.

It is forked from a server that has imported everything and computed nothing.
"""

import children

import jaxhal
from jaxhal.reading import store as store_module
from tiny_lm import answers, read_into, tiny_lm

PART_ROWS = 4
REDUCERS = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "states": jaxhal.HiddenStates(layers=(1,)),
    "mean": jaxhal.HiddenStates(tokens="mean"),
    "logprob": jaxhal.TokenLogprob(),
}


def _read(folder, count, line):
    store_module._PART_ROWS = PART_ROWS
    real = store_module.make_table

    def make_table(*arguments):
        line.send("made")
        return real(*arguments)

    store_module.make_table = make_table
    lm = tiny_lm()
    line.send("ready")
    line.recv()
    read_into(folder, lm, answers(count), REDUCERS, batch_size=2)
    line.send("done")


class Child:
    """A process that is ready to read ``count`` answers into a folder."""

    def __init__(self, folder, count):
        self.process, self._line = children.start(_read, folder, count)
        assert self._line.recv() == "ready"

    def go(self):
        self._line.send("go")

    def said(self, timeout=None):
        """Everything it said until it ended, by itself or killed."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "it still reads"
        return children.rest(self._line)
