"""Other answers of the reader to the prompts of examples, drawn once and kept."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxhal.capture.forward import read_rows
from jaxhal.features.eigenscore import BANK, clip_thresholds
from jaxhal.features.hidden import HiddenStates
from jaxhal.generation import Generated, Sampling, generate
from jaxhal.generation.steps import Clip
from jaxhal.io.checks import at_least
from jaxhal.io.files import append, lines_after
from jaxhal.io.progress import progress_bar
from jaxhal.io.showing import quoted
from jaxhal.models.lm import LM
from jaxhal.models.mesh import check_one_process, rows_at_once
from jaxhal.reading.keys import digest, fingerprint
from jaxhal.reading.sharing import Share, explained, share_out
from jaxhal.types import Example

# Prompts whose samples are written together.
_PART = 16


@dataclasses.dataclass(frozen=True)
class Draw:
    """How samples are drawn, static by value.

    Args:
      sampling: how tokens are chosen; not greedily.
      seed: of the chance; what is drawn for a prompt follows from it and the prompt.
      clip: the share of extreme activations, at either end, that are cut off as the
        model writes (INSIDE's feature clipping, 0.002 in the paper).  What is extreme
        is taken from the last 3000 tokens of the examples' own responses, where the
        paper has those written last, so that no sample depends on what was drawn
        before it; they depend on which examples are scored together.  ``None`` cuts
        nothing.
      given: nothing is drawn; the first ``n`` samples that come with an example count,
        such as those of a model that wrote it and cannot be asked again.

    References:
      Chen et al., INSIDE, ICLR 2024, section 3.2.
    """

    n: int = 10
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    seed: int = 0
    clip: float | None = None
    given: bool = False

    def __post_init__(self):
        for name in ("n", "max_new_tokens", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value >= 2**32:
                raise ValueError(
                    f"{name} is {value!r}; give a whole number below 2**32"
                )
        at_least(1, n=self.n, max_new_tokens=self.max_new_tokens)
        at_least(0, seed=self.seed)
        if self.sampling.temperature == 0.0:
            raise ValueError(
                "temperature is 0, so that all samples would be equal; give one above 0"
            )
        if self.clip is not None and not 0 < self.clip < 0.5:
            raise ValueError(f"clip is {self.clip}; give a share in (0, 0.5), or None")

    def __str__(self) -> str:
        """How many samples of what kind, in words."""
        if self.given:
            return f"{self.n} samples that come with the answer"
        kind = [f"up to {self.max_new_tokens} tokens"]
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            value, usual = getattr(self.sampling, name), getattr(Sampling, name)
            if name == "temperature" or value != usual:
                kind.append(f"{name.replace('_', ' ')} {value:g}")
        if self.clip is not None:
            kind.append(f"features clipped at {self.clip:g}")
        return f"{self.n} samples ({', '.join(kind)})"


class Sample(NamedTuple):
    """One sampled answer.

    Attributes:
      text: what it says; empty where the model ended at once.
      logprob: mean log probability of its tokens, that of its end among them, in nats;
        not a number where it came with the example.
      tokens: how many there are, 0 where it came with the example.
      end: log probability of its end, ``None`` where it was cut off.
    """

    text: str
    logprob: float
    tokens: int
    end: float | None = None

    def likelihood(self, per_token: bool, end: bool) -> float:
        """Log probability of its tokens, their mean or sum, with the end or without.

        That of an end and nothing else is the end's in any case.
        """
        total, count = self.logprob * self.tokens, self.tokens
        if not end and count > 1 and self.end is not None:
            total, count = total - self.end, count - 1
        return total / count if per_token and count else total


class TooFew(ValueError):
    """Answers of too few tokens for what is extreme among them to be known."""


def draw(
    lm: LM,
    examples: Sequence[Example],
    how: Draw,
    root: Path | None = None,
    *,
    share: Share | None = None,
    batch_size: int = 32,
    progress: bool | None = None,
) -> list[list[Sample]]:
    """Samples for the prompt of each example; equal prompts share theirs.

    Args:
      examples: whose prompts are answered; their own responses are not looked at.
      root: folder where samples are kept as they are drawn; a run that was killed goes
        on where it stopped, and processes share the work.  ``None`` keeps nothing.
      share: which of several processes this is.

    Raises:
      TooFew: where samples are clipped by the responses.
      ValueError: as :func:`jaxhal.generate`; on a damaged file; when an example comes
        with fewer samples than are asked for.
    """
    if how.given:
        return [_given(example, how.n) for example in examples]
    if root is not None:
        check_one_process(lm.params, "drawing samples that are kept")
    share = share or Share()
    tokenizer = lm.require_tokenizer()
    wanted = [
        digest(tokenizer.encode_prompt(example).prompt_ids.tobytes())
        for example in examples
    ]
    prompts = dict(zip(wanted, examples, strict=True))
    clip = None if how.clip is None else _bounds(lm, examples, how.clip)
    path = None if root is None else root / "samples" / f"{_name(lm, how, clip)}.jsonl"
    kept = _Kept(path)
    kept.look()
    # Parts do not depend on what is known, so that processes have the same ones.
    keys = [*prompts]
    step = max(_PART, rows_at_once(lm.params) * (batch_size // how.n))
    each = (keys[start : start + step] for start in range(0, len(keys), step))
    parts = {digest(json.dumps(part)): part for part in each}
    lacking = {n: some for n, part in parts.items() if (some := kept.lacking(part))}
    total = sum(map(len, lacking.values()))
    with progress_bar(total, "sampling", "prompt", progress) as bar:

        def work(name: str) -> None:
            kept.look()
            if left := kept.lacking(parts[name]):
                some = {key: prompts[key] for key in left}
                kept.add(_drawn(lm, some, how, clip, batch_size))
                share.done["prompts sampled"] += len(left)
            bar.update(len(lacking[name]))

        if path is None:
            for name in lacking:
                work(name)
        else:
            locks = path.parent / "locks" / path.stem
            share_out([*lacking], work, locks, share)
    return [kept.known[key] for key in wanted]


class _Kept:
    """Samples by prompt, in a file that other processes may add to."""

    def __init__(self, path: Path | None):
        self.known: dict[str, list[Sample]] = {}
        self._path, self._seen = path, 0

    def lacking(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.known]

    def look(self) -> None:
        """Reads what the file has by now."""
        if self._path is None:
            return
        rows, self._seen = lines_after(self._path, self._seen)
        try:
            self.known |= {key: [Sample(*one) for one in some] for key, some in rows}
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._path} holds no samples ({error}); delete it to draw them again"
            ) from error

    def add(self, fresh: dict[str, list[Sample]]) -> None:
        self.known |= fresh
        if self._path is not None:
            with explained(self._path):
                append(self._path, fresh.items())


def lacking(example: Example, n: int) -> str:
    """Why an example does not bring ``n`` samples of its own; empty where it does."""
    count = len(example.samples)
    if count >= n:
        return ""
    return (
        f"comes with {count} samples, and {n} are asked for; give it more 'samples', "
        "or lower n"
    )


def _given(example: Example, n: int) -> list[Sample]:
    if why := lacking(example, n):
        raise ValueError(f"example {quoted(example.id)} {why}")
    return [Sample(text, math.nan, 0) for text in example.samples[:n]]


def _bounds(lm: LM, examples: Sequence[Example], share: float) -> Clip:
    """What lies between the extremes of the responses' last tokens."""
    tokenizer, rows, tokens = lm.require_tokenizer(), [], 0
    for example in reversed(examples):
        if tokens >= BANK:
            break
        rows.insert(0, tokenizer.encode_example(example))
        tokens += len(rows[0].response_ids)
    if tokens < 1 / share:
        raise TooFew(
            f"clip is {share}, and the responses have {tokens} tokens; what is extreme "
            f"is known from {math.ceil(1 / share)} on, so score more answers together"
        )
    states = read_rows(lm, rows, HiddenStates(layers=(-1,)))
    seen = [s[0, : len(row.response_ids)] for s, row in zip(states, rows, strict=True)]
    return clip_thresholds(np.concatenate(seen), share)


def _drawn(
    lm: LM,
    prompts: dict[str, Example],
    how: Draw,
    clip: Clip | None,
    batch_size: int,
) -> dict[str, list[Sample]]:
    # A prompt's chance comes from the prompt alone: neither order nor company matters,
    # but for the bounds of clipping.
    numbers = np.array([int(key[:8], 16) for key in prompts], np.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(how.seed), numbers)
    found = generate(
        lm,
        list(prompts.values()),
        n=how.n,
        max_new_tokens=how.max_new_tokens,
        sampling=how.sampling,
        key=keys,
        clip=clip,
        batch_size=batch_size,
        progress=False,
    )

    def sample(one: Generated) -> Sample:
        end = float(one.logprobs[-1]) if one.stopped == "eos" else None
        return Sample(one.text, float(one.logprobs.mean()), len(one.tokens), end)

    return {key: [*map(sample, some)] for key, some in zip(prompts, found, strict=True)}


def _name(lm: LM, how: Draw, clip: Clip | None) -> str:
    bounds = b"" if clip is None else np.asarray(clip).tobytes()
    form, tokenizer = " ".join(Sample._fields), lm.require_tokenizer()
    # What ends a sample, and how its tokens become text.
    words = f"{tokenizer.stop_ids} {tokenizer.hf.backend_tokenizer.to_str()}"
    about = f"{how!r} {form} {digest(words)}".encode()
    return f"{fingerprint(lm)}-{digest(about + bounds)[:16]}"
