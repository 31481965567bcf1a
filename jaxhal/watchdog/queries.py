"""Query generation agents: a query made of another, in one of three ways."""

import dataclasses
import re
from collections.abc import Sequence

from jaxhal.watchdog.agents import Agent, Reply

#: What an agent is told to make of a query, by the name of the way.
PROMPTS = {
    "deduction": """\
Here is a question about {domain}:

{query}

Write one more specific question that follows from it: about a part, a case, a cause \
or a detail of what it asks for. Reply with the question alone.
""",
    "analogy": """\
Here is a question about {domain}:

{query}

Write one question that asks the same of something alike: a counterpart, an opposite, \
or another thing that plays the same part. Reply with the question alone.
""",
    "induction": """\
Here is a question about {domain}:

{query}

Write one more general question: about the class, the principle or the pattern that it \
is a case of. Reply with the question alone.
""",
}
# Characters of a query.
_LONGEST = 400
_QUOTED = re.compile(r"[\"“]([^\"“”]+\?)[\"”]")
_NUMBERED = re.compile(r"^(?:\d+[.)]|[-*•]|question:)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Generator:
    """Has an agent make queries of others, in ``attempts`` for one of use."""

    agent: Agent
    domain: str
    temperature: float = 0.7
    attempts: int = 3

    async def change(self, queries: Sequence[str], ways: Sequence[str]) -> list[Reply]:
        """Each query changed in its way, one of :data:`PROMPTS`.

        The text is empty where nothing of use came back, with an error where nothing
        came.
        """
        asked = [
            PROMPTS[way].format(domain=self.domain, query=query)
            for query, way in zip(queries, ways, strict=True)
        ]
        replies = await self.agent.respond(asked, self.attempts, self.temperature)
        return [
            self._best(query, some)
            for query, some in zip(queries, replies, strict=True)
        ]

    def _best(self, query: str, replies: Sequence[Reply]) -> Reply:
        texts = (usable(one.text, query) for one in replies if one.error is None)
        if found := next(filter(None, texts), ""):
            return Reply(found)
        failures = [one.error for one in replies if one.error is not None]
        return Reply("", error=failures[0] if len(failures) == len(replies) else None)


def usable(text: str, query: str) -> str:
    """The query in what an agent wrote, empty where there is none of use.

    It is the first line that ends in a question mark, or what stands between quotes
    there, without a number before it; the query that it was made of is none.
    """
    for line in text.splitlines():
        quoted = _QUOTED.search(line)
        line = quoted[1] if quoted else line
        found = _NUMBERED.sub("", line.strip().strip("\"'“”*").strip()).strip("\"'“”* ")
        if found.endswith("?") and plain(found) and len(found) <= _LONGEST:
            return "" if plain(found) == plain(query) else found
    return ""


def plain(query: str) -> str:
    """A query without what does not matter: letters and digits in lower case."""
    return " ".join(re.findall(r"\w+", query.lower()))
