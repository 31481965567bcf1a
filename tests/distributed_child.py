"""A process of a distributed run on four fake devices that stops before each part.

It is forked from a server that has imported everything and computed nothing.
"""

import os

import children
import forked

from jaxhal.experiments import distributed
from jaxhal.reading import bulk, samples, store

_FLAGS = "--xla_force_host_platform_device_count=4"


def _run(arguments, folder, errors, job, seconds, line):
    stops = bool(job)

    def telling(module, name, what):
        real = getattr(module, name)

        def told(*given):
            nonlocal stops
            line.send(what(*given))
            if stops:
                stops = line.recv() != "go on alone"
            return real(*given)

        setattr(module, name, told)

    telling(store, "make_table", lambda lm, part, *_: ("read", part.name))
    telling(samples, "_drawn", lambda lm, prompts, *_: ("drew", " ".join(prompts)))
    # Parts enough for two processes to have one each at any time.
    store._PART_ROWS, samples._PART, bulk._PROMPTS = 6, 2, 2
    distributed._COMING = seconds
    os.environ |= job
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
    forked.command(arguments, folder, errors, line)


class Child:
    """A command in a folder; ``job`` are variables of its environment.

    A process of a job says what it is about to do, and waits to be told "go", or "go on
    alone" for the rest as well.
    """

    def __init__(self, arguments, folder, job=None, seconds=300):
        self._errors = folder / f"said {len([*folder.glob('said *')])}"
        self._errors.touch()
        options = (arguments, folder, str(self._errors), job or {}, seconds)
        self.process, self.line = children.start(_run, *options)

    def says(self):
        """What it is about to do."""
        assert self.line.poll(120), f"nothing: {self._errors.read_text('utf-8')}"
        return self.line.recv()

    def ended(self):
        """Its exit code, what else it did, and what it said on standard error."""
        self.process.join(300)
        assert self.process.exitcode is not None, "it still runs"
        did = children.rest(self.line)
        return self.process.exitcode, did, self._errors.read_text("utf-8")
