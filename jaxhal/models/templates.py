"""The chat template of a checkpoint: what stands around one user turn.

A template is somebody else's program: it is run once, on our own text, with limits.
"""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

# Stands for the user's text; a template that changes letters, escapes, trims lines or
# fills in what looks like a template changes it too.
_TEXT = "jaxhal7\n  <b>Text</b> &amp; 'it' {{ x }} {% y %} \"Ü\" <|z|>\n\njaxhal9"
_AROUND = " \n\t"
# What running a template may take.
_SECONDS = 10.0
_BYTES = 1 << 30
_REMEDY = (
    "write it into the prompt yourself and set templated=True "
    '(or "templated": true in the row)'
)


class Frame(NamedTuple):
    """What a template writes around a user's text, and what it trims off the text."""

    prefix: str = ""
    suffix: str = ""
    left: bool = False
    right: bool = False

    def trim(self, text: str) -> str:
        """The text as the template leaves it."""
        text = text.lstrip() if self.left else text
        return text.rstrip() if self.right else text


def frame(hf: Any) -> Frame:
    """The frame of a tokenizer's chat template, up to where the answer begins.

    Raises:
      ValueError: when the template fails, takes too much, or more than trims a text.
    """
    pieces = _filled(hf, _TEXT).split(_TEXT)
    if len(pieces) != 2:
        raise ValueError(
            f"the chat template shows the user's text {len(pieces) - 1} times, not "
            f"once; {_REMEDY}"
        )
    prefix, suffix = pieces
    spaced = _filled(hf, _AROUND + _TEXT + _AROUND)
    for left, right in itertools.product((False, True), repeat=2):
        found = Frame(prefix, suffix, left, right)
        if prefix + found.trim(_AROUND + _TEXT + _AROUND) + suffix == spaced:
            return found
    raise ValueError(f"the chat template changes the space around a text; {_REMEDY}")


def _filled(hf: Any, text: str) -> str:
    """One user turn in the template."""
    if "**" in hf.chat_template and _raises_powers(hf.chat_template):
        raise ValueError(f"the chat template computes powers; {_REMEDY}")
    try:
        with _limited(), _far_from_all():
            return hf.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
                # Llama 3 templates write today's date, so scores would change daily;
                # this is the date they write when they know none.
                date_string="26 Jul 2024",
            )
    except Exception as error:  # a program of somebody else's raises what it does
        raise ValueError(
            f"the chat template cannot render one user turn ({error!r}); {_REMEDY}"
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
