"""The chat template of a checkpoint: what stands around the turns of a conversation.

A template is somebody else's program: it is run once, on our own text, with limits.
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from jaxhal.io.showing import quoted
from jaxhal.types import Call, Turn

# Stands for the user's text; a template that changes letters, escapes, trims lines or
# fills in what looks like a template changes it too.
_TEXT = "jaxhal7\n  <b>Text</b> &amp; 'it' {{ x }} {% y %} \"Ü\" <|z|>\n\njaxhal9"
_AROUND = " \n\t"
# Some templates write today's date, so scores would change daily; this is the one that
# Llama 3 templates write when they know none.
_TODAY = datetime.datetime(2024, 7, 26)
_WRITTEN = {f"%{code}": _TODAY.strftime(f"%{code}") for code in "aAbBdjmyYHIMSp"}
_DATED = "{% macro strftime_now(form) %}{{ form"
_DATED += "".join(f" | replace('{code}', '{_WRITTEN[code]}')" for code in _WRITTEN)
_DATED += " }}{% endmacro %}"
# What running a template may take.  Limits are the process's, so one runs at a time.
_SECONDS = 10.0
_BYTES = 1 << 30
_ALONE = threading.Lock()
_REMEDY = (
    "write it into the prompt yourself and set templated=True "
    '(or "templated": true in the row)'
)


class Frame(NamedTuple):
    """What a template writes around the texts of turns, and what it trims off them."""

    pieces: tuple[str, ...] = ("", "")  # before, between and after the texts
    order: tuple[int, ...] = (0,)  # of the turns in what it writes
    # By turn, what is trimmed there, as str.strip takes it: None is all space.
    left: tuple[str | None, ...] = ("",)
    right: tuple[str | None, ...] = ("",)
    escaped: tuple[bool, ...] = (False,)  # by turn, whether it is spelled as in JSON

    def fill(self, turn: int, text: str) -> str:
        """The text of a turn as the template writes it."""
        text = text.lstrip(self.left[turn]).rstrip(self.right[turn])
        return spelled(text) if self.escaped[turn] else text


def outline(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns with what stands for their texts; all that a template is shown.

    A turn that only calls tools has no text: its content, if any, is space.
    """
    return tuple(
        turn if _silent(turn) else turn._replace(content=f"{_TEXT} {number}.")
        for number, turn in enumerate(turns)
    )


def spelled(text: str) -> str:
    """A text as JSON has it between quotes.

    >>> spelled('a "b"')
    'a \\\\"b\\\\"'
    """
    return json.dumps(text, ensure_ascii=False)[1:-1]


def frame(
    hf: Any,
    turns: Sequence[Turn],
    tools: Sequence[str] = (),
    control: Collection[str] = (),
) -> Frame:
    """The frame of a tokenizer's chat template, up to where the answer begins.

    Calls of tools and their definitions are parts of it.

    Args:
      turns: as :func:`outline` gives them.
      tools: their definitions, as JSON.
      control: control tokens, which calls and definitions may not spell.

    Raises:
      ValueError: when the template fails, takes too much, more than trims a text, or
        does not show a call or a definition; when one of these spells a control token.
    """
    written = _filled(hf, turns, tools, "")
    if tools or any(turn.calls or turn.call_id or turn.name for turn in turns):
        _check_tools(hf, written, turns, tools, control)
    forms = _forms(written, turns)
    order, pieces = _split(written, forms)
    escaped = tuple(
        form not in (None, turn.content)
        for form, turn in zip(forms, turns, strict=True)
    )
    left: list[str | None] = [""] * len(turns)
    right = [*left]
    for space, trimmed in ((_AROUND, None), ("\n", "\n")):
        wide = _filled(hf, turns, tools, space)
        _, spaced = _split(wide, _forms(wide, turns))
        around = [spelled(space) if each else space for each in escaped]
        for at, (end, begin) in enumerate(_kept(pieces, spaced, order, around)):
            if not end and at > 0 and right[order[at - 1]] == "":
                right[order[at - 1]] = trimmed
            if not begin and at < len(order) and left[order[at]] == "":
                left[order[at]] = trimmed
    return Frame(pieces, order, tuple(left), tuple(right), escaped)


def _kept(
    pieces: Sequence[str],
    spaced: Sequence[str],
    order: Sequence[int],
    around: list[str],
) -> Iterator[tuple[str, str]]:
    """By piece, what is left of the space after the text before it, and before the
    next one.
    """
    for at, (piece, wide) in enumerate(zip(pieces, spaced, strict=True)):
        ends = ("",) if at == 0 else (around[order[at - 1]], "")
        begins = ("",) if at == len(order) else (around[order[at]], "")
        for end, begin in itertools.product(ends, begins):
            if end + piece + begin == wide:
                yield end, begin
                break
        else:
            raise ValueError(
                f"the chat template changes the space around a text; {_REMEDY}"
            )


def _silent(turn: Turn) -> bool:
    return bool(turn.calls) and not turn.content.strip()


def _forms(written: str, turns: Sequence[Turn]) -> list[str | None]:
    """How each text is written, None where there is none; what tools gave may be JSON.

    Llama 3 writes those so.
    """
    found = []
    for turn in turns:
        forms = [] if _silent(turn) else [turn.content]
        if turn.role == "tool":
            forms.append(spelled(turn.content))
        there = [form for form in forms for _ in range(written.count(form))]
        if forms and len(there) != 1:
            raise ValueError(
                f"the chat template shows the {turn.role}'s text {len(there)} times, "
                f"not once; {_REMEDY}"
            )
        found.append(there[0] if there else None)
    return found


def _split(
    written: str, forms: Sequence[str | None]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The turns in the order of what a template wrote, and what is around them."""
    places = [
        (written.index(form), turn, len(form))
        for turn, form in enumerate(forms)
        if form is not None
    ]
    pieces, last = [], 0
    for start, _, length in sorted(places):
        pieces.append(written[last:start])
        last = start + length
    return tuple(turn for _, turn, _ in sorted(places)), (*pieces, written[last:])


def _check_tools(
    hf: Any,
    written: str,
    turns: Sequence[Turn],
    tools: Sequence[str],
    control: Collection[str],
) -> None:
    """Has the template write other calls and tools, with names that nothing else has.

    It has to show each of these, and the same control tokens as before.
    """
    longest = sorted(control, key=len, reverse=True)
    tokens = re.compile("|".join(map(re.escape, longest)) or "(?!)")
    others, definitions, missing = _renamed(turns, tools, _harmless(tokens, control))
    plain = _filled(hf, others, definitions, "")
    for name, problem in missing.items():
        if name not in plain:
            raise ValueError(f"the chat template does not show {problem}")
    pairs = itertools.zip_longest(tokens.findall(written), tokens.findall(plain))
    for one, other in pairs:
        if one != other:
            raise ValueError(
                "a call of a tool or its definition spells the control token "
                f"{quoted(one or other)}, which would count as one; leave it out"
            )


def _harmless(
    tokens: re.Pattern[str], control: Collection[str]
) -> Callable[[str], str]:
    """What leaves a text without control tokens, and without a sign of any."""
    signs = {sign for token in control for sign in token if not sign.isalnum()}
    table = str.maketrans(dict.fromkeys(signs - {"_", " ", "\n"}, "_"))
    return lambda text: tokens.sub("_", text).translate(table)


def _renamed(
    turns: Sequence[Turn], tools: Sequence[str], harmless: Callable[[str], str]
) -> tuple[list[Turn], list[str], dict[str, str]]:
    """Harmless turns and tools, and by new names what it says that one is not shown."""
    missing: dict[str, str] = {}

    def renamed(name: str, problem: str) -> str:
        name = f"{harmless(name)}jaxhal{len(missing)}x"
        missing[name] = problem
        return name

    def harmless_json(text: str) -> str:
        return re.sub(
            r'"(?:[^"\\]|\\.)*"',
            lambda found: json.dumps(harmless(json.loads(found[0]))),
            text,
        )

    def call_of(call: Call) -> Call:
        problem = (
            f"the call of {quoted(call.name)}; use a reader that was taught tools, "
            f"give what they gave as 'context', or {_REMEDY}"
        )
        name, arguments = renamed(call.name, problem), harmless_json(call.arguments)
        return Call(name, arguments, harmless(call.id))

    others = [
        turn._replace(
            calls=tuple(map(call_of, turn.calls)),
            call_id=harmless(turn.call_id),
            name=harmless(turn.name),
        )
        for turn in turns
    ]
    definitions = []
    for tool in tools:
        name = json.loads(tool)["function"]["name"]
        problem = (
            f"the tool {quoted(name)}; leave 'tools' out, or use a reader that was "
            "taught tools"
        )
        other = json.loads(harmless_json(tool))
        other.setdefault("function", {})["name"] = renamed(name, problem)
        definitions.append(json.dumps(other, ensure_ascii=False))
    return others, definitions, missing


def _message(turn: Turn, around: str) -> dict[str, Any]:
    """A turn as templates take it: arguments are objects, and what is empty lacks."""
    content = turn.content if _silent(turn) else around + turn.content + around
    calls = [
        {
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            **({"id": call.id} if call.id else {}),
        }
        for call in turn.calls
    ]
    more = {"tool_calls": calls, "tool_call_id": turn.call_id, "name": turn.name}
    more = {name: value for name, value in more.items() if value}
    return {"role": turn.role, "content": content, **more}


def _filled(hf: Any, turns: Sequence[Turn], tools: Sequence[str], around: str) -> str:
    """The turns in the template, with some space around each text."""
    messages = [_message(turn, around) for turn in turns]
    definitions = [json.loads(tool) for tool in tools] or None
    template = hf.get_chat_template(tools=definitions)  # the one of several
    if "**" in template and _raises_powers(template):
        raise ValueError(f"the chat template computes powers; {_REMEDY}")
    try:
        with _ALONE, _limited(), _far_from_all():
            return hf.apply_chat_template(
                messages,
                tools=definitions,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=_DATED + template,
            )
    except Exception as error:  # a program of somebody else's raises what it does
        raise ValueError(
            "the chat template cannot render turns of "
            f"{', '.join(turn.role for turn in turns)} ({error!r}); {_REMEDY}"
        ) from error


def _raises_powers(template: str) -> bool:
    """Whether it has the one operator that can take for ever by itself."""
    import jinja2

    with contextlib.suppress(jinja2.TemplateSyntaxError):  # which rendering will raise
        tokens = jinja2.Environment().lex(template)
        return any((kind, value) == ("operator", "**") for _, kind, value in tokens)
    return False


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends what runs too long or takes too much memory, between two of its steps.

    Seconds are those of this thread, however busy the machine is.
    """
    ends, most = time.thread_time() + _SECONDS, _most_memory() + _BYTES

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if time.thread_time() > ends:
            raise TimeoutError(f"it takes over {_SECONDS:.0f} seconds")
        if _most_memory() > most:
            raise MemoryError(f"it takes over {_BYTES >> 20} MiB")
        # Line by line in the template itself; elsewhere calls are often enough.
        return look if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def _far_from_all() -> Iterator[None]:
    """Has a single step that asks for all memory fail, where the system can do so."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    except (ModuleNotFoundError, OSError):
        yield
        return
    # Other threads have the same limit meanwhile, and need some of it.
    most = pages * os.sysconf("SC_PAGE_SIZE") + 4 * _BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lower = most if soft == resource.RLIM_INFINITY else min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _most_memory() -> int:
    """Bytes that this process has held at most; 0 where the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
