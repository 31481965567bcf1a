"""Evaluation agents: is an answer hallucinated, and how sure is that?"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxhal.datasets import Question
from jaxhal.llm.endpoint import Endpoint, Unanswered, Useless, json_object
from jaxhal.llm.judges import OverlapRule, references
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.reading.keys import digest
from jaxhal.texts import storable
from jaxhal.watchdog.agents import Reply, Threads, failed, named, together
from jaxhal.watchdog.index import Index, check_cosine

# From this confidence on a verdict counts; judgements asked for at a time.
_SURE, _AT_ONCE = 0.6, 8
#: What a judging model is asked.
ASK = """\
You check the answers of an assistant. An answer is hallucinated when it says anything \
that is false, that its material contradicts or does not bear out, or that evades the \
question by making something up.

{material}

Reply with nothing but a JSON object of this form:
{{"hallucinated": true, "confidence": 85, "why": "in a few words"}}
where confidence is how sure you are of that verdict, from 0 to 100.
"""


class Judgement(NamedTuple):
    """What an evaluation agent says of an answer.

    ``label`` is 1 hallucinated, 0 not, ``None`` when a person has to decide;
    ``confidence`` is in [0, 1]; one that ``failed`` got no answer, and is asked for
    again.
    """

    label: int | None
    why: str
    confidence: float = 1.0
    failed: bool = False


@runtime_checkable
class Evaluator(Protocol):
    """Judges answers; ``name`` is kept with every verdict."""

    @property
    def name(self) -> str: ...

    async def judge(self, query: str, replies: Sequence[Reply]) -> list[Judgement]:
        """A judgement of each answer to a query, in order."""
        ...


class ReferenceEvaluator:
    """Compares answers with the references of the most similar known question.

    By the paper's rule (Liu et al., 2025, section 4.1).  A query whose cosine with that
    question is under ``similarity``, high where questions follow one pattern, has no
    reference: a person has to decide.  With ``contained`` an answer is right too if a
    reference stands in it by whole words.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        contained: bool = False,
        similarity: float = 0.9,
        encoder: str = "all-minilm-l6-v2",
    ):
        if not questions:
            raise ValueError("there are no questions with references; give some")
        check_cosine(similarity=similarity)
        self.questions, self.rule = list(questions), OverlapRule(contained)
        self.similarity, self.encoder = similarity, encoder
        self.name = f"references of {len(questions)} questions"
        known = repr([(one.text, references(one)) for one in questions])
        self.settings = {
            "references": digest(known),
            "contained": contained,
            "similarity": similarity,
            "encoder": encoder,
        }
        texts = [one.text for one in questions]
        self._index = Index(embed(kept_encoder(encoder), texts, progress=False))

    async def judge(self, query: str, replies: Sequence[Reply]) -> list[Judgement]:
        return await asyncio.to_thread(self._judge, query, replies)

    def _judge(self, query: str, replies: Sequence[Reply]) -> list[Judgement]:
        vectors = embed(kept_encoder(self.encoder), [query], progress=False)
        ((cosine,),), ((row,),) = self._index.search(vectors, 1)
        known, least = self.questions[row], self.similarity
        near = f"the nearest known question, {known.text[:60]!r}, is {cosine:.2f}"
        if cosine < least:
            why = f"{near} similar, under {least}"
            return [Judgement(None, why, 0.0)] * len(replies)
        found = [self.rule(known, one.text) for one in replies]
        return [Judgement(one.label, f"{one.why}; {near} similar") for one in found]


class EndpointEvaluator:
    """A language model judges, and says how sure it is; under 0.6 a person has to.

    Replies are kept; where the endpoint does not answer the judgement has failed.  The
    paper asks GPT-4 (Liu et al., 2025, section 4.2); its prompt is not published.
    """

    def __init__(self, endpoint: Endpoint):
        self.endpoint, self.name = endpoint, endpoint.name
        self._threads = Threads(_AT_ONCE)

    async def judge(self, query: str, replies: Sequence[Reply]) -> list[Judgement]:
        work = (self._threads(self._judge, query, one) for one in replies)
        return await together(*work)

    def _judge(self, query: str, reply: Reply) -> Judgement:
        parts = {"Material": reply.context, "Question": query, "Answer": reply.text}
        material = "\n\n".join(f"{k}:\n{v}" for k, v in parts.items() if v)
        try:
            said = self.endpoint.ask(ASK.format(material=material), accept=_read)
        except Useless as error:
            return Judgement(None, str(error), 0.0)
        except Unanswered as error:
            return Judgement(None, str(error), 0.0, failed=True)
        hallucinated, confidence, why = _read(said)
        return Judgement(hallucinated if confidence >= _SURE else None, why, confidence)


def _read(reply: str) -> tuple[int, float, str]:
    match json_object(reply):
        case {
            "hallucinated": bool() as verdict,
            "confidence": int() | float() as sure,
            "why": str() as why,
        } if 0 <= sure <= 100 and not isinstance(sure, bool):
            return int(verdict), sure / 100, storable(why)
    raise ValueError(
        "it does not hold 'hallucinated', true or false, 'confidence', a number from "
        "0 to 100, and 'why', a text"
    )


class CallableEvaluator:
    """Any function from a query and an answer to a label, or to a :class:`Judgement`.

    What it raises is why there is no verdict.
    """

    def __init__(self, function: Callable[[str, str], Any], name: str = ""):
        self.function, self.name = function, name or named(function)

    async def judge(self, query: str, replies: Sequence[Reply]) -> list[Judgement]:
        return [await asyncio.to_thread(self._judge, query, r.text) for r in replies]

    def _judge(self, query: str, text: str) -> Judgement:
        try:
            found = self.function(query, text)
        except Exception as error:  # whatever another's code raises
            return Judgement(None, failed(error).error or "", 0.0, failed=True)
        if isinstance(found, Judgement):
            # Numbers of NumPy are none that JSON holds.
            label = found.label if found.label is None else int(found.label)
            return found._replace(label=label, confidence=float(found.confidence))
        if found is None:
            return Judgement(None, "the evaluator cannot tell", 0.0)
        kinds = bool | int | np.integer | np.bool_
        if isinstance(found, kinds) and int(found) in (0, 1):
            return Judgement(int(found), "the evaluator says so")
        raise ValueError(
            f"the evaluator returned {found!r}; let it return 0, 1, None or a Judgement"
        )
