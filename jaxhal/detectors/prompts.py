"""Asking a language model, in words, whether an answer is hallucinated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float

from jaxhal.detectors.base import Detector, factory, measured
from jaxhal.features.base import OfRewrite
from jaxhal.features.uncertainty import TextLogprob
from jaxhal.io.checks import check_name
from jaxhal.llm.endpoint import Endpoint, endpoint_of, json_object
from jaxhal.reading.bulk import Bulk, Measure
from jaxhal.types import Example

# What the reader is asked; its reply is "Yes" or "No".
ASK = """\
Check an answer against its source.

{material}

Does the answer say anything that contradicts the source, or that the source does not \
support? Reply with one word, Yes or No.
"""

# What an endpoint is asked; its reply is a JSON object with one key.
LIST = """\
Check an answer against its source. Find every part of the answer that contradicts the \
source, or that the source does not support.

{material}

Reply with nothing but a JSON object of this form:
{"hallucinations": ["...", "..."]}
The list holds each such part, copied from the answer letter by letter. It is empty \
when the source supports the whole answer.
"""

# What the reader is asked after a few answers that are labelled.
SHOW = """\
Some answers to questions are hallucinated: they say something that is not true or, \
where a source is given, something that the source does not support. Here are answers, \
and after each whether it is hallucinated, Yes or No.

{shots}

{material}

Hallucinated:
"""

# Question, answer, and whether that is hallucinated.
SHOTS = (
    ("Which planet is nearest to the sun?", "Mercury is the nearest planet.", "No"),
    ("Who wrote the play Hamlet?", "Hamlet was written by Charles Dickens.", "Yes"),
    ("How many legs does a spider have?", "A spider has six legs.", "Yes"),
    ("What is the capital of Canada?", "The capital of Canada is Ottawa.", "No"),
)

_REFERENCE = "baseline of Hu et al. 2024 (LRP4RAG), section 4.3"


def material(example: Example) -> str:
    """Source, question and answer under headings, for a prompt to ask about."""
    return _under_headings(
        Source=example.context or example.prompt,
        Question=example.question,
        Answer=example.response,
    )


def _under_headings(**parts: str | None) -> str:
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts.items() if text)


def plainly(example: Example, ask: str = ASK) -> str:
    """Asks whether an answer is hallucinated, as LRP4RAG does."""
    return ask.replace("{material}", material(example))


def with_shots(example: Example) -> str:
    """Asks whether an answer is hallucinated, after four that are labelled.

    A bare prompt counts as the question.
    """
    shots = [
        _under_headings(Question=question, Answer=answer, Hallucinated=label)
        for question, answer, label in SHOTS
    ]
    asked = _under_headings(
        Source=example.context,
        Question=example.question if example.context else example.prompt,
        Answer=example.response,
    )
    return SHOW.format(shots="\n\n".join(shots), material=asked)


@dataclasses.dataclass(frozen=True)
class Replied:
    """A question about an answer with a reply, Yes or No, as an example to be read."""

    reply: str
    ask: Callable[[Example], str] = plainly

    def __call__(self, example: Example) -> Example:
        return Example(self.reply, prompt=self.ask(example), id=example.id)


@dataclasses.dataclass(frozen=True)
class ListedShare(Measure):
    """Share of an answer's characters that an endpoint lists as hallucinated, 0 to 1.

    Each listed part counts where it first stands in the answer; one that does not stand
    there counts by its length.  0 for an empty list.  An answer is in error where no
    reply is the JSON that was asked for, in three attempts, or there is none.
    """

    endpoint: Endpoint
    ask: str = LIST

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    @property
    def by(self) -> str:
        """Who lists."""
        return self.endpoint.name

    @property
    def reads(self) -> bool:
        return False

    def __call__(self, bulk: Bulk) -> Float[np.ndarray, " examples"]:
        shares = bulk.judged(self._shares, bulk.examples)
        return np.array([share or 0.0 for share in shares], np.float32)

    def _shares(self, examples: Sequence[Example]) -> list[float]:
        asked = [plainly(one, self.ask) for one in examples]
        replies = self.endpoint.ask_all(asked, accept=_listed)
        return [
            listed_share(one.response, _listed(reply))
            for one, reply in zip(examples, replies, strict=True)
        ]


def _listed(reply: str) -> list[str]:
    """The list in a reply; ValueError on one that is not what was asked for."""
    match json_object(reply):
        case {"hallucinations": [*parts], **others} if not others:
            if all(isinstance(part, str) for part in parts):
                return parts
    raise ValueError(
        "it does not hold the one key 'hallucinations' with a list of texts"
    )


def listed_share(response: str, parts: list[str]) -> float:
    """Share of a response's characters in the parts, as :class:`ListedShare` counts."""
    inside, missing = np.zeros(len(response), bool), 0
    for part in parts:
        start = response.find(part)
        if start < 0:
            missing += len(part)
        else:
            inside[start : start + len(part)] = True
    return min(1.0, (int(inside.sum()) + missing) / len(response))


def detection_prompt(
    endpoint: str | None = None,
    model: str | None = None,
    ask: str | None = None,
    name: str = "detection_prompt",
) -> Detector:
    r"""A language model is asked whether the answer is hallucinated.

    The reader itself says Yes or No, and nothing is generated:

    .. math:: \frac{p(\text{Yes})}{p(\text{Yes}) + p(\text{No})}

    Or a model behind an OpenAI-compatible endpoint lists the hallucinated parts, and
    the score is their share of the answer's characters: :class:`ListedShare`.  A reply
    of another form is asked for again and then an error of that answer; the published
    code (Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_, 2024, section 4.3)
    took an answer whose reply was missing or short for grounded.

    Args:
      endpoint: base address of the server, such as ``http://localhost:8000/v1``; its
        replies are kept in the cache folder, so that nothing is asked twice.
      model: the model's name there.
      ask: the question in other words, with ``{material}`` in it, which stands for
        source, question and answer; the reply has to be of the same form.
    """
    if ask is not None and "{material}" not in ask:
        raise ValueError(f"ask is {ask!r}; it must hold {{material}}")
    check_name(name, "name of detector 'detection_prompt'")
    return _detection_prompt(endpoint_of(endpoint, model), ask, name)


@functools.cache
def _detection_prompt(there: Endpoint | None, ask: str | None, name: str) -> Detector:
    if there is None:
        summary = "the reader is asked whether the answer is hallucinated"
        if ask is None:
            return _asked(name, summary, _REFERENCE, plainly)
        own = functools.partial(plainly, ask=ask)
        return _asked(name, f"{summary}, in words given", _REFERENCE, own, f"{name}_")
    share = ListedShare(there, ask or LIST)
    return Detector(
        name,
        f"share of the answer that {there.name} lists as hallucinated",
        "share of characters, 0 to 1",
        _REFERENCE,
        features=measured(share),
        inputs=lambda f: f[share.feature],
    )


@factory
def icl_prompt() -> Detector:
    """The reader is shown four labelled answers, then asked about this one.

    It says Yes or No; the score is as in :func:`detection_prompt`.  The shots are ours,
    for the paper (Liu et al., Towards Mitigation of Hallucination for LLM-empowered
    Agents, 2025) does not print its own; like its questions they have no context, and
    that of an answer which has one is shown before its question.
    """
    summary = "the reader is shown labelled answers, then asked about this one"
    reference = "baseline of Liu et al. 2025 (HalMit)"
    return _asked("icl_prompt", summary, reference, with_shots, "icl_")


def _asked(
    name: str,
    summary: str,
    reference: str,
    ask: Callable[[Example], str],
    prefix: str = "",
) -> Detector:
    """By the reader's odds of Yes and No, which are read under names with a prefix."""
    yes, no = f"{prefix}yes_logprob", f"{prefix}no_logprob"
    return Detector(
        *(name, summary, "p(Yes) / (p(Yes) + p(No)), 0 to 1", reference),
        features=(
            (yes, OfRewrite(Replied("Yes", ask), TextLogprob())),
            (no, OfRewrite(Replied("No", ask), TextLogprob())),
        ),
        inputs=lambda f: jax.nn.sigmoid(f[yes] - f[no]),
    )
