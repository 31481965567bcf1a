"""What came out for each answer: scores, coloured text and tables."""

import bisect
import collections
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxhal.io.showing import printable, shown
from jaxhal.reporting.attribution import Sources
from jaxhal.types import Label

if TYPE_CHECKING:
    import pandas
    from rich.text import Text

# Score from which on a token gets a background; black text is readable on each.  Low
# scores keep the terminal's own colours, which may be light or dark.
_TERMINAL = ((0.75, "black on #f08b3e"), (0.5, "black on #fbb679"))


class Token(NamedTuple):
    """A response token, its characters, and its score in [0, 1] by detector."""

    text: str
    start: int
    end: int
    scores: dict[str, float]


class Span(NamedTuple):
    """Characters of the response held for made up, with a confidence in [0, 1]."""

    start: int
    end: int
    text: str
    confidence: float


class Segment(NamedTuple):
    """A piece of a response between two boundaries of tokens, labels or spans.

    It has the numbers of the tokens that cover it, the kind of the annotated span that
    it lies in, and the confidence of the predicted one; ``None`` outside.
    """

    text: str
    tokens: tuple[int, ...]
    label: str | None
    confidence: float | None


@dataclass(frozen=True)
class Report:
    """The verdict on one answer.

    Attributes:
      id: the example's own name.
      model: what read the answer.
      response: the answer.
      scores: detector -> score of the response, higher = more likely hallucinated.
      tokens: the response tokens with their scores.
      spans: what ``detector`` marks as made up.
      heads: feature -> ``[layer, heads]``, its mean over the response.
      detector: the one that coloured the tokens and found the spans.
      context: the retrieved text, where the example had one.
      question: what was asked.
      prompt: the whole prompt, where the example had that instead of a context.
      label: 1 hallucinated, 0 grounded, ``None`` unknown.
      labels: annotated spans, ``None`` unknown.
      error: why the answer could not be scored, ``None`` when it was.
      probabilities: of a hallucination, by the detectors that were fitted.
      flagged: the detectors whose score reaches their threshold; never a control, nor
        one that beats none.
      by: detector -> what else than the model decided, such as a model of entailment.
      relevance: what each of ``tokens`` rests on, if that was asked for.

    >>> report = Report("a", "tiny", "It is red.", {"toha": 0.25}, [], [], {}, "toha")
    >>> print(report)
    a: toha 0.25
    >>> report.to_dict()
    {'id': 'a', 'scores': {'toha': 0.25}, 'probabilities': {}, 'flagged': [],
     'spans': [], 'error': None}
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
    label: int | None = None
    labels: tuple[Label, ...] | None = None
    error: str | None = None
    probabilities: dict[str, float] = field(default_factory=dict)
    flagged: list[str] = field(default_factory=list)
    by: dict[str, str] = field(default_factory=dict)
    relevance: Sources | None = None

    def to_dict(self) -> dict[str, Any]:
        """The output row: plain Python numbers, ready for JSON.

        ``"by"`` is there only where it says something.

        Raises:
          ValueError: on a score or confidence that is not finite.
        """
        own = shown(self.id)
        return {
            "id": self.id,
            "scores": {
                name: finite(score, f"{own}: {name}")
                for name, score in self.scores.items()
            },
            "probabilities": {
                name: finite(value, f"{own}: probability of {name}")
                for name, value in self.probabilities.items()
            },
            **({"by": dict(self.by)} if self.by else {}),
            "flagged": list(self.flagged),
            "spans": [
                {
                    "start": int(start),
                    "end": int(end),
                    "text": text,
                    "confidence": finite(confidence, f"{own}: confidence"),
                }
                for start, end, text, confidence in self.spans
            ],
            "error": self.error,
        }

    def check(self) -> None:
        """Makes sure that every number can be written.

        Raises:
          ValueError: on a score, of a token or a head too, that is not finite.
        """
        self.to_dict()
        for token in self.tokens:
            for name, score in token.scores.items():
                finite(score, f"{shown(self.id)}: {name} of a token")
        for name, heads in self.heads.items():
            rounded(heads, f"{shown(self.id)}: {name}")

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
