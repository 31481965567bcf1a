"""Labelling answers: by references, or by a language model that is asked."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxhal.datasets.questions import Question
from jaxhal.io.checks import one_of
from jaxhal.io.showing import quoted
from jaxhal.llm.endpoint import Endpoint, json_object
from jaxhal.texts import contains, declines, overlap, rouge_l, unigram_f1
from jaxhal.types import Label

# What an endpoint is asked; its reply is a JSON object with two keys.
ANNOTATE = """\
You check answers to questions. An answer is hallucinated when any part of it \
contradicts the source, or says what the source does not support, be it true or not. \
To deny what a question takes for granted is no hallucination where the source denies \
it too.

Take the source "The Rhine rises in the Alps and ends in the North Sea." and the \
question "Does the Rhine end in the Baltic Sea?"
The answer "Yes, it ends in the Baltic Sea." is hallucinated:
{{"hallucinated": "yes", "parts": ["Yes, it ends in the Baltic Sea."]}}
The answer "No, it ends in the North Sea." is not:
{{"hallucinated": "no", "parts": []}}

Now check this one.

{material}

Reply with nothing but a JSON object of that form. "hallucinated" is "yes", "no", or \
"unsure" if you cannot decide. "parts" lists every hallucinated part, copied from the \
answer letter by letter; it is empty unless "hallucinated" is "yes".
"""

_LABELS = {"yes": 1, "no": 0, "unsure": None}
#: How near an answer is to a reference: the measure's name, and itself.
NEARNESS = {"rouge_l": ("ROUGE-L", rouge_l), "unigram_f1": ("unigram F1", unigram_f1)}
# Of a question or a part that an error shows.
_SHOWN = 80
# Up to here an answer has little in common with a reference.
_LITTLE = 0.3
# From here on it says the same.
_ENOUGH = 0.5


class Verdict(NamedTuple):
    """What a judge says of an answer.

    ``label`` is 1 hallucinated, 0 not, ``None`` best left out; ``spans`` are the
    hallucinated characters, ``None`` when the judge looks for none.
    """

    label: int | None
    why: str
    spans: tuple[Label, ...] | None


Judge = Callable[[Question, str], Verdict]


def references(question: Question) -> tuple[str, ...]:
    """The reference answers to a question, at least one."""
    answer = question.answer
    return (answer,) if isinstance(answer, str) else tuple(answer)


@dataclasses.dataclass(frozen=True)
class ReferenceRule:
    """Compares an answer with references, and passes on what differs from all of them.

    Where ROUGE-L is 1 the answer is a reference, grounded.  Where it, or the
    ``nearness`` taken, is at most 0.3, and no reference stands in the answer, it may be
    hallucinated: ``confirm`` decides.  Otherwise the label is ``None``.

    Bazarova et al., Hallucination Detection in LLMs with Topological Divergence on
    Attention Graphs, 2025, appendix C.1, which leaves open which ROUGE-L is taken, how
    words are compared, and what becomes of answers in between: here the F measure with
    the nearest reference, normalised words, and left out.

    Args:
      confirm: in the paper a language model such as :class:`EndpointJudge`; without one
        all that may be hallucinated count so.
      contained: the label of an answer that a reference stands in by whole words, and
        that says more.
      refusals: an answer that declines is grounded if a reference declines too, and has
        no label otherwise.
      nearness: ``"rouge_l"``, or ``"unigram_f1"``, which suspects fewer answers.

    Example:
      >>> judge, question = ReferenceRule(), Question("Capital of France?", "Paris")
      >>> judge(question, "Paris.").label, judge(question, "It is Lyon.").label
      (0, 1)
    """

    confirm: Judge | None = None
    contained: int | None = None
    refusals: bool = False
    nearness: str = "rouge_l"

    def __post_init__(self):
        one_of(NEARNESS, nearness=self.nearness)

    def __call__(self, question: Question, answer: str) -> Verdict:
        known = references(question)
        if any(rouge_l(answer, each) == 1.0 for each in known):
            return Verdict(0, "the answer is a reference", ())
        if self.refusals and declines(answer):
            if any(declines(each) for each in known):
                return Verdict(0, "it declines, and so does a reference", ())
            return Verdict(None, "it declines, and no reference does", None)
        if any(contains(answer, each) for each in known):
            why = "a reference stands in the answer, which says more"
            whole = any(contains(answer, each, words=True) for each in known)
            return Verdict(self.contained if whole else None, why, None)
        name, measure = NEARNESS[self.nearness]
        nearest = max(measure(answer, each) for each in known)
        why = f"{name} with the nearest reference is {nearest:.2f}"
        if nearest > _LITTLE:
            return Verdict(None, f"{why}, neither 1 nor at most {_LITTLE}", None)
        if self.confirm is None:
            return Verdict(1, why, None)
        return self.confirm(question, answer)


@dataclasses.dataclass(frozen=True)
class OverlapRule:
    """An answer is hallucinated when its overlap with every reference is under 0.5.

    That is :func:`jaxhal.texts.overlap` (Liu et al., HalMit, 2025, section 4.1).  With
    ``contained``, not if a reference stands in it by whole words and it does not
    decline.
    """

    contained: bool = False

    def __call__(self, question: Question, answer: str) -> Verdict:
        known = references(question)
        share = overlap(answer, known)
        why = f"overlap with the nearest reference is {share:.2f}"
        if self.contained and not declines(answer):
            if any(contains(answer, each, words=True) for each in known):
                return Verdict(0, "a reference stands in the answer", ())
        return Verdict(1, why, None) if share < _ENOUGH else Verdict(0, why, ())


@dataclasses.dataclass(frozen=True)
class EndpointJudge:
    """A language model is asked whether an answer is hallucinated, and in which parts.

    It is shown the context, or else the reference answers.  A reply that cannot be
    read, or that lists what does not stand in the answer, is asked for again, up to
    twice.  Bazarova et al., 2025, table 6, ask GPT-4o for Yes, No or N/A.
    """

    endpoint: Endpoint

    def __call__(self, question: Question, answer: str) -> Verdict:
        where = f"question {question.text[:_SHOWN]!r}"
        if not answer.strip():
            raise ValueError(f"{where}: answer is {quoted(answer)}; it must hold text")
        asked = ANNOTATE.format(material=_material(question, answer))
        read = functools.partial(_read, answer)
        try:
            word, parts = read(self.endpoint.ask(asked, accept=read))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        spans = _spans(answer, parts)
        why = f"{self.endpoint.model} was asked whether it is hallucinated: {word}"
        return Verdict(_LABELS[word], why, None if word == "unsure" else tuple(spans))


def _spans(answer: str, parts: Sequence[str]) -> list[Label]:
    """Where parts stand; one that is listed again stands after the one before."""
    found, ends = set(), {}
    for part in parts:
        start = answer.find(part, ends.get(part, 0))
        if start >= 0:  # else it is listed more often than it stands there
            ends[part] = start + len(part)
            found.add(Label(start, ends[part]))
    return sorted(found)


def _material(question: Question, answer: str) -> str:
    source = question.context or "\n".join(
        f"A right answer is: {each}" for each in references(question)
    )
    parts = {"Source": source, "Question": question.text, "Answer": answer}
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts.items())


def _read(answer: str, reply: str) -> tuple[str, list[str]]:
    """The word and the parts of a reply; ValueError says what is wrong with it."""
    match json_object(reply):
        case {
            "hallucinated": "yes" | "no" | "unsure" as word,
            "parts": [*parts],
            **others,
        } if not others:
            pass
        case _:
            raise ValueError(
                "it does not hold the keys 'hallucinated', with 'yes', 'no' or "
                "'unsure', and 'parts', with a list, and no other"
            )
    for part in parts:
        if not isinstance(part, str) or not part.strip() or part not in answer:
            shown = repr(part)[:_SHOWN]
            raise ValueError(f"the part {shown} does not stand in the answer")
    if bool(parts) != (word == "yes"):
        raise ValueError(
            f"'hallucinated' is {quoted(word)} but {len(parts)} parts are listed"
        )
    return word, parts
