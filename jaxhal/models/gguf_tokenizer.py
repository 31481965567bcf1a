"""The tokenizer inside a GGUF file, rebuilt with ``tokenizers``.

The conversion in transformers ignores ``tokenizer.ggml.pre``, which names how text is
cut into words; with it one text in fourteen comes out different for SmolLM2.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tokenizers
    import transformers

_UNKNOWN, _NORMAL, _CONTROL, _USER_DEFINED = 2, 1, 3, 4  # tokenizer.ggml.token_type
# The control tokens of a Phi-3 after which space is text; no file says so.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
# What turns of Phi-3 and of Gemma end with, which files do not say either, and what a
# call of a tool waits at in Gemma 4.
_TURN_ENDS = ("<|end|>", "<end_of_turn>", "<turn|>", "<|tool_response>")
# The same of GPT-OSS, after whose <|end|> another message follows.
_LAST_ENDS = ("<|return|>", "<|call|>")

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
_WORDS += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Combining marks (\p{M}) are parts of words, not punctuation.
_MARKED = _WORDS.replace(r"?\p{L}", r"?[\p{L}\p{M}]").replace(
    r"\s\p{L}", r"\s\p{L}\p{M}"
)

# Where a large letter follows a small one, another word begins.
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+%s"
_CASED += rf"|[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*%s|%s"
_CASED += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _Pre(NamedTuple):
    """What one value of ``tokenizer.ggml.pre`` implies."""

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False  # where the file does not say


_GPT2, _GPT4 = _Pre(("gpt-2",)), _Pre((_WORDS % r"\p{N}{1,3}",))
_LLAMA3 = _GPT4._replace(ignore_merges=True, adds_bos=True)
_TEKKEN = _CASED % ("", "", r"\p{N}")
_PRE = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo"), _GPT2),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "glm4", "smaug-bpe"), _GPT4),
    **dict.fromkeys(("llama-bpe", "llama3"), _LLAMA3),
    **dict.fromkeys(("refact", "smollm"), _Pre(("digits", "gpt-2"))),
    "falcon": _Pre(("punctuation", "gpt-2", "numbers", "[0-9][0-9][0-9]")),
    "gpt-4o": _Pre((_CASED % (f"{_ENDING}?", f"{_ENDING}?", r"\p{N}{1,3}"),)),
    "qwen2": _Pre((_WORDS % r"\p{N}",), nfc=True),
    "qwen35": _Pre((_MARKED % r"\p{N}",), nfc=True),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def build(metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """The bare tokenizer: no special token is added around a text.

    ``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece) or
    ``gemma4`` (the same pieces, of which the file says in what order they are joined).
    By ``general.architecture`` the latter is a Phi-3's, which drops space after control
    tokens.

    Raises:
      ValueError: on missing metadata, another model, an unknown ``tokenizer.ggml.pre``.
    """
    from tokenizers import AddedToken

    tokens = _need(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    match _need(metadata, "tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(metadata, tokens)
        case "llama":
            scores = _need(metadata, "tokenizer.ggml.scores")
            tokenizer = _pieces(metadata, tokens, types, _merges(tokens, scores, types))
        case "gemma4":
            metadata = {"tokenizer.ggml.add_space_prefix": False, **metadata}
            tokenizer = _pieces(metadata, tokens, types, _said_merges(metadata))
        case other:
            raise ValueError(
                f"tokenizer.ggml.model is {other!r}; known: gpt2, llama, gemma4. Give "
                "a folder with tokenizer.json instead of the GGUF file"
            )
    pieces = metadata["tokenizer.ggml.model"] == "llama"
    strips = pieces and metadata.get("general.architecture") == "phi3"
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=kind == _CONTROL,
                normalized=False,
                rstrip=strips and kind == _CONTROL and token not in _PHI3_PLAIN,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def load(metadata: Mapping[str, Any]) -> "transformers.PreTrainedTokenizerFast":
    """The tokenizer of a GGUF file with its special tokens and chat template.

    A BOS or EOS is added as ``add_bos_token`` and ``add_eos_token`` say; where they say
    nothing, ``llama`` and ``gemma4`` models and the words of Llama 3 and of Tekken
    begin with one.

    Raises:
      ValueError: as :func:`build`, and on a special token outside the vocabulary.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = build(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {}
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for key, role in names.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise ValueError(
                f"tokenizer.ggml.{key}_token_id is {index} but the vocabulary has "
                f"{len(tokens)} tokens; convert the checkpoint again"
            )
        if index is not None:
            special[f"{role}_token"] = tokens[index]
    rule = _PRE.get(metadata.get("tokenizer.ggml.pre", ""), _GPT2)
    pieces = metadata["tokenizer.ggml.model"] in ("llama", "gemma4")
    by_default = pieces or rule.adds_bos
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", by_default)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    for adds, role in ((adds_bos, "bos"), (adds_eos, "eos")):
        if adds:
            _need(metadata, f"tokenizer.ggml.{role}_token_id")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=adds_bos,
        add_eos_token=adds_eos,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a response: those that end a text, a turn or a message.

    >>> stop_ids({"tokenizer.ggml.tokens": ["<s>", "a", "<|end|>"],
    ...           "tokenizer.ggml.eos_token_id": 0})
    (0, 2)
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    said = [metadata[key] for key in keys if metadata.get(key) is not None]
    ends = _LAST_ENDS if _LAST_ENDS[0] in tokens else _TURN_ENDS
    known = [tokens.index(text) for text in ends if text in tokens]
    return tuple(dict.fromkeys([*said, *known]))


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(key)
    if value is None or value == []:
        raise ValueError(
            f"the GGUF file has no {key!r}, so its tokenizer cannot be rebuilt; "
            "convert the checkpoint again, or give a folder with tokenizer.json"
        )
    return value


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str]
) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, decoders, normalizers
    from tokenizers import pre_tokenizers as pre

    name = _need(metadata, "tokenizer.ggml.pre")
    if name not in _PRE:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, the way text is cut into words, which is "
            f"not known here; known: {', '.join(sorted(_PRE))}. Give a folder with "
            "tokenizer.json instead of the GGUF file"
        )
    rule = _PRE[name]
    named = {
        "digits": pre.Digits(individual_digits=True),
        "gpt-2": pre.ByteLevel(add_prefix_space=False, use_regex=True),
        "numbers": pre.Digits(individual_digits=False),
        "punctuation": pre.Punctuation(behavior="contiguous"),
    }
    splits = [named.get(s) or pre.Split(Regex(s), "isolated") for s in rule.splits]
    if "gpt-2" not in rule.splits:
        splits.append(pre.ByteLevel(add_prefix_space=False, use_regex=False))
    merges = _said_merges(metadata)
    tokenizer = _bpe(tokens, merges, ignore_merges=rule.ignore_merges)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: Any
) -> "tokenizers.Tokenizer":
    """Byte-pair encoding, which joins the first of these pairs before others."""
    from tokenizers import Tokenizer, models

    vocabulary = {token: index for index, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocabulary, merges, **options))


def _said_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of pieces that a file says are joined, the first before others."""
    pairs = [one.split(" ", 1) for one in _need(metadata, "tokenizer.ggml.merges")]
    return [(left, right) for left, right in pairs]


def _pieces(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[tuple[str, str]],
) -> "tokenizers.Tokenizer":
    from tokenizers import decoders, normalizers

    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None and _UNKNOWN in types:
        unknown = types.index(_UNKNOWN)
    unk = None if unknown is None else tokens[unknown]
    tokenizer = _bpe(tokens, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * prefix
    )
    return tokenizer


def _merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored result first.

    SentencePiece joins whichever neighbours give the best-scored piece.

    >>> _merges(["a", "b", "c", "ab", "abc"], [-9.0, -9.0, -9.0, -1.0, -2.0], [1] * 5)
    [('a', 'b'), ('ab', 'c')]
    """
    score_of = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    merges = [
        (-score, -cut, cut - len(piece), piece[:cut], piece[cut:])
        for piece, score in score_of.items()
        for cut in range(1, len(piece))
        if piece[:cut] in score_of and piece[cut:] in score_of
    ]
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]
