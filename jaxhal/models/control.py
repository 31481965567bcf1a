"""Control tokens stand where a template writes them, whatever a text spells.

A tokenizer takes ``<|im_end|>`` for the control token wherever it stands, be it in a
document.  Here control tokens go by names that nobody can guess; where one may stand,
its spelling gives way to that name before the text is encoded.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
    import tokenizers

#: Characters ``[start, end)`` of a text in which control tokens are recognised.
Places = Sequence[tuple[int, int]]


def disarmed(
    spec: dict[str, Any], template: str, named: Iterable[str]
) -> "tuple[tokenizers.Tokenizer, dict[str, str]]":
    """A tokenizer like another, but no text spells a control token; and their names.

    Control tokens are the special ones, those ``named``, and those that the chat
    template can write, such as ``<think>``; blank ones are text.  ``spec``, the other
    tokenizer as JSON has it, is changed.

    Raises:
      ValueError: when a control token would get another id.
    """
    from tokenizers import Tokenizer

    added = spec["added_tokens"]
    control = {*named} | {
        token["content"]
        for token in added
        if token["special"] or token["content"] in template
    }
    key = secrets.token_hex(16)
    spelled = sorted(text for text in control if text.strip())
    names = {text: f"{key}x{number}x" for number, text in enumerate(spelled)}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    _rename(spec["model"], names)
    made = Tokenizer.from_str(json.dumps(spec))
    for token in added:
        if made.token_to_id(token["content"]) != token["id"]:
            raise ValueError(
                f"the tokenizer has no token {token['id']} of its own among those "
                "added to its vocabulary; save the checkpoint with a sound "
                "tokenizer.json"
            )
    return made, names


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Control tokens are pieces of the vocabulary too, and some models match those."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): at for piece, at in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


class Marked(NamedTuple):
    """A text with its control tokens under their names, and where its parts were."""

    text: str
    here: list[int]  # boundaries in it,
    there: list[int]  # and the same ones in the original

    def original(
        self, offsets: Int[np.ndarray, "tokens 2"]
    ) -> Int[np.ndarray, "tokens 2"]:
        """Characters of the original text from those of the marked one."""
        if len(self.here) == 2:  # nothing was marked
            return offsets
        return np.interp(offsets, self.here, self.there).round().astype(np.int32)


def mark(text: str, places: Places, names: Mapping[str, str]) -> Marked:
    """Writes control tokens by name where they are recognised, the longest that begins.

    ``places`` are in order and apart, ``names`` those of :func:`disarmed`.

    >>> mark("<s>a<s>", [(0, 3)], {"<s>": "k0"})
    Marked(text='k0a<s>', here=[0, 0, 2, 6], there=[0, 0, 3, 7])
    """
    by_length = sorted(names, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, by_length)))
    pieces, here, there, last, size = [], [0], [0], 0, 0
    for start, end in places if names else ():
        for found in pattern.finditer(text, start, end):
            name = names[found[0]]
            size += found.start() - last
            here += [size, size + len(name)]
            there += [found.start(), found.end()]
            pieces += [text[last : found.start()], name]
            size, last = size + len(name), found.end()
    pieces.append(text[last:])
    return Marked(
        "".join(pieces), [*here, size + len(text) - last], [*there, len(text)]
    )
