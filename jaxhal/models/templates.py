"""The chat template of a checkpoint: what stands around the turns of a conversation.

A template is somebody else's program: it is run once, on our own text, with limits.
"""

import contextlib
import datetime
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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
# What running a template may take.
_SECONDS = 10.0
_BYTES = 1 << 30
_REMEDY = (
    "write it into the prompt yourself and set templated=True "
    '(or "templated": true in the row)'
)


class Frame(NamedTuple):
    """What a template writes around the texts of turns, and what it trims off them."""

    pieces: tuple[str, ...] = ("", "")  # before, between and after the texts
    order: tuple[int, ...] = (0,)  # of the turns in what it writes
    left: tuple[bool, ...] = (False,)  # by turn, whether the space there is trimmed
    right: tuple[bool, ...] = (False,)

    def trim(self, turn: int, text: str) -> str:
        """The text of a turn as the template leaves it."""
        text = text.lstrip() if self.left[turn] else text
        return text.rstrip() if self.right[turn] else text


def frame(hf: Any, roles: Sequence[str] = ("user",)) -> Frame:
    """The frame of a tokenizer's chat template, up to where the answer begins.

    Raises:
      ValueError: when the template fails, takes too much, or more than trims a text.
    """
    order, pieces = _split(_filled(hf, roles, ""), roles)
    _, spaced = _split(_filled(hf, roles, _AROUND), roles)
    left, right = [False] * len(roles), [False] * len(roles)
    for at, (piece, wide) in enumerate(zip(pieces, spaced, strict=True)):
        # The space after the text before the piece, and before the text after it.
        ends, begins = ("",) if at == 0 else (_AROUND, ""), (_AROUND, "")
        begins = ("",) if at == len(order) else begins
        for end, begin in itertools.product(ends, begins):
            if end + piece + begin == wide:
                break
        else:
            raise ValueError(
                f"the chat template changes the space around a text; {_REMEDY}"
            )
        if at > 0:
            right[order[at - 1]] = not end
        if at < len(order):
            left[order[at]] = not begin
    return Frame(pieces, order, tuple(left), tuple(right))


def _text(turn: int) -> str:
    """What stands for the text of a turn."""
    return f"{_TEXT} {turn}."


def _split(
    written: str, roles: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The turns in the order of what a template wrote, and what is around them."""
    places = []
    for turn, role in enumerate(roles):
        text = _text(turn)
        if (count := written.count(text)) != 1:
            raise ValueError(
                f"the chat template shows the {role}'s text {count} times, not once; "
                f"{_REMEDY}"
            )
        places.append((written.index(text), turn, len(text)))
    pieces, last = [], 0
    for start, _, length in sorted(places):
        pieces.append(written[last:start])
        last = start + length
    return tuple(turn for _, turn, _ in sorted(places)), (*pieces, written[last:])


def _filled(hf: Any, roles: Sequence[str], around: str) -> str:
    """The turns in the template, with some space around each text."""
    turns = [
        {"role": role, "content": around + _text(turn) + around}
        for turn, role in enumerate(roles)
    ]
    template = hf.get_chat_template()  # the default one of several
    if "**" in template and _raises_powers(template):
        raise ValueError(f"the chat template computes powers; {_REMEDY}")
    try:
        with _limited(), _far_from_all():
            return hf.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=_DATED + template,
            )
    except Exception as error:  # a program of somebody else's raises what it does
        raise ValueError(
            f"the chat template cannot render turns of {', '.join(roles)} "
            f"({error!r}); {_REMEDY}"
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
    """Ends what runs too long or takes too much memory, between two of its steps."""
    ends, most = time.monotonic() + _SECONDS, _most_memory() + _BYTES

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > ends:
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
