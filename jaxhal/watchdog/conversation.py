"""A query that is the last turn of a conversation."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

#: Wishes that bound an answer's tokens.
LENGTHS = ("max_tokens", "max_completion_tokens")
# What ends a sentence, in any script; words in a row, about as many as a query has, or
# a short one; characters of the shortest sentence that could be one.
_END = re.compile(r"(?<=[?!;。？！；؟।])|(?<=[.:])\s+|[\r\n]+")
_WORDS, _SHORTEST = (16, 8), 8
# A word, or a part of what is written without spaces.
_WORD = re.compile(r"\S{1,32}")


class Conversation(str):
    """A query with the turns before it, and what else is wished of its answer.

    As text it is its turns, one below the other, so that any agent takes it;
    :class:`jaxhal.watchdog.EndpointAgent` passes turns (roles and texts, the last one
    the user's) and wishes (fields of a request, such as ``stop``) on.
    """

    turns: tuple[tuple[str, str], ...]
    wishes: Mapping[str, Any]

    def __new__(
        cls, turns: Sequence[tuple[str, str]], wishes: Mapping[str, Any] | None = None
    ):
        if not turns:
            raise ValueError("turns is empty; give at least the user's")
        said = (f"{role}: {text}" for role, text in turns)
        self = super().__new__(cls, "\n\n".join(said) if turns[1:] else turns[0][1])
        self.turns, self.wishes = tuple(turns), dict(wishes or {})
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What it is made of, for pickle and copy: its text alone holds no turns."""
        return self.turns, self.wishes

    @classmethod
    def of(cls, query: str) -> "Conversation":
        """A query as a conversation, if it is none, of one turn."""
        return query if isinstance(query, cls) else cls([("user", query)])

    @property
    def query(self) -> str:
        return self.turns[-1][1]


def last_turn(query: str) -> str:
    """A query without the turns before it, if it has any."""
    return Conversation.of(query).query


def turns_of(query: Conversation, known: Container[str] = ()) -> list[str]:
    """The turns that are looked at, the last one first.

    All are, as the client wrote them all, except what the assistant said that is one of
    the ``known`` answers.  What the answer's form is said to be comes last: a schema
    may ask something, too.
    """
    said = [
        text
        for role, text in query.turns[:-1]
        if text.strip() and not (role == "assistant" and text.strip() in known)
    ]
    form = "\n".join(_texts_in(query.wishes.get("response_format")))
    return [query.query, *said, *([form] if form.strip() else [])]


def _texts_in(value: Any) -> Iterator[str]:
    """Every text in what JSON can hold, names of fields as well."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one


def looked_at(query: str, known: Container[str] = ()) -> list[str]:
    """The texts that a watchdog looks for near the bound, the query itself first.

    Of a conversation these are its turns, each sentence of 8 characters, and of a long
    one all 16 words in a row, from every eighth word on, and all 8, from every fourth:
    a question is found wherever it stands, with few other words beside it.
    """
    if not isinstance(query, Conversation):
        return [query]
    turns = turns_of(query, known)
    parts = (part for turn in turns for part in _parts(turn))
    return [*dict.fromkeys([*turns, *parts])]


def _parts(text: str) -> Iterator[str]:
    for sentence in _END.split(text):
        if len(sentence.strip()) >= _SHORTEST:
            yield sentence.strip()
        words = [*_WORD.finditer(sentence)]
        for most in _WORDS:
            for first in range(0, max(0, len(words) - most // 2), most // 2):
                some = words[first : first + most]
                if len(some) < len(words):
                    yield sentence[some[0].start() : some[-1].end()]
