"""Text to tokens and back: chat templates, character spans, batches with a seam."""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Int

from jaxhal.io.progress import note
from jaxhal.io.showing import cut, shown
from jaxhal.models import characters, gguf_tokenizer, templates
from jaxhal.models.batching import Encoded
from jaxhal.models.control import Places, disarmed, mark
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.prompts import OPENING, Prompt, around, find_question, overlap
from jaxhal.models.settings import Settings, read_json
from jaxhal.types import Example, Turn

if TYPE_CHECKING:
    import tokenizers


# The tokens that a model is shown beside those of a text.
_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls")
_Framed = tuple[tuple[Turn, ...], tuple[str, ...]]  # turns without texts, and tools
_KEPT = 256  # frames of such


class Tokenizer:
    """A fast Hugging Face tokenizer, ``hf``, that keeps track of characters.

    Whatever a text spells, it is text: control tokens come from the chat template, or
    from a prompt that is said to be finished.  A response ends with one of
    ``stop_ids``, by default the EOS token.

    Raises:
      ValueError: when ``hf`` is a slow tokenizer, which knows no offsets.
    """

    def __init__(self, hf: Any, stop_ids: Sequence[int] | None = None):
        if not getattr(hf, "is_fast", False):
            raise ValueError(
                f"{type(hf).__name__} is a slow tokenizer, which gives no character "
                "offsets; save the checkpoint with a tokenizer.json"
            )
        self.hf = hf
        self._size: int | None = None
        self._frames: dict[_Framed, templates.Frame | ValueError] = {}
        ends = (hf.eos_token_id,) if hf.eos_token_id is not None else ()
        self.stop_ids = ends if stop_ids is None else tuple(stop_ids)
        # Some checkpoints ship settings that cut long texts silently, pad short ones or
        # trim spaces off the offsets; this copy is free of all that.
        spec = json.loads(hf.backend_tokenizer.to_str())
        spec |= {"truncation": None, "padding": None, "post_processor": None}
        self._lacking = characters.lacking(spec)
        self._backend, self._control = disarmed(
            spec, str(hf.chat_template or ""), hf.all_special_tokens
        )

    @classmethod
    def from_folder(cls, path: str | os.PathLike) -> "Tokenizer":
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
            # Else it asks on standard input whether to run code of the folder.
            hf = kind.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # tokenizers raises nothing more precise
            raise ValueError(
                f"{folder / found[0]} makes no fast tokenizer ({error!r}); save the "
                "checkpoint with a sound tokenizer.json"
            ) from error
        return cls(hf, _stop_ids(folder))

    @classmethod
    def from_gguf(cls, source: GGUFSource) -> "Tokenizer":
        """The tokenizer inside a GGUF file."""
        fields = source.settings("tokenizer.")
        arch = source.settings("general.").get("architecture")
        found = {f"tokenizer.{key}": fields[key] for key in fields}
        hf = gguf_tokenizer.load({**found, "general.architecture": arch})
        return cls(hf, gguf_tokenizer.stop_ids(found))

    def check_ids(self, size: int, where: str) -> None:
        """Raises ValueError on a token that a model of ``size`` tokens does not know.

        A token added to the vocabulary may be beyond it, as one for images is in
        published checkpoints; a text that it comes up in is then an error.  Models pad
        their vocabularies, published ones by less than 2 %; more than 10 % is noted.
        """
        vocabulary = self.hf.backend_tokenizer.get_vocab(with_added_tokens=False)
        last = max(vocabulary.values(), default=0)
        roles = [getattr(self.hf, f"{role}_token_id") for role in _ROLES]
        for number in (last, *roles, *self.stop_ids):
            known = type(number) is int and 0 <= number < size
            if number is not None and not known:
                raise ValueError(
                    f"{where}: the tokenizer has a token {shown(number)} and the model "
                    f"knows those below {size}; download both together again"
                )
        self._size = size
        if size - (have := len(self.hf)) > max(size // 10, 1024):
            note(
                f"{where}: the tokenizer has {have} tokens and the model knows {size}; "
                "download both again if they do not belong together"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Writes the files that :meth:`from_folder` reads."""
        self.hf.save_pretrained(path)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.hf.bos_token_id

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self.hf.eos_token_id

    @functools.cached_property
    def end_id(self) -> int | None:
        """The token that a response ends with, if there is one.

        That is the one of ``stop_ids`` that the chat template writes after an answer,
        else EOS: some models end a turn otherwise than a text.
        """
        turns = Turn("user", ""), Turn("assistant", ""), Turn("user", "")
        after = self._pieces(*turns)[2].lstrip()
        ids = self.encode(after, [(0, len(after))]) if after else []
        said = next((one for one in ids if self.decode([one]).strip()), None)
        return said if said in self.stop_ids else self.eos_id

    @property
    def pad_id(self) -> int:
        """What fills the padding: the pad token, else EOS, else 0."""
        known = (self.hf.pad_token_id, self.eos_id, 0)
        return next(token for token in known if token is not None)

    @functools.cached_property
    def adds_bos(self) -> bool:
        """Whether the checkpoint's own settings begin every text with a BOS."""
        return self.bos_id is not None and self.hf.encode("a")[:1] == [self.bos_id]

    def encode(self, text: str, control: Places = ()) -> list[int]:
        """Tokens of a text, and no others; see :meth:`encode_with_offsets`."""
        return self.encode_with_offsets(text, control)[0]

    def encode_with_offsets(
        self, text: str, control: Places = ()
    ) -> tuple[list[int], Int[np.ndarray, "tokens 2"]]:
        """Tokens of a text and the characters ``[start, end)`` of each.

        Spans are whole characters and leave no gap: characters that a normalizer
        dropped or fused belong to the token before them, the space before a word
        belongs to the word. Control tokens are recognised in the places ``control``, by
        default nowhere.

        Raises:
          ValueError: on a lone surrogate, and on characters without tokens among which
            the others cannot be followed.
        """
        marked = mark(text, control, self._control)
        encoding = self._encode(marked.text)
        if self._lacking.isdisjoint(marked.text.encode()):
            offsets = np.asarray(encoding.offsets, np.int32).reshape(-1, 2)
        else:
            offsets = characters.counted(encoding.tokens, marked.text, self._lacking)
        return encoding.ids, characters.tiled(marked.original(offsets), len(text))

    def decode(
        self,
        ids: Sequence[int] | Int[Array | np.ndarray, " tokens"],
        skip_special: bool = False,
    ) -> str:
        """The text of some tokens, spaces as they are."""
        return self.hf.backend_tokenizer.decode(np.asarray(ids).tolist(), skip_special)

    def render(self, user_text: str) -> tuple[str, str, str]:
        """What the chat template writes before a user's turn, the turn, what follows.

        Joined they are the prompt, up to where the answer begins.

        Raises:
          ValueError: when the template fails, or does more to a text than trim it.
        """
        frame = self._frame([Turn("user", user_text)])
        before, after = frame.pieces
        return before, frame.fill(0, user_text), after

    def prompt(self, example: Example) -> Prompt:
        """The whole prompt text of an example and where its parts are."""
        if example.turns:
            return self._conversation(example)
        text = example.source_text
        before, middle, after = (
            self._cut(example) if example.templated else self.render(text)
        )
        start, end = len(before), len(before) + len(middle)
        shift = start - text.index(middle)  # below start where the template strips

        def span(first: int, part: str) -> tuple[int, int]:
            last = first + len(part)
            return max(first + shift, start), min(last + shift, end)

        document, question, quoted = (start, end), (end, end), []
        if example.context is not None:
            document = span(text.index(example.context), example.context)
            quoted.append(document)
        if example.question:
            first = find_question(text, example.question, example.context or "")
            question = span(first, example.question)
            quoted.append(question)
        whole = before + middle + after
        places = around(quoted if example.templated else [(start, end)], len(whole))
        return Prompt(whole, (start, end), [document], question, places)

    def _cut(self, example: Example) -> tuple[str, str, str]:
        """A finished prompt, before what the template writes where an answer begins.

        Behind that may be an empty thought, or the name of a channel, and no more.
        """
        text, after = example.source_text, self._pieces(Turn("user", ""))[-1].rstrip()
        end = text.rfind(after) if after else -1
        own = [part for part in (example.context, example.question) if part]
        if (
            end <= 0
            or not OPENING.fullmatch(text, end + len(after))
            or not all(part in text[:end] for part in own)
        ):
            return "", text, ""
        return "", text[:end], text[end:]

    def _conversation(self, example: Example) -> Prompt:
        frame = self._frame(example.turns, example.tools)
        text, places = frame.pieces[0], [(0, 0)] * len(example.turns)
        for turn, after in zip(frame.order, frame.pieces[1:], strict=True):
            start = len(text)
            text += frame.fill(turn, example.turns[turn].content)
            places[turn] = start, len(text)
            text += after
        start, end = min(places[turn] for turn in frame.order)[0], max(places)[1]
        control = around(places, len(text))
        return Prompt(text, (start, end), places, (end, end), control)

    def encode_example(self, example: Example, *, eos: bool = True) -> Encoded:
        """Prompt and response as tokens, each tokenised on its own.

        The prompt has one BOS: its own where the text begins with one, else one is
        added if the checkpoint adds it (a doubled BOS splits the attention sink).  With
        ``eos`` the response ends with :attr:`end_id`, which counts as one of its
        tokens, as in the TOHA code.

        Raises:
          ValueError: on text without tokens, lone surrogates, a template that changes
            the text, or a tokenizer without EOS when one is asked for.
        """
        try:
            row = self.encode_prompt(example)
            response, offsets = self.encode_with_offsets(example.response)
            if not response:
                raise ValueError("the tokenizer makes no token of the response")
            if eos and self.end_id is None:
                raise ValueError(
                    "the tokenizer has no EOS token; use eos=False, or name an "
                    "eos_token in its tokenizer_config.json"
                )
        except ValueError as error:
            if not example.id:
                raise
            raise ValueError(f"example {cut(repr(example.id))}: {error}") from error
        if eos and response[-1] != self.end_id:
            response = [*response, self.end_id]
            offsets = np.vstack([offsets, np.full((1, 2), len(example.response))])
        return dataclasses.replace(
            row,
            response_ids=np.asarray(response, np.int32),
            offsets=offsets.astype(np.int32),
        )

    def encode_prompt(self, example: Example) -> Encoded:
        """The prompt of an example as :meth:`encode_example` has it; no response."""
        prompt = self.prompt(example)
        ids, spans = self.encode_with_offsets(prompt.text, prompt.control)
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
            document=overlap(spans, prompt.document),
            question=overlap(spans, [prompt.question]),
        )

    def _encode(self, text: str) -> "tokenizers.Encoding":
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has the lone surrogate {text[error.start]!r} at character "
                f"{error.start}; it is half of a character: decode the source again"
            ) from error
        encoding = self._backend.encode(text, add_special_tokens=False)
        most = max(encoding.ids, default=0)
        if self._size is not None and most >= self._size:
            raise ValueError(
                f"text has the token {shown(self.decode([most]))}, number {most}, and "
                f"the model knows those below {self._size}; leave it out"
            )
        return encoding

    def _pieces(self, *turns: Turn) -> tuple[str, ...]:
        """What the template writes around turns, nothing where it takes none such."""
        try:
            return self._frame(turns).pieces
        except ValueError as error:
            if isinstance(error.__cause__, MemoryError):
                raise
            return ("",) * (len(turns) + 1)

    def _frame(
        self, turns: Sequence[Turn], tools: tuple[str, ...] = ()
    ) -> templates.Frame:
        """What the template puts around turns, or why it fails, found out once.

        But for want of memory, which others may have taken, it may fail once more.
        """
        key = templates.outline(turns), tools
        found = self._frames.get(key)
        if found is None:
            try:
                found = self._new_frame(key)
            except ValueError as error:
                if isinstance(error.__cause__, MemoryError):
                    raise
                found = error
            if len(self._frames) >= _KEPT:
                self._frames.clear()
            self._frames[key] = found
        if isinstance(found, ValueError):
            raise ValueError(str(found)) from found
        return found

    def _new_frame(self, framed: _Framed) -> templates.Frame:
        turns, tools = framed
        if self.hf.chat_template:
            return templates.frame(self.hf, turns, tools, self._control.keys())
        roles = [turn.role for turn in turns]
        if roles == ["user"] and not tools:
            return templates.Frame()
        raise ValueError(
            f"turns of {', '.join(roles)} need a chat template, and the tokenizer has "
            "none; give a 'prompt', or a reader that was tuned to chat"
        )


def _stop_ids(folder: Path) -> tuple[int, ...] | None:
    """What generation_config.json says ends a response; chat models know several."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    settings = Settings(read_json(path), str(path))
    ends = settings.get("eos_token_id")
    if ends is None:
        return None
    ends = ends if isinstance(ends, list) else [ends]
    if any(type(end) is not int for end in ends):
        settings.refuse("eos_token_id", "give the number of a token, or a list of them")
    return tuple(ends)
