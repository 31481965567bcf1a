"""A text encoder as a pytree: ``TextEncoder(params, graphdef)`` with its tokenizer."""

import copy
import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxhal.models import registry
from jaxhal.models.control import mark
from jaxhal.models.encoders import hhem
from jaxhal.models.encoders.config import EncoderConfig, read_encoder_config
from jaxhal.models.encoders.weights import load_encoder_weights
from jaxhal.models.lm import check_dtype
from jaxhal.models.settings import Settings, read_json
from jaxhal.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers


class Framed(NamedTuple):
    """A text that may be cut in its middle, and what always stands around it.

    Control tokens are recognised in its first ``control`` characters.
    """

    before: str
    middle: str
    after: str = ""
    control: int = 0

    @classmethod
    def of(cls, template: str, premise: str, hypothesis: str) -> "Framed":
        """A template of both, in which the premise may be cut.

        Control tokens are those that it begins with, before any of the two.
        """
        before, _, after = template.partition("{premise}")
        control = len(before.partition("{hypothesis}")[0])
        filled = (part.replace("{hypothesis}", hypothesis) for part in (before, after))
        return cls(next(filled), premise, next(filled), control)

    def around(self, part: str) -> str:
        """The text with another middle."""
        return f"{self.before}{part}{self.after}"


class TextTokenizer(Tokenizer):
    """A tokenizer that adds special tokens and cuts what is too long into windows."""

    def __init__(self, hf: Any):
        super().__init__(hf)
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

        ValueError where that leaves no room.
        """
        encoding = self._encode(text)
        room = self._room(length, False)
        count = max(1, len(encoding))
        encoding.truncate(math.ceil(count / math.ceil(count / room)))
        pieces = [encoding, *encoding.overflowing]
        return [self._whole.post_process(piece) for piece in pieces]

    def _room(self, length: int, pair: bool) -> int:
        """Tokens that ``length`` leaves to texts, each of which needs one."""
        added = self._whole.num_special_tokens_to_add(pair)
        if length - added < 1 + pair:
            raise ValueError(
                f"length is {length}, and the encoder adds {added} tokens of its own; "
                f"give at least {added + 1 + pair}"
            )
        return length - added

    def pair_windows(
        self, first: str, second: str, length: int, cut: bool
    ) -> "list[list[tokenizers.Encoding]]":
        """A pair, in windows that overlap by a quarter if need be.

        The longer text is cut; both are, each to half of the room, where the shorter
        would leave the other less than a quarter of it.  For each window of the second
        text there are those of the first together with it.

        Raises:
          ValueError: naming both lengths when the pair is too long and must not be cut,
            or where ``length`` leaves no room.
        """
        a, b = self._encode(first), self._encode(second)
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        room = self._room(length, True)
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

    def framed_windows(
        self, text: Framed, second: str | None, length: int
    ) -> "list[tokenizers.Encoding]":
        """A text, or a pair, in windows over the middle of the first.

        They overlap by a quarter, and each has the whole second text.

        Raises:
          ValueError: when what must stand in each window leaves less than an eighth of
            it to the middle, naming its length.
        """
        last = None if second is None else self._encode(second)

        def whole(part: str) -> "tokenizers.Encoding":
            marked = mark(text.around(part), [(0, text.control)], self._control)
            return self._whole.post_process(self._encode(marked.text), last)

        uncut = whole(text.middle)
        if len(uncut) <= length:
            return [uncut]
        room = left = length - len(whole(""))
        _, offsets = self.encode_with_offsets(text.middle)
        while room >= max(1, length // 8):
            shared = room // 4
            starts = range(0, max(1, len(offsets) - shared), room - shared)
            spans = [(offsets[at, 0], offsets[at:][:room][-1, 1]) for at in starts]
            windows = [whole(text.middle[start:end]) for start, end in spans]
            over = max(map(len, windows)) - length
            if over <= 0:
                return windows
            room -= over  # a part may have more tokens beside other text
        raise ValueError(
            f"what is asked takes {length - left} tokens of the encoder's {length}, "
            f"and its source has {len(offsets)}; shorten the answer"
        )


class Pooling(NamedTuple):
    """How token vectors become one, and whether it gets unit length."""

    how: Literal["cls", "mean"]
    normalize: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """A text encoder as data: parameters are leaves, everything else is static.

    ``params`` is an ``nnx`` state whose blocks are stacked over layers, ``pooling``
    says how one vector is made of a text's, ``None`` when unknown.
    """

    params: Any
    graphdef: Any = dataclasses.field(metadata={"static": True})
    config: EncoderConfig = dataclasses.field(metadata={"static": True})
    tokenizer: TextTokenizer = dataclasses.field(metadata={"static": True})
    pooling: Pooling | None = dataclasses.field(default=None, metadata={"static": True})
    name: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits; () without a classifier."""
        return self.config.labels

    def reading(self, length: int) -> "TextEncoder":
        """The same, but for how many tokens it reads together.

        ValueError where it knows fewer positions.
        """
        known = self.config.context_length
        if self.config.position_rows and length > known or length < 1:
            raise ValueError(
                f"length is {length}, and encoder {self.name!r} reads up to {known} "
                "tokens; give no more than that, or leave it out"
            )
        config = dataclasses.replace(self.config, context_length=length)
        return dataclasses.replace(self, config=config)


def load_encoder(
    source: str | os.PathLike,
    *,
    dtype: Any = jnp.float32,
    pooling: Literal["cls", "mean"] | None = None,
) -> TextEncoder:
    """Loads a text encoder with its tokenizer.

    That is BERT, RoBERTa, DeBERTa (v2, v3), ModernBERT, EuroBERT or the encoder of a T5
    whose perceptrons are gated (v1.1, FLAN), as HHEM-2.1-Open is.

    Args:
      source: a registry name, a folder with config.json and safetensors, or a Hugging
        Face hub id.  A folder comes first.
      dtype: of the parameters, ``float32`` or ``bfloat16``; softmax, norms and
        probabilities are float32 in both.
      pooling: how one vector is made of a text's, from the first token or as the mean;
        what the folder says when left out.

    Raises:
      ValueError: on an unknown name, architecture, setting or pooling, or on weights
        that are cut short, of the wrong shape or not finite.
      FileNotFoundError: when config.json, weights or the tokenizer are missing.
    """
    check_dtype(dtype)
    folder = registry.locate(source, "encoder")
    config = read_encoder_config(folder)
    words = folder
    if config.foundation:
        words = hhem.tokenizer_folder(source, folder, config.foundation)
    tokenizer = TextTokenizer(Tokenizer.from_folder(words).hf)
    tokenizer.check_ids(config.vocab_size, str(folder))
    found = _read_pooling(folder, pooling)
    graphdef, params = load_encoder_weights(folder, config, dtype)
    return TextEncoder(params, graphdef, config, tokenizer, found, str(source))


def _read_pooling(folder: Path, how: Any) -> Pooling | None:
    """What the files of a sentence encoder say, ``how`` instead of theirs if given."""
    if how not in (None, "cls", "mean"):
        raise ValueError(f"pooling is {how!r}; use 'cls' or 'mean'")
    path, kinds = folder / "modules.json", []
    if path.is_file():
        modules = read_json(path)
        if not isinstance(modules, list):
            raise ValueError(f"{path} holds no list; download it again")
        named = [Settings(each, str(path)).get("type") for each in modules]
        kinds = [str(kind).rpartition(".")[2] for kind in named]
        more = [k for k in kinds if k not in ("Transformer", "Pooling", "Normalize")]
        if more:
            raise ValueError(f"{path} has {more[0]}, not computed here")
    path = folder / "1_Pooling" / "config.json"
    if how is None and path.is_file():
        modes = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
        raw = Settings(read_json(path), str(path))
        asked = [k for k in raw if k.startswith("pooling_mode_") and raw[k] is True]
        if len(asked) != 1 or asked[0] not in modes:
            raise ValueError(
                f"{path} asks for {' and '.join(asked) or 'no pooling'}; one of "
                f"{' and '.join(modes)} is computed: choose with pooling="
            )
        how = modes[asked[0]]
    return None if how is None else Pooling(how, "Normalize" in kinds)
