"""Query generation agents: a query made of another, in one of three ways."""

import dataclasses
import re
import unicodedata

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
# What ends a question, in any script (in Greek after a letter of its own); quotation
# marks; what begins a line.
_ENDS = "?？؟\u037e"
_ASKS = re.compile(rf"[{_ENDS}]$|[\u0370-\u03ff\u1f00-\u1fff]\s?;$")
_QUOTES = "\"'“”„«»‹›「」『』*"
_QUOTED = re.compile(rf"[\"“„«「『]([^\"“”„«»「」『』]+[{_ENDS};])[\"“”»」』]")
# Between two letters it joins words; elsewhere it and others say something.
_HYPHEN = re.compile(r"(?<=[^\W\d_])[-\u2010\u2011](?=[^\W\d_])")
_SIGNS = "-\u2010\u2011\u2013*/#%&@^"
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
        line = line.strip().strip(_QUOTES).strip()
        found = _NUMBERED.sub("", line).strip(f"{_QUOTES} ")
        if _ASKS.search(found) and plain(found) and len(found) <= _LONGEST:
            return "" if plain(found) == plain(query) else found
    return ""


def plain(query: str) -> str:
    """A query without what does not matter: letters, digits and signs in lower case.

    Empty where there is neither letter nor digit.

    >>> plain(" What's  3+5?"), plain("C++?"), plain("--")
    ('what s 3 + 5', 'c + +', '')
    """
    text = _HYPHEN.sub(" ", unicodedata.normalize("NFC", query.lower()))
    found = "".join(map(_kept, text)).split()
    return " ".join(found) if any(map(str.isalnum, "".join(found))) else ""


def _kept(letter: str) -> str:
    """A character of a word, with space around a sign, or space in its place."""
    kind = unicodedata.category(letter)
    if kind[0] in "LNM" or letter == "_":
        return letter
    return f" {letter} " if kind in ("Sm", "Sc", "So") or letter in _SIGNS else " "
