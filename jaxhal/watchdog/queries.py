"""Query generation agents: a query made of another, in one of three ways."""

import dataclasses
import re

from jaxhal.watchdog.agents import Agent, Reply

_ASK = """\
Here is a question about {domain}:

{query}

{wish} Reply with the question alone.
"""
#: What an agent is told to make of a query, by the name of the way.
WISHES = {
    "deduction": "Write one more specific question that follows from it: about a part, "
    "a case, a cause or a detail of what it asks for.",
    "analogy": "Write one question that asks the same of something alike: a "
    "counterpart, an opposite, or another thing that plays the same part.",
    "induction": "Write one more general question: about the class, the principle or "
    "the pattern that it is a case of.",
}
_TEMPERATURE = 0.7
# Characters of a query.
_LONGEST = 400
_QUOTED = re.compile(r"[\"“]([^\"“”]+\?)[\"”]")
_NUMBERED = re.compile(r"^(?:\d+[.)]|[-*•]|question:)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Generator:
    """Has an agent make queries of others, in ``attempts`` for one of use."""

    agent: Agent
    domain: str
    attempts: int = 3

    async def change(self, query: str, way: str) -> Reply:
        """A query changed in a way, one of :data:`WISHES`.

        The text is empty where nothing of use came back, with an error where nothing
        came.
        """
        asked = _ASK.format(domain=self.domain, query=query, wish=WISHES[way])
        (replies,) = await self.agent.respond([asked], self.attempts, _TEMPERATURE)
        errors = [one.error for one in replies if one.error is not None]
        texts = (usable(one.text, query) for one in replies if one.error is None)
        error = errors[0] if len(errors) == len(replies) else None
        return Reply(next(filter(None, texts), ""), error=error)


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
