"""What came out for each answer: scores, coloured text and tables."""

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxhal.evaluation.held_out import Measured
from jaxhal.io.showing import printable, shown
from jaxhal.reporting.attribution import Sources, SpanRelevance
from jaxhal.types import Label, Turn

if TYPE_CHECKING:
    import pandas
    from rich.text import Text

# Score from which on a token gets a background; black text is readable on each.  Low
# scores keep the terminal's own colours, which may be light or dark.
_TERMINAL = ((0.75, "black on #f08b3e"), (0.5, "black on #fbb679"))

# What an answer that cannot be judged has none of.
_DECIDED = ("verdict", "probability", "by", "basis", "promise", "undecided")

Verdict = Literal["hallucinated", "unsure", "supported"]


class Token(NamedTuple):
    """A response token, its characters, and its score in [0, 1] by detector."""

    text: str
    start: int
    end: int
    scores: dict[str, float]


class Span(NamedTuple):
    """Characters of the response held for made up, with a confidence in [0, 1].

    ``relevance`` is what the reader rests them on, if that was asked for.
    """

    start: int
    end: int
    text: str
    confidence: float
    relevance: SpanRelevance | None = None

    def to_dict(self, own: str) -> dict[str, Any]:
        """As JSON; ``own`` names the answer in errors."""
        row = self._asdict() | {
            "confidence": finite(self.confidence, f"{own}: confidence")
        }
        del row["relevance"]
        if (found := self.relevance) is None:
            return row
        pieces = {
            name: [piece._asdict() for piece in getattr(found, name)]
            for name in ("sentences", "words")
        }
        return row | {"relevance": {"rules": found.rules} | pieces}


class Segment(NamedTuple):
    """A piece of a response between two boundaries of tokens, labels or spans.

    It has the numbers of the tokens that cover it, the kind of the annotated span that
    it lies in, and the confidence of the predicted one; ``None`` outside.
    """

    text: str
    tokens: tuple[int, ...]
    label: str | None
    confidence: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The verdict on one answer, and what it comes from.

    One detector decides: of those in use that beat the controls on answers they were
    not fitted to, the best one there.  Where there is none, ``undecided`` says why.

    Attributes:
      id: the example's own name.
      model: what read the answer.
      response: the answer.
      scores: detector -> score of the response, higher = more likely hallucinated.
      tokens: the response tokens with their scores.
      spans: what ``detector`` marks as made up, in an answer that is not supported.
      heads: feature -> ``[layer, heads]``, its mean over the response.
      layers: the model's own numbers of those layers.
      detector: the one that colours the tokens and finds the spans: the deciding one,
        or the best of those beside it that score tokens.
      context: the retrieved text, where the example had one.
      question: what was asked.
      prompt: the whole prompt, where the example had that instead of a context.
      turns: of a conversation, whose texts the prompt is.
      source: what the example said it shares with answers not independent of it.
      label: 1 hallucinated, 0 grounded, ``None`` unknown.
      labels: annotated spans, ``None`` unknown.
      error: why the answer could not be scored, ``None`` when it was.
      verdict: ``"hallucinated"`` where the deciding detector's score reaches its
        threshold and its probability a half, ``"supported"`` where neither does,
        ``"unsure"`` where one does.
      probability: of a hallucination, calibrated, by the deciding detector.
      by: the deciding detector.
      basis: what that was measured on.
      promise: what its threshold promises, where it was chosen for a promise.
      undecided: why there is no verdict.
      probabilities: of a hallucination, by the detectors that were fitted.
      flagged: the detectors whose score reaches their threshold and whose probability
        reaches a half; never a control, nor one that beats none.
      helpers: detector -> what else than the model it asked, such as a model of
        entailment.
      relevance: what each of ``tokens`` rests on, if that was asked for.

    >>> report = Report("a", "tiny", "It is red.", {"toha": 0.25}, [], [], {}, "toha")
    >>> print(report)
    a: toha 0.25
    >>> report = dataclasses.replace(
    ...     report, verdict="supported", probability=0.25, by="toha"
    ... )
    >>> print(report)
    a: supported (probability 0.25 by toha)
    >>> report.to_dict()
    {'id': 'a', 'verdict': 'supported', 'probability': 0.25, 'by': 'toha', 'spans': [],
     'error': None}
    """

    id: str
    model: str
    response: str
    scores: dict[str, float]
    tokens: list[Token]
    spans: list[Span]
    heads: dict[str, np.ndarray]
    detector: str
    context: str | None = None
    question: str | None = None
    prompt: str | None = None
    turns: tuple[Turn, ...] = ()
    source: str = ""
    label: int | None = None
    labels: tuple[Label, ...] | None = None
    error: str | None = None
    verdict: Verdict | None = None
    probability: float | None = None
    by: str | None = None
    basis: Measured | None = None
    promise: str | None = None
    undecided: str | None = None
    probabilities: dict[str, float] = dataclasses.field(default_factory=dict)
    flagged: list[str] = dataclasses.field(default_factory=list)
    helpers: dict[str, str] = dataclasses.field(default_factory=dict)
    relevance: Sources | None = None
    layers: list[int] = dataclasses.field(default_factory=list)

    def to_dict(self, every: bool = False) -> dict[str, Any]:
        """The output row: plain Python numbers, ready for JSON.

        Args:
          every: also what every detector says, and what the verdict rests on.

        Raises:
          ValueError: on a score or confidence that is not finite.
        """
        own = shown(self.id)
        row: dict[str, Any] = {
            "id": self.id,
            "verdict": self.verdict,
            "probability": None
            if self.probability is None
            else finite(self.probability, f"{own}: probability"),
            "by": self.by,
            "spans": [span.to_dict(own) for span in self.spans],
            "error": self.error,
        }
        if not every:
            return row
        return row | {
            "basis": self.basis and self.basis.to_dict(),
            "promise": self.promise,
            "undecided": self.undecided,
            "detector": self.detector,
            "scores": {
                name: finite(score, f"{own}: {name}")
                for name, score in self.scores.items()
            },
            "probabilities": {
                name: finite(value, f"{own}: probability of {name}")
                for name, value in self.probabilities.items()
            },
            "flagged": list(self.flagged),
            "helpers": dict(self.helpers),
        }

    def check(self) -> None:
        """Makes sure that every number can be written.

        Raises:
          ValueError: on a score, of a token or a head too, that is not finite.
        """
        self.to_dict(every=True)
        for token in self.tokens:
            for name, score in token.scores.items():
                finite(score, f"{shown(self.id)}: {name} of a token")
        for name, heads in self.heads.items():
            rounded(heads, f"{shown(self.id)}: {name}")

    def checked(self) -> "Report":
        """Itself, or its error without a verdict where a number is not finite."""
        try:
            self.check()
        except ValueError as error:
            bare: dict[str, Any] = {"scores": {}, "tokens": [], "spans": []}
            bare |= {"heads": {}, "probabilities": {}, "flagged": [], "relevance": None}
            bare |= dict.fromkeys(_DECIDED)
            return dataclasses.replace(self, **bare, error=str(error))
        return self

    @property
    def places(self) -> list[tuple[int, int]]:
        """The characters of the spans."""
        return [(span.start, span.end) for span in self.spans]

    def resting(self, found: Sequence[SpanRelevance]) -> "Report":
        """The same, and what each of the spans rests on."""
        pairs = zip(self.spans, found, strict=True)
        spans = [span._replace(relevance=one) for span, one in pairs]
        return dataclasses.replace(self, spans=spans)

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per token: ``token``, ``start``, ``end``, a column per detector."""
        import pandas

        rows = [
            {"token": token.text, "start": token.start, "end": token.end} | token.scores
            for token in self.tokens
        ]
        names = ["token", "start", "end", *token_detectors([self])]
        return pandas.DataFrame(rows, columns=pandas.Index(names))

    def segments(self) -> list[Segment]:
        """The response cut at every boundary, so that each piece has one look.

        Tokens without text, such as the end of the sequence, are in no segment.
        """
        cuts = {0, len(self.response)}
        for item in (*self.tokens, *self.spans, *(self.labels or ())):
            cuts |= {item.start, item.end}
        edges = sorted(cuts)

        def pieces(item: Token | Span | Label) -> range:
            left = bisect.bisect_left(edges, item.start)
            return range(left, bisect.bisect_left(edges, item.end))

        tokens = collections.defaultdict[int, list[int]](list)
        for number, token in enumerate(self.tokens):
            for piece in pieces(token):
                tokens[piece].append(number)
        kinds = {n: label.label for label in self.labels or () for n in pieces(label)}
        sure = {n: float(span.confidence) for span in self.spans for n in pieces(span)}
        return [
            Segment(self.response[a:b], tuple(tokens[n]), kinds.get(n), sure.get(n))
            for n, (a, b) in enumerate(itertools.pairwise(edges))
        ]

    def __str__(self) -> str:
        if self.error is not None:
            return f"{shown(self.id)}: {printable(self.error, keep='')}"
        parts = [f"{shown(name)} {score:.4g}" for name, score in self.scores.items()]
        if self.verdict is not None:
            sure = f"probability {self.probability:.2f} by {shown(self.by)}"
            parts = [f"{self.verdict} ({sure})"]
        parts += [f"{span.text!r} ({span.confidence:.2f})" for span in self.spans]
        return f"{shown(self.id)}: {', '.join(parts) or 'no scores'}"

    def __rich__(self) -> "Text":
        """For a terminal: scores as background, labels underlined, spans bold."""
        from rich.text import Text

        text = Text()
        for segment, score in self._coloured():
            shades = (look for least, look in _TERMINAL if (score or 0.0) >= least)
            style = next(shades, "")
            style += " underline" if segment.label else ""
            style += " bold" if segment.confidence is not None else ""
            text.append(printable(segment.text), style=style.strip())
        return text

    def _repr_html_(self) -> str:
        """The answer and its scores for a notebook, on a light or a dark page."""
        page = templates().get_template("verdict.html")
        return page.render(report=self, pieces=self._coloured())

    def _coloured(self) -> list[tuple[Segment, float | None]]:
        """Segments with the score that colours them, the highest of their tokens'."""
        scores = [token.scores.get(self.detector) for token in self.tokens]
        found = []
        for piece in self.segments():
            known = [s for number in piece.tokens if (s := scores[number]) is not None]
            found.append((piece, max(known, default=None)))
        return found


# Joiners too, which emoji and Persian are written with.
_KEPT = "\n\t\r\u200c\u200d"


@functools.cache
def templates() -> Any:
    """Those of pages: what is filled in is text, shown as it is, and no markup."""
    import jinja2

    def legible(value: Any) -> Any:
        return printable(value, keep=_KEPT) if type(value) is str else value

    loader = jinja2.PackageLoader("jaxhal.reporting")
    return jinja2.Environment(autoescape=True, finalize=legible, loader=loader)


def token_detectors(reports: Iterable[Report]) -> list[str]:
    """Names of the detectors that score tokens in any of them."""
    return list(
        dict.fromkeys(
            name for report in reports for each in report.tokens for name in each.scores
        )
    )


def rounded(values: Any, where: str) -> list[Any]:
    """Numbers for a page; ValueError as :func:`finite`."""
    array = np.asarray(values, float)
    if not np.isfinite(array).all():
        finite(array[~np.isfinite(array)][0], where)
    return array.round(3).tolist()


def finite(value: Any, where: str) -> float:
    """A number that can be written; ValueError says where one cannot."""
    if not math.isfinite(value):
        raise ValueError(
            f"{where} is {value}; every number must be finite, look for NaN in the "
            "model's weights or in the detector"
        )
    return float(value)
