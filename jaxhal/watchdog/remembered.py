"""The last answers that went out, which feedback may name."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from jaxhal.watchdog.agents import Reply
from jaxhal.watchdog.conversation import Conversation

# Of the last answers that feedback may name.
_KEPT = 10_000
# And of how many characters, conversations included.
_CHARACTERS = 100_000_000


class Given(NamedTuple):
    """An answer that feedback may name, and the points that its verdict named."""

    query: str
    reply: Reply
    named: list[str]

    @property
    def characters(self) -> int:
        return len(self.query) + len(self.reply.text) + len(self.reply.context)


class Remembered:
    """Answers by name, and how often each text was ``said``; one of them always was."""

    def __init__(self, always: str):
        self.said = collections.Counter([always.strip()])
        self._given: collections.OrderedDict[str, Given] = collections.OrderedDict()
        self._characters = 0

    def __getitem__(self, name: str) -> Given:
        return self._given[name]

    def add(self, name: str, query: str, reply: Reply, named: Sequence[str]) -> None:
        """Keeps an answer, and forgets the oldest ones where there are too many."""
        if isinstance(query, Conversation):
            query = Conversation(query.turns)  # its wishes were the answer's
        self._given[name] = given = Given(query, reply, [*named])
        self._characters += given.characters
        self.said[reply.text.strip()] += 1
        while len(self._given) > _KEPT or self._characters > _CHARACTERS:
            _, old = self._given.popitem(last=False)
            self._characters -= old.characters
            said = old.reply.text.strip()
            self.said[said] -= 1
            if not self.said[said]:
                del self.said[said]
