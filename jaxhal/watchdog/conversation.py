"""A query that is the last turn of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

#: Wishes that bound an answer's tokens.
LENGTHS = ("max_tokens", "max_completion_tokens")


class Conversation(str):
    """A query with the turns before it, and what else is wished of its answer.

    As text it is its turns, one below the other, so an agent that takes any query takes
    this one too; :class:`jaxhal.watchdog.EndpointAgent` passes turns and wishes on.  A
    watchdog looks for the last turn near the bound, and has the agent sample answers to
    the whole.

    Args:
      turns: the role and the text of each, the last one the user's.
      wishes: fields of a chat completion's request, such as ``max_tokens`` or ``stop``.

    Raises:
      ValueError: without a turn.

    Example:
      >>> Conversation([("system", "Be brief."), ("user", "Why?")]).query
      'Why?'
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

    @property
    def query(self) -> str:
        """The last turn."""
        return self.turns[-1][1]

    def asking(self, query: str) -> "Conversation":
        """The same with another last turn."""
        return Conversation([*self.turns[:-1], (self.turns[-1][0], query)], self.wishes)


def last_turn(query: str) -> str:
    """A query without the turns before it, if it has any."""
    return query.query if isinstance(query, Conversation) else query
