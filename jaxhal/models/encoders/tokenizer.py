"""Texts and pairs of texts to tokens as an encoder reads them."""

import copy
import math
from typing import TYPE_CHECKING, Any

from jaxhal.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers


class TextTokenizer(Tokenizer):
    """A tokenizer that adds special tokens and cuts what is too long into windows."""

    def __init__(self, hf: Any):
        super().__init__(hf, chat=False)
        self._whole: tokenizers.Tokenizer = copy.deepcopy(hf.backend_tokenizer)
        self._whole.no_truncation()
        self._whole.no_padding()

    def check_ids(self, size: int, where: str) -> None:
        """As that of :class:`Tokenizer`; also what is put around texts and pairs."""
        super().check_ids(size, where)
        for around in (self._whole.encode(""), self._whole.encode("", "")):
            if max(around.ids, default=0) >= size:
                raise ValueError(
                    f"{where}: the tokenizer puts a token {max(around.ids)} around "
                    f"texts and the model knows those below {size}; download both "
                    "together again"
                )

    def windows(self, text: str, length: int) -> "list[tokenizers.Encoding]":
        """A text in pieces of about equal size, as many as ``length`` asks for.

        Raises:
          ValueError: on a lone surrogate.
        """
        encoding = self._encode(text)
        room = length - self._whole.num_special_tokens_to_add(False)
        count = max(1, len(encoding))
        encoding.truncate(math.ceil(count / math.ceil(count / room)))
        pieces = [encoding, *encoding.overflowing]
        return [self._whole.post_process(piece) for piece in pieces]

    def pair_windows(
        self, first: str, second: str, length: int, cut: bool = True
    ) -> "list[list[tokenizers.Encoding]]":
        """A pair, in windows that overlap by a quarter if need be.

        The longer text is cut; both are, each to half of the room, where the shorter
        would leave the other less than a quarter of it.

        Returns:
          For each window of the second text, those of the first together with it.

        Raises:
          ValueError: on a lone surrogate, and naming both lengths when the pair is too
            long and must not be cut.
        """
        a, b = self._encode(first), self._encode(second)
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        room = length - self._whole.num_special_tokens_to_add(True)
        left = room - len(shorter)
        if len(longer) > left:
            if not cut:
                raise ValueError(
                    f"texts of {len(a)} and {len(b)} tokens are over the encoder's "
                    f"{room} for a pair; shorten them, or take a classifier with a "
                    "label 'entailment', which is read in windows"
                )
            if left < room / 4:
                left = room // 2
                shorter.truncate(left, stride=left // 4)
            longer.truncate(left, stride=left // 4)
        # Joined one by one: processed together, the pieces of a second text beyond the
        # first would get the token types of a first text.
        return [
            [self._whole.post_process(piece, part) for piece in [a, *a.overflowing]]
            for part in [b, *b.overflowing]
        ]
