"""The shared vocabulary: examples, batches and what a reducer may see.

Axis names used in every annotation of this package::

    batch seq query key heads kv_heads group layer width vocab samples
    prompt response

**The seam.** In a batch the prompt is padded on the left to ``P`` columns and the
response on the right to ``R``, so that the boundary is one static column of every row.
"""

import dataclasses
import json
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Int

from jaxhal.io.showing import quoted, shown


class Label(NamedTuple):
    """One annotated span of a response: characters ``[start, end)`` and its kind."""

    start: int
    end: int
    label: str = "hallucination"


ROLES = ("system", "user", "assistant", "tool")


class Call(NamedTuple):
    """What an assistant asked of a tool; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str
    id: str = ""


class Turn(NamedTuple):
    """What one of :data:`ROLES` said in a conversation.

    ``calls`` are an assistant's, whose text may then be empty; a tool's text is what
    it gave, to the call ``call_id`` of the tool ``name``.
    """

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""


class Logprob(NamedTuple):
    """A token as an engine wrote it, and its log probability in nats.

    ``top`` are those of the likeliest tokens in its place, as many as were asked for.
    """

    token: str
    logprob: float
    top: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Example:
    """One answer to be judged, with what it was supposed to rest on.

    Give ``prompt`` (the text the model was given, used as the user turn), or
    ``context`` and ``question`` (a prompt is built from them), or all three: then the
    context and the question are found inside the prompt.  Or give ``turns``, of which
    the response is the next.

    Every text is read as text, whatever it spells: ``<|im_end|>`` in a document ends no
    turn.  Control tokens come from the model's chat template, or from a ``prompt`` that
    is said to be ``templated``; its context and question are text there too.

    Args:
      response: the answer, not empty.
      question: what was asked; may be empty for a summary.
      id: a name that comes back with the scores.
      labels: hallucinated character spans of the response; empty means none, ``None``
        means unknown.
      label: 1 when the response is hallucinated, 0 when it is not, ``None`` when
        unknown; follows from ``labels`` when these are given.
      source: what the answer rests on, by name; answers that share one are not
        independent and stay together in splits and intervals.  Its context, or else its
        prompt, when left out.
      split: the part of a data set it belongs to, such as ``"train"`` or ``"test"``.
      samples: other answers to the same prompt by whoever wrote this one.
      templated: the prompt went through a chat template, gets none, and has control
        tokens.
      turns: the conversation up to the last turn of the user or of a tool; ``prompt``
        is then its texts, a blank line between them.
      states: the file, in a folder of them, into which the engine that wrote the
        response put its hidden states; ``id`` and ``.safetensors`` when left out.
      logprobs: what that engine said of each token of the response.
      tools: definitions of those that could be called in the conversation, each a JSON
        object as text, ``{"type": "function", "function": {"name", ...}}``.

    Raises:
      ValueError: on a field of another kind, on an empty response or prompt, on neither
        ``prompt`` nor ``context``, on a context or question that is not in the prompt,
        on ``templated`` without a prompt, on turns beside any of these or not ending
        with the user's or a tool's, on calls and tools that are no such JSON, on label
        spans outside the response.
    """

    response: str
    prompt: str | None = None
    context: str | None = None
    question: str | None = None
    id: str = ""
    labels: tuple[Label, ...] | None = None
    label: int | None = None
    source: str = ""
    split: str = ""
    samples: tuple[str, ...] = ()
    templated: bool = False
    turns: tuple[Turn, ...] = ()
    states: str = ""
    logprobs: tuple[Logprob, ...] | None = None
    tools: tuple[str, ...] = ()

    def __post_init__(self):
        where = f"example {quoted(self.id)}: " if self.id else ""
        self._check_kinds(where)
        if self.turns:
            object.__setattr__(self, "prompt", self._said(where))
        elif self.tools:
            raise ValueError(
                f"{where}got 'tools' without 'turns'; they belong to a conversation, "
                "so give it, or leave them out"
            )
        if not self.response.strip():
            raise ValueError(
                f"{where}response is {quoted(self.response)}; give an answer with "
                "at least one visible character"
            )
        if self.prompt is None and self.context is None:
            raise ValueError(
                f"{where}got neither 'prompt' nor 'context'; give 'prompt', or "
                "'context' with 'question'"
            )
        if self.templated and self.prompt is None:
            raise ValueError(
                f"{where}'templated' says that the prompt is finished, but there is no "
                "'prompt'; give it, or leave 'templated' out"
            )
        if self.prompt is not None:
            for name in ("context", "question"):
                part = getattr(self, name)
                if part and part not in self.prompt:
                    raise ValueError(
                        f"{where}{name!r} is not in 'prompt', where it should be "
                        "found word for word; leave one of the two out"
                    )
        for name in ("prompt", "context"):
            text = getattr(self, name)
            if text is not None and not text.strip():
                raise ValueError(f"{where}{name} is {quoted(text)}; it must hold text")
        for span in self.labels or ():
            if not 0 <= span.start < span.end <= len(self.response):
                raise ValueError(
                    f"{where}label span [{shown(span.start)}, {shown(span.end)}) lies "
                    f"outside the response of {len(self.response)} characters; offsets "
                    "count characters, end is exclusive"
                )
        if self.label not in (None, 0, 1):
            raise ValueError(
                f"{where}label is {quoted(self.label)}; use 0, 1 or leave it out"
            )
        if self.label is not None:
            object.__setattr__(self, "label", int(self.label))  # as JSON holds it
        if self.labels is not None:
            whole = [Label(int(x.start), int(x.end), x.label) for x in self.labels]
            object.__setattr__(self, "labels", tuple(whole))
            implied = int(bool(self.labels))
            if self.label is None:
                object.__setattr__(self, "label", implied)
            elif self.label != implied:
                raise ValueError(
                    f"{where}label is {self.label} but {len(self.labels)} spans are "
                    "given; drop one of the two"
                )

    def _check_kinds(self, where: str) -> None:
        """ValueError where one of the fields is of another kind than is declared."""
        texts = "response", "id", "source", "split", "states"
        for name in (*texts, "prompt", "context", "question"):
            value = getattr(self, name)
            left_out = value is None and name not in texts
            if not left_out and not isinstance(value, str):
                raise ValueError(f"{where}{name} is {shown(value)}; give text")
        if not isinstance(self.templated, bool):
            raise ValueError(
                f"{where}templated is {shown(self.templated)}; give True or False"
            )
        lists = (
            ("samples", str, "texts"),
            ("labels", Label, "spans, each a Label"),
            ("turns", Turn, "turns, each a Turn"),
            ("logprobs", Logprob, "those of the tokens, each a Logprob"),
            ("tools", str, "definitions, each JSON as text"),
        )
        for name, kind, many in lists:
            value = getattr(self, name)
            if value is None and name in ("labels", "logprobs"):
                continue
            each = value if isinstance(value, Collection) else [None]
            if isinstance(value, str) or not all(isinstance(x, kind) for x in each):
                raise ValueError(f"{where}{name} is {shown(value)}; give {many}")

    def _said(self, where: str) -> str:
        """The texts of the turns; ValueError where no answer can follow them."""
        said = "\n\n".join(turn.content for turn in self.turns if turn.content)
        for number, turn in enumerate(self.turns):
            _check_turn(f"{where}turn {number}", turn)
        if self.turns[-1].role not in ("user", "tool"):
            raise ValueError(
                f"{where}the turn before the answer is by {quoted(self.turns[-1].role)}"
                ", and an answer is to the user or a tool; leave out what comes after"
            )
        for number, tool in enumerate(self.tools):
            about = _object(f"{where}tool {number}", tool).get("function")
            name = about.get("name") if isinstance(about, dict) else None
            if not (isinstance(name, str) and name):
                raise ValueError(
                    f"{where}tool {number} has no name; use "
                    '{"type": "function", "function": {"name": ...}}'
                )
        given = {
            "context": self.context is not None,
            "question": self.question is not None,
            "prompt": self.prompt not in (None, said),
            "templated": self.templated,
        }
        for name, there in given.items():
            if there:
                raise ValueError(
                    f"{where}got 'turns' and {name!r}; a conversation is the whole "
                    "prompt, so leave one of the two out"
                )
        return said

    @property
    def source_text(self) -> str:
        """The text the response may rest on: the prompt, or context and question."""
        if self.prompt is not None:
            return self.prompt
        return "\n\n".join(part for part in (self.context, self.question) if part)

    @property
    def group(self) -> str:
        """What it shares with answers that are not independent of it."""
        return self.source or self.context or self.source_text


def _check_turn(where: str, turn: Turn) -> None:
    if turn.role not in ROLES:
        raise ValueError(f"{where} is by {quoted(turn.role)}; use {', '.join(ROLES)}")
    if turn.calls and turn.role != "assistant":
        raise ValueError(f"{where} has calls and is by {turn.role}; assistants call")
    if (turn.call_id or turn.name) and turn.role != "tool":
        raise ValueError(
            f"{where} is by {turn.role} and answers a call; that is a tool's to do"
        )
    for number, call in enumerate(turn.calls):
        if not call.name:
            raise ValueError(f"{where}, call {number} names no tool")
        _object(f"{where}, call {number} of {quoted(call.name)}", call.arguments)


def _object(where: str, text: str) -> dict[str, Any]:
    """The JSON object that a text is; ValueError where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is {quoted(text)}, not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {quoted(text)}; use a JSON object")
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens of several examples in the seam layout; a pytree.

    Attributes:
      tokens: ``Int[batch seq]``, ``seq = P + R``; padding holds the pad id.
      valid: ``Bool[batch seq]``, False on padding.
      context: ``Bool[batch seq]``, prompt tokens that count as context for the lookback
        ratio: everything up to the end of the user's text, never the last prompt token.
      document: ``Bool[batch seq]``, tokens of the retrieved text (the whole user text
        when the example came as a bare prompt).
      question: ``Bool[batch seq]``, tokens of the question.
      offsets: ``Int[batch response 2]``, character span of each response token in its
        response; ``(n, n)`` for the end-of-sequence token, zeros on padding.
      prompt_length: the static column ``P`` where every response starts.
    """

    tokens: Any
    valid: Any
    context: Any
    document: Any
    question: Any
    offsets: Any
    prompt_length: int = dataclasses.field(metadata={"static": True})

    @property
    def response_mask(self) -> Any:
        """``Bool[batch response]``, True on real response tokens."""
        return self.valid[:, self.prompt_length :]


class View(NamedTuple):
    """What a reducer may know about one sample besides the rows it reduces.

    ``position`` and ``target`` run along the query rows at hand, all else along the
    key columns of the whole sample (``seq = P + R``).
    """

    position: Int[Array, " query"]  # the column of each query row
    target: Int[Array, " query"]  # the token each row predicts, i.e. the next column's
    valid: Bool[Array, " key"]
    context: Bool[Array, " key"]
    document: Bool[Array, " key"]
    question: Bool[Array, " key"]
    tokens: Int[Array, " key"]  # 0 in columns that decoding has not written yet
    prompt_length: int
