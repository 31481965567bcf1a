"""A server of a tiny model whose detector may decide, for tests."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
import uvicorn

from jaxhal.classifiers.linear import Linear
from jaxhal.detectors import build
from jaxhal.evaluation import Measured, Platt
from jaxhal.models.lm import LM
from jaxhal.scoring.fitting import Fitted, untrained
from jaxhal.serve.app import Reader, Server
from jaxhal.serve.limits import OPTIONS


def probe(lm: LM, name: str = "token_probe", scale: float = 4.0) -> Fitted:
    """A probe of random weights that is said to beat its controls."""
    width = lm.config.hidden_size
    vector = scale * jax.random.normal(jax.random.key(1), (width,))
    one = Linear(vector, jnp.zeros(()), jnp.zeros(width), jnp.ones(width))
    detector = build({"token_probe": {"layer": 1, "name": name}})
    measured = Measured("crates", 40, 10, 0.8)
    return Fitted(detector, one, Platt(1.0, 0.0), 0.0, beats="yes", measured=measured)


def reader(lm: LM, *chosen: Fitted, most: int = 4) -> Reader:
    """Of the probe and of a detector that needs no fit, unless others are given."""
    if not chosen:
        chosen = probe(lm), untrained(build("token_entropy"))
    return Reader.of(lm, list(chosen), most)


@contextlib.contextmanager
def served(server: Server, **options: object) -> Iterator[str]:
    """The address of a server that runs in a thread."""
    config = uvicorn.Config(
        server.app(), port=0, log_level="warning", **{**OPTIONS, **options}
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.should_exit = True
        thread.join()


def renamed(lm: LM, name: str) -> LM:
    """The same model, called otherwise."""
    return dataclasses.replace(lm, name=name)


def alike(found, want, within=1e-5):
    """Whether JSON says the same, numbers as near as that."""
    if isinstance(want, list):
        pairs = zip(found, want, strict=True)
        return all(alike(*pair, within) for pair in pairs)
    if isinstance(want, dict):
        same = found.keys() == want.keys()
        return same and all(alike(found[name], want[name], within) for name in want)
    return found == (pytest.approx(want, abs=within) if type(want) is float else want)
