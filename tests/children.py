"""Processes that can be killed, forked from a server that has imported everything."""

import multiprocessing
import os
from pathlib import Path
from unittest import mock


def start(target, *options):
    """A process that runs a function of a test module, and the line to it.

    The function gets the options and then its end of the line.
    """
    context = multiprocessing.get_context("forkserver")
    # Only at the first start, whatever is to run later.
    context.set_forkserver_preload(["forked", target.__module__])
    line, theirs = context.Pipe()
    process = context.Process(target=target, args=(*options, theirs))
    # The server imports by a path of its own.
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, path))):
        process.start()
    theirs.close()
    return process, line


def rest(line):
    """What a process that has ended still said."""
    words = []
    try:
        while True:
            words.append(line.recv())
    except (EOFError, ConnectionResetError):
        return words
