"""Names of what a store keeps: of texts, of reducers, and of models."""

import dataclasses
import importlib.util
import linecache
import sys
from typing import Any, Literal
from unittest import mock

import jax.numpy as jnp
import pytest

import jaxhal
from jaxhal.models.config import Config
from jaxhal.models.lm import LM
from jaxhal.models.rope_config import Rope
from jaxhal.reading.keys import column_name, fingerprint, key_of
from jaxhal.types import Example
from tiny_lm import tiny_lm


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def test_keys_tell_masks_apart(lm):
    texts = [
        Example("yes", context="C", question="Q"),
        Example("yes", prompt="C\n\nQ"),
        Example("yes", prompt="C\n\nQ", id="another name"),
        Example("no!", prompt="C\n\nQ"),
    ]
    keys = [key_of(lm.tokenizer.encode_example(one)) for one in texts]
    assert len(set(keys)) == 3 and keys[1] == keys[2]


BODY = """
import dataclasses, functools, jax, jaxhal
import numpy as np

class Plain:
    {plain}

@dataclasses.dataclass(frozen=True)
class Mine({base}, Plain):
    scale: float = {default}
    reads = {reads!r}
    row = {row!r}
    limit = {limit}
    table = np.array({table})

    def __post_init__(self):
        {post}

    @property
    def two(self):
        return {two}

    @functools.cached_property
    def three(self):
        return {three}

    @staticmethod
    def four(x):
        return {four}

    @functools.partial(jax.jit, static_argnums=0)
    def rows(self, rows, view):
        return {rows}
"""
USUAL = {
    "plain": "five = 5",
    "base": "jaxhal.Reducer",
    "default": 1.0,
    "reads": "probs",
    "row": "token",
    "limit": (1, "a"),
    "table": "range(2000)",
    "post": "pass",
    "two": 2,
    "three": 3,
    "four": "4 * x",
    "rows": "rows.max(-1)",
}


def written(folder, **changes):
    """A reducer out of a file, with the value 1.0."""
    path = folder / "own.py"
    path.write_text(BODY.format(**{**USUAL, **changes}))
    spec = importlib.util.spec_from_file_location("own", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own"] = module
    linecache.clearcache()
    try:
        # Bytecode of another text of one length and second would be taken for its own.
        with mock.patch.object(sys, "dont_write_bytecode", True):
            spec.loader.exec_module(module)
        return column_name(module.Mine(scale=1.0))
    finally:
        del sys.modules["own"]


@pytest.mark.parametrize(
    "changes",
    [
        {"plain": "five = 6"},
        {"base": "jaxhal.LookbackRatio"},
        {"reads": "logits"},
        {"row": "predictor"},
        {"limit": (1, "b")},
        {"table": "[0, *range(1, 1000), 0, *range(1001, 2000)]"},
        {"post": "print()"},
        {"two": 22},
        {"three": 33},
        {"four": "4 + x"},
        {"rows": "rows.min(-1)"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_reducer_is_another_one(tmp_path, changes):
    usual = written(tmp_path)
    assert usual == written(tmp_path) == written(tmp_path, default=2.0)
    assert usual.startswith("own.Mine(scale=1.0)@")
    assert written(tmp_path, **changes) != usual


@dataclasses.dataclass(frozen=True)
class Called(jaxhal.Reducer):
    """A function as a field: its text is where it lies in memory."""

    function: Any = max

    def rows(self, rows, view):
        return self.function(rows)


def test_reducers_without_a_name_of_their_own():
    with pytest.raises(TypeError, match="holds <function .*use numbers, strings"):
        column_name(Called(lambda rows: rows.max(-1)))


SIZES = dict(
    family="llama",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=2,
    context_length=16,
)
WEIGHTS: Any = {"norm": {"scale": jnp.ones(4)}}


def of(config):
    return LM(WEIGHTS, None, config)


@dataclasses.dataclass(frozen=True)
class LaterRope(Rope):
    added: Literal["no", "yes"] = "no"


@dataclasses.dataclass(frozen=True)
class LaterConfig(Config):
    """As a later version has it: with one switch more, among the others."""

    another: float | None = None


LaterRope.__name__, LaterConfig.__name__ = "Rope", "Config"


def test_a_switch_that_is_added_later_leaves_fingerprints_alone():
    known = of(Config(**SIZES, ropes=(Rope(theta=5e5),)))
    # Written here: what was fitted with a reader finds it again after an upgrade.
    assert fingerprint(known) == "a9c0de9d921afa7d"
    later = LaterConfig(**SIZES, ropes=(LaterRope(theta=5e5),))
    assert fingerprint(of(later)) == fingerprint(known)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_eps": 1e-5},
        {"context_length": 32},
        {"qkv_bias": True},
        {"ropes": (Rope(theta=5e5), Rope())},
        {"ropes": (Rope(theta=5e5, factor=2.0),)},
        {"windows": (0, 8)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_models_of_other_switches_have_other_fingerprints(changes):
    known = Config(**SIZES, ropes=(Rope(theta=5e5),))
    other = dataclasses.replace(known, **changes)
    assert fingerprint(of(other)) != fingerprint(of(known))
