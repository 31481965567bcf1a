"""Text to tokens and back: chat templates, character spans, batches with a seam."""

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxhal.models import gguf_tokenizer
from jaxhal.models.batching import Encoded
from jaxhal.types import Example

if TYPE_CHECKING:
    import gguf
    import tokenizers

_SENTINEL = "jaxhal7sentinel7text"


class Rendered(NamedTuple):
    """A user's text inside the chat template; joined, the pieces are the prompt."""

    prefix: str
    text: str
    suffix: str


class Prompt(NamedTuple):
    """A whole prompt text and the ``(start, end)`` characters of its parts."""

    text: str
    user: tuple[int, int]
    document: tuple[int, int]
    question: tuple[int, int]


class Tokenizer:
    """A fast Hugging Face tokenizer that keeps track of characters.

    Args:
      hf: a ``transformers.PreTrainedTokenizerFast``; it is not changed.
      chat: put the user's text into the chat template, where there is one.
      stop_ids: tokens that end a response; by default the EOS token.

    Raises:
      ValueError: when ``hf`` is a slow tokenizer, which knows no offsets.
    """

    def __init__(
        self, hf: Any, chat: bool = True, stop_ids: Sequence[int] | None = None
    ):
        from tokenizers import processors

        if not getattr(hf, "is_fast", False):
            raise ValueError(
                f"{type(hf).__name__} is a slow tokenizer, which gives no character "
                "offsets; save the checkpoint with a tokenizer.json"
            )
        self.hf = hf
        self.chat = chat
        ends = (hf.eos_token_id,) if hf.eos_token_id is not None else ()
        self.stop_ids = ends if stop_ids is None else tuple(stop_ids)
        # Some checkpoints ship settings that cut long texts silently, pad short ones or
        # trim spaces off the offsets; this copy is free of all that.
        self._backend: tokenizers.Tokenizer = copy.deepcopy(hf.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.post_processor = processors.TemplateProcessing("$A", "$A $B:1")
        self._backend.encode_special_tokens = False

    @classmethod
    def from_folder(cls, path: str | os.PathLike, chat: bool = True) -> "Tokenizer":
        """The tokenizer saved in a checkpoint's folder; never reaches for the network.

        Raises:
          FileNotFoundError: when the folder holds no tokenizer file.
          ValueError: when its files make no fast tokenizer.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        folder = Path(path)
        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
        found = [name for name in names if (folder / name).is_file()]
        if not found:
            raise FileNotFoundError(
                f"no tokenizer in {folder}: looked for {', '.join(names)}; copy them "
                "beside the weights, or save a tokenizer.json made of other files, as "
                "spm.model, by transformers' AutoTokenizer"
            )
        # tokenizer.json is the tokenizer itself; the class that a checkpoint's config
        # names may rebuild it with other rules.
        whole = found[0] == "tokenizer.json"
        kind = PreTrainedTokenizerFast if whole else AutoTokenizer
        try:
            hf = kind.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises nothing more precise
            raise ValueError(
                f"{folder / found[0]} makes no fast tokenizer ({error!r}); save the "
                "checkpoint with a sound tokenizer.json"
            ) from error
        return cls(hf, chat, _stop_ids(folder))

    @classmethod
    def from_gguf(
        cls, source: "gguf.GGUFReader | str | os.PathLike", chat: bool = True
    ) -> "Tokenizer":
        """The tokenizer inside a GGUF file, given as a path or as an open reader.

        Raises:
          ValueError: on missing or unknown tokenizer metadata.
        """
        return cls(gguf_tokenizer.load(source), chat)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the files that :meth:`from_folder` reads."""
        self.hf.save_pretrained(path)

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence token, if there is one."""
        return self.hf.bos_token_id

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        return self.hf.eos_token_id

    @property
    def pad_id(self) -> int:
        """What fills the padding: the pad token, else EOS, else 0."""
        known = (self.hf.pad_token_id, self.eos_id, 0)
        return next(token for token in known if token is not None)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model may have more rows."""
        return len(self.hf)

    @functools.cached_property
    def adds_bos(self) -> bool:
        """Whether the checkpoint's own settings begin every text with a BOS."""
        return self.bos_id is not None and self.hf.encode("a")[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; none is added, special ones written in it are recognised.

        Raises:
          ValueError: on a lone surrogate.
        """
        return self._encode(text).ids

    def encode_with_offsets(
        self, text: str
    ) -> tuple[list[int], Int[np.ndarray, "tokens 2"]]:
        """Tokens of a text and the characters ``[start, end)`` of each.

        Spans are whole characters and leave no gap: characters that a normalizer
        dropped or fused belong to the token before them, the space before a word
        belongs to the word.

        Raises:
          ValueError: on a lone surrogate.
        """
        encoding = self._encode(text)
        offsets = np.asarray(encoding.offsets, np.int32).reshape(-1, 2)
        starts = offsets[:, 0]
        following = np.searchsorted(starts, starts, side="right")
        reach = np.append(starts, len(text))[following]
        offsets[:, 1] = np.maximum(offsets[:, 1], reach)
        return encoding.ids, offsets

    def decode(
        self,
        ids: Sequence[int] | Int[Array | np.ndarray, " tokens"],
        skip_special: bool = False,
    ) -> str:
        """The text of some tokens, spaces as they are."""
        return self._backend.decode(np.asarray(ids).tolist(), skip_special)

    def render(self, user_text: str) -> Rendered:
        """One user turn in the chat template, up to where the answer begins.

        Prefix and suffix are empty without a template, and for a text that begins with
        the BOS itself, which is taken for a finished prompt.

        Raises:
          ValueError: when the template fails, or does more to the text than strip it.
        """
        prefix, suffix = self._frame
        finished = self.bos_id is not None and user_text.startswith(self.hf.bos_token)
        if finished or not (prefix or suffix):
            return Rendered("", user_text, "")
        whole = self._fill_template(user_text)
        middle = whole.removeprefix(prefix).removesuffix(suffix)
        if (
            prefix + middle + suffix != whole
            or middle not in user_text
            or middle.strip() != user_text.strip()
        ):
            raise ValueError(
                f"the chat template changes the user's text to {middle[:80]!r}...; "
                "spans cannot be followed through it: use chat=False and write the "
                "template into the prompt"
            )
        return Rendered(prefix, middle, suffix)

    def prompt(self, example: Example) -> Prompt:
        """The whole prompt text of an example and where its parts are.

        Raises:
          ValueError: as :meth:`render`.
        """
        text = example.source_text
        prefix, middle, suffix = self.render(text)
        start, end = len(prefix), len(prefix) + len(middle)
        shift = start - text.index(middle)  # below start where the template strips

        def span(first: int, last: int) -> tuple[int, int]:
            return max(first + shift, start), min(last + shift, end)

        document, question = (start, end), (end, end)
        if example.context is not None:
            first = text.index(example.context)
            document = span(first, first + len(example.context))
        if example.question:
            first = _find_question(text, example.question, example.context or "")
            question = span(first, first + len(example.question))
        return Prompt(prefix + middle + suffix, (start, end), document, question)

    def encode_example(self, example: Example, *, eos: bool = True) -> Encoded:
        """Prompt and response as tokens, each tokenised on its own.

        The prompt has one BOS: its own where the text begins with one, else one is
        added if the checkpoint adds it (a doubled BOS splits the attention sink).

        Args:
          example: what to encode.
          eos: end the response with the EOS token, which counts as a response token.

        Raises:
          ValueError: on text without tokens, lone surrogates, a template that changes
            the text, or a tokenizer without EOS when one is asked for.
        """
        try:
            return self._encode_example(example, eos)
        except ValueError as error:
            if not example.id:
                raise
            raise ValueError(f"example {example.id!r}: {error}") from error

    def _encode_example(self, example: Example, eos: bool) -> Encoded:
        row = self.encode_prompt(example)
        response, offsets = self.encode_with_offsets(example.response)
        if not response:
            raise ValueError("the tokenizer makes no token of the response")
        if eos and self.eos_id is None:
            raise ValueError("the tokenizer has no EOS token; use eos=False")
        if eos and response[-1] != self.eos_id:
            response = [*response, self.eos_id]
            offsets = np.vstack([offsets, np.full((1, 2), len(example.response))])
        return dataclasses.replace(
            row,
            response_ids=np.asarray(response, np.int32),
            offsets=offsets.astype(np.int32),
        )

    def encode_prompt(self, example: Example) -> Encoded:
        """The prompt of an example as :meth:`encode_example` has it; no response.

        Raises:
          ValueError: as :meth:`encode_example`, for what concerns the prompt.
        """
        prompt = self.prompt(example)
        ids, spans = self.encode_with_offsets(prompt.text)
        if self.adds_bos and ids[:1] != [self.bos_id]:
            ids, spans = [self.bos_id, *ids], np.insert(spans, 0, 0, axis=0)
        if not ids:
            raise ValueError("the tokenizer makes no token of the prompt")
        context = spans[:, 0] < prompt.user[1]
        context[-1] = False  # it queries the first response token, so it counts as new
        return Encoded(
            prompt_ids=np.asarray(ids, np.int32),
            response_ids=np.zeros(0, np.int32),
            offsets=np.zeros((0, 2), np.int32),
            context=context,
            document=_overlap(spans, prompt.document),
            question=_overlap(spans, prompt.question),
        )

    def _encode(self, text: str) -> "tokenizers.Encoding":
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has the lone surrogate {text[error.start]!r} at character "
                f"{error.start}; it is half of a character: decode the source again"
            ) from error
        return self._backend.encode(text, add_special_tokens=False)

    @functools.cached_property
    def _frame(self) -> tuple[str, str]:
        if not (self.chat and self.hf.chat_template):
            return "", ""
        pieces = self._fill_template(_SENTINEL).split(_SENTINEL)
        if len(pieces) != 2:
            raise ValueError(
                f"the chat template shows the user's text {len(pieces) - 1} times, not "
                "once; use chat=False and write the template into the prompt"
            )
        return pieces[0], pieces[1]

    def _fill_template(self, user_text: str) -> str:
        import jinja2

        try:
            return self.hf.apply_chat_template(
                [{"role": "user", "content": user_text}],
                tokenize=False,
                add_generation_prompt=True,
                # Llama 3 templates write today's date, so scores would change daily;
                # this is the date they write when they know none.
                date_string="26 Jul 2024",
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template cannot render one user turn ({error}); use "
                "chat=False and write the template into the prompt"
            ) from error


def _stop_ids(folder: Path) -> tuple[int, ...] | None:
    """What generation_config.json says ends a response; chat models know several."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        ends = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no JSON object ({error}); mend it") from error
    if ends is None:
        return None
    return tuple(ends) if isinstance(ends, list) else (ends,)


def _overlap(
    spans: Int[np.ndarray, "tokens 2"], span: tuple[int, int]
) -> Bool[np.ndarray, " tokens"]:
    start, end = span
    return (spans[:, 0] < end) & (spans[:, 1] > start) & (start < end)


def _find_question(text: str, question: str, context: str) -> int:
    """Where the question stands: its last place that is not inside the context."""
    start = text.index(context)
    before, after = text[:start], text[start + len(context) :]
    if question in after:
        return start + len(context) + after.rindex(question)
    return (before if question in before else text).rindex(question)
