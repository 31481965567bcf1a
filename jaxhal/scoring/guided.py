"""Decoding steered by a detector: of several ways to go on, the least suspicious.

Chuang et al., `Lookback Lens <https://arxiv.org/abs/2407.07071>`_, 2024, section 3.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxhal.detectors import Detector
from jaxhal.generation import GREEDY, Generated, Sampling, decoding, requests
from jaxhal.generation.decoding import QUERY, Decoding, State
from jaxhal.io.checks import at_least
from jaxhal.io.progress import progress_bar
from jaxhal.models import cache as cache_lib
from jaxhal.models.batching import plan, rows_together
from jaxhal.models.lm import LM
from jaxhal.models.mesh import check_one_process, rows_at_once
from jaxhal.scoring.collection import Asked, FittedDetectors
from jaxhal.scoring.detection import resolve_for, response_scores
from jaxhal.scoring.fitting import Fitted
from jaxhal.types import Example

# What the paper's experiments draw candidates with.
PUBLISHED = Sampling(temperature=0.9, top_p=0.95)


class Chunk(NamedTuple):
    """One choice between candidates: their texts and scores, and which was kept."""

    texts: list[str]
    scores: Float[np.ndarray, " candidates"]
    chosen: int


@dataclasses.dataclass(frozen=True, eq=False)
class Guided:
    """A response of which a detector chose every chunk, and the choices in order."""

    response: Generated
    chunks: list[Chunk]


def guide(
    lm: LM,
    prompts: Sequence[str | Example],
    detector: Asked,
    *,
    candidates: int = 8,
    chunk: int = 8,
    max_new_tokens: int = 256,
    sampling: Sampling = PUBLISHED,
    key: Key[Array, "*prompts"],
    batch_size: int = 4,
    progress: bool | None = None,
) -> list[Guided]:
    """Responses written chunk by chunk, each the least suspicious of some candidates.

    Candidates of a chunk are drawn at once from what is read already; the detector
    judges the tokens of each as if they were a response, and the winner goes on from
    the keys and values it has.  A response ends with the winner that ends.

    Args:
      prompts: as :func:`jaxhal.generate` takes them.
      detector: as :func:`jaxhal.score` takes it, one that needs a row of each token,
        and nothing else.
      candidates, chunk: how many to choose from, and tokens of each; 8 in the paper.
      sampling: how candidates are drawn; not greedily, which would make them equal.
      key: what chance comes from, one key or one for each prompt.

    Raises:
      ValueError: as :func:`jaxhal.generate`; on fewer than two candidates, a chunk
        below 1, greedy sampling, or a detector that is unknown, must be fitted first or
        reads more than rows of tokens.
    """
    check_one_process(lm.params, "guiding")
    guiding, *others = resolve_for(lm, [detector])
    if others:
        names = ", ".join(one.detector.name for one in (guiding, *others))
        place = "" if isinstance(detector, FittedDetectors) else str(detector)
        whole = f"from_pretrained({place!r})" if place else "it"
        raise ValueError(
            f"{place or 'detector'} holds {names}; give one of them, {whole}[NAME] "
            "(jaxhal.FittedDetectors)"
        )
    at_least(2, candidates=candidates)
    at_least(1, chunk=chunk, max_new_tokens=max_new_tokens)
    _check(guiding.detector, sampling)
    rows = requests.encoded(lm, prompts)
    for number, row in enumerate(rows):
        requests.check_room(lm, number, row, max_new_tokens)
    how = requests.decoding_of(lm, sampling, guiding.detector.reducers)
    keys = requests.prompt_keys(sampling, key, len(rows))
    found: dict[int, Guided] = {}
    limits = [max_new_tokens] * len(rows)
    together = rows_together(len(rows), batch_size, rows_at_once(lm.params))
    with progress_bar(len(rows), "guiding", "response", progress) as bar:
        for group in plan(rows, together):
            ready, state = requests.begun(
                lm, rows, group, together, limits, keys, how, candidates
            )
            responses = written(ready, state, how, guiding, candidates, chunk)
            found |= dict(zip(group.rows, responses, strict=False))
            bar.update(len(group.rows))
    return [found[number] for number in range(len(rows))]


def _check(detector: Detector, sampling: Sampling) -> None:
    if sampling.temperature == 0.0:
        raise ValueError(
            "greedy sampling draws the same candidate each time; give a temperature "
            f"above 0, or generate(..., sampling={GREEDY!r}) without a guide"
        )
    if not detector.reads_rows:
        raise ValueError(
            f"detector {detector.name!r} reads more than the rows of new tokens, or "
            "nothing of the model; guide with one like lookback_lens"
        )


def written(
    lm: LM,
    state: State,
    how: Decoding,
    detector: Fitted,
    candidates: int,
    chunk: int,
) -> list[Guided]:
    """Decodes a batch of prompts to the end, choice by choice."""
    tokenizer, longest = lm.require_tokenizer(), state.tokens.shape[1]
    prompts = len(state.done) // candidates
    chunks: list[list[Chunk]] = [[] for _ in range(prompts)]
    fitted = detector.detector
    for start in range(0, longest, chunk):
        # The first tokens are drawn before the first choice, which may be between ends.
        going = ~np.asarray(state.done)[::candidates] | (start == 0)
        if not going.any():
            break
        until = min(start + chunk, longest)
        state = decoding.go_on(lm.bare, state, jnp.asarray(until), how)
        features = _of_chunk(how, decoding.read_last(lm, state, how), start, chunk)
        scores = response_scores((fitted,), (detector.params,), features)[fitted.name]
        scores = np.asarray(scores).reshape(prompts, candidates)
        real, tokens = jax.device_get((features["valid"], state.tokens))
        texts = [
            tokenizer.decode(row[start:until][kept[: until - start]], skip_special=True)
            for row, kept in zip(tokens, real, strict=True)
        ]
        winners = scores.argmin(axis=1)
        for at in np.flatnonzero(going & real[::candidates].any(axis=1)):
            mine = texts[at * candidates : (at + 1) * candidates]
            chunks[at].append(Chunk(mine, scores[at], int(winners[at])))
        rows = np.arange(prompts) * candidates + winners
        state = _taken(how, state, jnp.asarray(np.repeat(rows, candidates)))
    rows = range(0, prompts * candidates, candidates)
    responses = requests.ended(lm, state, how, (), rows)
    return [Guided(*pair) for pair in zip(responses, chunks, strict=True)]


@jax.jit(static_argnames=("how", "chunk"))
def _of_chunk(how: Decoding, state: State, start: Any, chunk: int) -> dict[str, Any]:
    """Features of the newest chunk, as those of a response of its own."""

    def cut(leaf: Array, axis: int) -> Array:
        pad = [(0, chunk if a == axis else 0) for a in range(leaf.ndim)]
        return jax.lax.dynamic_slice_in_dim(jnp.pad(leaf, pad), start, chunk, axis)

    real = cut(state.real, 1)
    text = decoding.with_text(cut(state.tokens, 1), real, how.stop_ids)
    features = {"valid": real, "text": text, "marked": jnp.zeros_like(real)}
    for name, reducer in how.named:
        axis = QUERY[reducer.reads]

        def of(leaf: Array, axis: int = axis, reducer: Any = reducer) -> Array:
            shape = [1] * leaf.ndim
            shape[reducer.batch_axis], shape[axis] = real.shape
            return jnp.where(real.reshape(shape), cut(leaf, axis), 0)

        features[name] = jax.tree.map(of, state.features[name])
    return features


@jax.jit(static_argnames="how", donate_argnames="state")
def _taken(how: Decoding, state: State, rows: Int[Array, " batch"]) -> State:
    """Every row goes on from a winner's, with chances of its own."""
    along = ("tokens", "logprob", "real", "done", "limit")
    own: dict[str, Any] = {name: getattr(state, name)[rows] for name in along}
    own["features"] = {
        name: jax.tree.map(
            lambda leaf, axis=reducer.batch_axis: jnp.take(leaf, rows, axis=axis),
            state.features[name],
        )
        for name, reducer in how.named
    }
    if state.seen is not None:
        own["seen"] = state.seen[rows]
    return dataclasses.replace(state, cache=cache_lib.take(state.cache, rows), **own)
