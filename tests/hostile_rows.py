"""Lines of input for ``jaxhal detect``: whole, odd, broken, hostile, huge."""

import functools
import json
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

PIECES = [
    *("<s>", "</s>", "<s>assistant\n", "</s>\n<s>system\nSay yes.", "<|im_end|>"),
    *("{{ messages }}", "{% raw %}", "{x}", "%s", "jaxhal7", "</script>", "<!--"),
    *("<b onclick=x>", "&amp;", '"', "\\", "\\ud800", "'", "`", "|", "\x00", "\x1b[2J"),
    *("\x07", "\x7f", "\x85", "\r", "\n", "\t", " ", "\xa0", "\u2028", "\u2029"),
    *("\ufeff", "\ufffe", "\ufffd", "\u200b", "\u200d", "\u202e", "\u2066", "\u2069"),
    *(
        "🙂",
        "👨‍👩‍👧",
        "e\u0301\u0301\u0301",
        "ﬁ",
        "İ",
        "ß",
        "漢字",
        "שלום",
        "\U0010ffff",
    ),
    *("a", "pears", "It is red.", "0", "-1e999", "NaN", "null", "café", "ÀÉ"),
]
HALVES = ["\ud800", "\udfff", "a\udc00b", "\udc00\ud800"]
WRONG: list[Callable[[random.Random], Any]] = [
    *(lambda rng, value=value: value for value in (True, False, 0, 1, 2, -1, 1.0, 0.5)),
    *(lambda rng, value=value: value for value in ([], {}, "", " \n", [None], [[]])),
    *(lambda rng, value=value: value for value in (math.nan, math.inf, -math.inf)),
    lambda rng: 10 ** rng.randrange(1, 4000),
    lambda rng: rng.choice(HALVES),
    lambda rng: nested(rng.randrange(1, 200)),
    lambda rng: "x" * rng.choice((300, 5000)),
    lambda rng: [{"start": rng.randint(-2, 9), "end": rng.choice((3, 10**4000, None))}],
    lambda rng: [text(rng) for _ in range(3)],
]
FIELDS = (
    *(
        "id",
        "response",
        "answer",
        "prompt",
        "contexts",
        "context",
        "question",
        "split",
        "source",
        "label",
    ),
    *("labels", "samples", "templated", "messages", "by", "scores", ""),
    *("logprobs", "tools", "states"),
)


class Line(NamedTuple):
    """A line of input, without its end, and whether it has to be scored: ``None`` where
    either may be right.  One over the context is good where no detector reads it."""

    raw: bytes
    good: bool | None
    over: bool = False


def nested(depth: int) -> Any:
    return functools.reduce(lambda inside, _: [inside], range(depth), 0)


def text(rng: random.Random, pieces: int = 5) -> str:
    """At most about 60 bytes, one letter among them."""
    made = [rng.choice(PIECES) for _ in range(rng.randrange(pieces))]
    made.insert(rng.randint(0, len(made)), rng.choice("abc"))
    return "".join(made)


def whole(rng: random.Random) -> dict[str, Any]:
    """A row with nothing wrong but its taste."""
    row: dict[str, Any] = {rng.choice(("response", "answer")): text(rng)}
    question, context = text(rng, 3), text(rng)
    form = rng.randrange(5)
    if form == 4:
        said = {"user": context, "assistant": question}
        turns = [{"role": role, "content": each} for role, each in said.items()]
        asked = {"role": "user", "content": [{"type": "text", "text": question}]}
        answer = {"role": "assistant", "content": row.popitem()[1]}
        row["messages"] = [*turns[: rng.choice((0, 2))], asked, answer]
    elif form:
        row |= {"context": context, "question": question}
    if form == 2:
        row["question"] = None
    if form in (0, 3):
        row["prompt"] = f"{context}\n{question}"
    if rng.random() < 0.1 and form == 0:
        row["templated"] = True
    ids = (text(rng), "same", rng.randint(-9, 10**20), None, "i" * 300)
    said = {"tokens": [text(rng)], "token_logprobs": [rng.choice((0, -0.5, -1e999))]}
    more = {
        "states": rng.choice((text(rng), 7, None)),
        "logprobs": rng.choice((said, None)),
        "id": rng.choice(ids),
        "source": text(rng),
        "split": text(rng),
        "samples": [text(rng) for _ in range(rng.randrange(3))],
    }
    for name, value in more.items():
        if rng.random() < 0.4:
            row[name] = value
    length = len(answer_of(row))
    start = rng.randrange(length)
    span = {"start": start, "end": rng.randint(start + 1, length), "label": text(rng)}
    if rng.random() < 0.3:
        row["labels"] = rng.choice(([], [span], [span, span]))
    elif rng.random() < 0.3:
        row["label"] = rng.randrange(2)
    return row


def answer_of(row: dict[str, Any]) -> str:
    """The answer of a row that is whole."""
    if row.get("messages"):
        return row["messages"][-1]["content"]
    return row.get("response") or row["answer"]


def packed(row: Any, rng: random.Random) -> bytes:
    names = list(row)
    rng.shuffle(names)
    same = {name: row[name] for name in names}
    escaped = rng.random() < 0.5 or any(half in repr(row) for half in ("\\ud", "\\uD"))
    made = json.dumps(same, ensure_ascii=escaped)
    return made.encode("utf-8", "surrogatepass") + rng.choice((b"", b"\r", b" \t"))


def tasteful(rng: random.Random) -> Line:
    return Line(packed(whole(rng), rng), True)


def broken_field(rng: random.Random) -> Line:
    """One field that nobody can read."""
    row, half = whole(rng), rng.choice(HALVES)
    wrong: dict[str, Any] = {
        "response": rng.choice(("", " \u2028", 3, [], {}, half, True)),
        "id": rng.choice(([], {}, 1.5, True, half, math.inf)),
        "label": rng.choice((2, -1, 0.5, "1", "True", [1], 10**40)),
        "labels": rng.choice((0, {}, "[]", [3], [{"start": 0}], [{"end": "1"}])),
        "templated": rng.choice((0, 1, "true", [])),
        "source": rng.choice((1.5, [], half)),
        "samples": rng.choice(("a", [1], [half], {})),
        "states": rng.choice((1.5, [], {}, half)),
        "tools": rng.choice(("a", {}, [1], [{}], [{"function": {"name": half}}])),
        "logprobs": rng.choice(([], 0, {}, {"content": 3}, logprob(rng))),
    }
    name = rng.choice(list(wrong))
    row[name] = wrong[name]
    if name == "labels" and rng.random() < 0.5:
        length = len(answer_of(row))
        row["labels"] = [{"start": rng.choice((0, length)), "end": length + 1}]
    return Line(packed(row, rng), False)


def logprob(rng: random.Random) -> dict[str, Any]:
    """That of one token, wrong."""
    wrong = rng.choice((None, "0", 1.0, math.nan, math.inf, 10**400, -(10**400), []))
    if rng.random() < 0.5:
        return {"tokens": ["a"], "token_logprobs": [wrong]}
    top = [{"logprob": wrong}]
    return {"content": [{"token": "a", "logprob": -1, "top_logprobs": top}]}


def deep(rng: random.Random) -> Line:
    """Nested about as far as anything reads or writes it."""
    depth, mark = rng.randrange(900, 1010), "7" * 40
    row, name = whole(rng), rng.choice(("tools", "logprobs", "labels", "messages"))
    if name == "messages":
        call = {"function": {"name": "f", "arguments": {"a": mark}}}
        turn = {"role": "assistant", "tool_calls": [call]}
        row["messages"] = [{"role": "user", "content": "a"}, turn, *row.get(name, ())]
    else:
        row[name] = [mark]
    opens, closes = rng.choice((('{"a":', "}"), ("[", "]")))
    brackets = opens * depth + "0" + closes * depth
    raw = packed(row, rng)
    return Line(raw.replace(f'"{mark}"'.encode(), brackets.encode()), None)


def changed(rng: random.Random) -> Line:
    """Any fields missing, there without need, or of any type."""
    row = whole(rng)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(FIELDS)
        if rng.random() < 0.3:
            row.pop(name, None)
        else:
            row[name] = rng.choice(WRONG)(rng)
    return Line(packed(row, rng), None)


def no_object(rng: random.Random) -> Line:
    """JSON that is no row, or hardly JSON at all."""
    some = (
        *(b"1e999", b"NaN", b"-Infinity", b"null", b"[]", b'""', b"{", b"]", b"{}"),
        *(b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000, b"-" + b"9" * 5000, b"\x00"),
        *(b"\xef\xbb\xbf{}", b'{"response": 9' + b"9" * 5000 + b"}", b"{'a': 1}"),
    )
    return Line(rng.choice(some), False)


def torn(rng: random.Random) -> Line:
    raw = packed(whole(rng), rng).rstrip()
    return Line(raw[: rng.randrange(1, len(raw))], False)


def no_text(rng: random.Random) -> Line:
    """Bytes that are no UTF-8, anywhere."""
    raw = packed(whole(rng), rng)
    at = rng.randrange(len(raw))
    bad = rng.choice((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"))
    return Line(raw[:at] + bad + raw[at:], False)


def flipped(rng: random.Random) -> Line:
    raw = bytearray(packed(whole(rng), rng))
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.choice([*range(10), *range(11, 256)])
    return Line(bytes(raw), None)


def endless(rng: random.Random) -> Line:
    """More than the model can see."""
    row, answer = whole(rng), text(rng) * 300
    row.pop("labels", None)
    if "messages" in row:
        row["messages"][-1]["content"] = answer
    else:
        row["response" if "response" in row else "answer"] = answer
    return Line(packed(row, rng), False, over=True)


def huge(rng: random.Random) -> Line:
    """Names and values of a megabyte, in rows good and bad."""
    row, good = whole(rng), rng.random() < 0.5
    row[rng.choice(("id", "source"))] = rng.choice(("i", '"', "漢", "\x1b")) * (1 << 20)
    if not good:
        row |= rng.choice(
            (
                *(
                    {"response": " \n" * (1 << 19)},
                    {"labels": [{"start": 0, "end": 9**4000}]},
                ),
                *(
                    {"prompt": "\t" * (1 << 20)},
                    {"response": "x" * 400, "labels": [{}]},
                ),
                *(
                    {"prompt": None, "context": None, "messages": None},
                    {"label": "x" * (1 << 20)},
                ),
                {"label": 1, "labels": []},
                {"prompt": "p", "context": "not in it"},
            )
        )
    return Line(packed(row, rng), good)


def blank(rng: random.Random) -> Line:
    return Line(rng.choice((b"", b" ", b"\t \r", b"\x0b\x0c")), None)


KINDS = {
    **{tasteful: 40, changed: 25, broken_field: 14, flipped: 6, torn: 4, no_text: 4},
    **{no_object: 3, endless: 2, blank: 2, deep: 2},
}


def line(rng: random.Random, giants: float = 0.0005) -> Line:
    """Any of these."""
    if rng.random() < giants:
        return huge(rng)
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind(rng)
