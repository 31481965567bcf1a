"""Questions with a reference answer, for systems that answer themselves."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Question:
    """Something to ask, and what a right answer says.

    Args:
      text: the question, not empty.
      answer: a reference answer, not empty.
      domain: the topic it belongs to.
      id: a name.
      context: a text it is about, if it is about one.

    Raises:
      ValueError: when ``text`` or ``answer`` is empty.

    >>> Question("Capital of France?", "Paris", domain="geography").answer
    'Paris'
    """

    text: str
    answer: str
    domain: str = ""
    id: str = ""
    context: str | None = None

    def __post_init__(self):
        for name in ("text", "answer"):
            if not getattr(self, name).strip():
                where = f"question {self.id!r}: " if self.id else ""
                raise ValueError(
                    f"{where}{name} is {getattr(self, name)!r}; it must hold text"
                )
