"""Tokens, character spans, chat templates and the seam layout."""

import collections
import dataclasses
import functools
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxhal.models import gguf_tokenizer
from jaxhal.models.batching import (
    Encoded,
    bucket,
    check_length,
    collate,
    lengths,
    plan,
    plan_shared,
)
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.types import Example, Turn

GOLDEN = Path(__file__).parent / "golden" / "smollm2_tokenization.json"
CORPUS = [
    "The capital of France is Paris, isn't it? 12345 people say WE'LL see in 1999.",
    "hello world,  the tab\tand\n\nlines;\r\n  naïve café 東京 3½ ... (12.5%)",
    "they've said: 7,000,000 capital capital of of the the the 2024 2025 1234 5678",
]
TEXTS = [
    *CORPUS,
    "",
    "  lead and trail  ",
    "don't I'LL we've '12 12's",
    "x=2**10;\n\n\n  7 \n y",
    "cafe\u0301 한국 🙂🙃 ß \u00a0 nbsp",
]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
)
STRIPS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"


def byte_level(split=None, vocab_size=420):
    """A byte-level BPE trained on the corpus; merges may join digits and spaces."""
    backend = Backend(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = words if split is None else split
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def vocab_and_merges(backend):
    model = json.loads(backend.to_str())["model"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    return model["vocab"], merges


def wrap(template=None, bos="<s>", eos="</s>", add_bos_token=False):
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(),
        bos_token=bos,
        eos_token=eos,
        add_bos_token=add_bos_token,
        chat_template=template,
    )
    return Tokenizer(hf)


@pytest.fixture(scope="module")
def plain():
    return wrap()


@pytest.fixture(scope="module")
def chat():
    return wrap(CHATML)


def pieces(tokenizer, ids):
    """The text of some tokens, without the ones the tests call special."""
    return tokenizer.decode(ids, skip_special=True)


# --- GGUF metadata ------------------------------------------------------------------


def bpe_metadata(pre, **more):
    vocab, merges = vocab_and_merges(byte_level())
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **more,
    }


def spm_metadata(**more):
    """A SentencePiece-like vocabulary: control, bytes, then pieces by falling score."""
    marked = ["▁" + text.replace(" ", "▁") for text in CORPUS]
    backend = Backend(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    backend.train_from_iterator(marked, trainer)
    vocab = backend.get_vocab()
    bytewise = set("京\n")  # in no piece, so these fall back to bytes
    kept = [piece for piece in vocab if not bytewise & set(piece)]
    learnt = sorted((p for p in kept if len(p) > 1), key=vocab.__getitem__)
    single = [piece for piece in kept if len(piece) == 1]
    control = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    rest = [*learnt, *single]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*control, *bytes_, *rest],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(rest))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(rest),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def gemma4_metadata(**more):
    """The like of the above, with the order in which pieces are joined."""
    backend = Backend(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    marked = [text.replace(" ", "▁") + "\n\n" for text in CORPUS]
    backend.train_from_iterator(marked, trainer)
    vocab, merges = vocab_and_merges(backend)
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    learnt = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*control, *bytes_, *learnt],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3] * 5 + [6] * 256 + [1] * len(learnt),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        **more,
    }


def write_gguf(path, metadata, arch="llama"):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFSource(path)


def spm_oracle(text, metadata):
    """SentencePiece's own rule, slowly: join the neighbours with the best piece."""
    tokens = metadata["tokenizer.ggml.tokens"]
    score = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [
            (score[a + b], -at)
            for at, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in score
        ]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    known = {token: index for index, token in enumerate(tokens)}
    ids = []
    for symbol in symbols:
        fallback = [known[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        ids += [known[symbol]] if symbol in known else fallback
    return ids


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "in 1999's", ["in", " ", "1", "9", "9", "9", "'s"]),
        ("gpt-2", "in 1999's", ["in", " 1999", "'s"]),
        ("gpt2", "a\n\n b", ["a", "\n\n", " b"]),
        ("llama-bpe", "in 12345'S", ["in", " ", "123", "45", "'S"]),
        ("llama3", "a(b)\n\nc", ["a", "(b", ")\n\n", "c"]),
        ("qwen2", "in 12's", ["in", " ", "1", "2", "'s"]),
        ("qwen2", "क्या", ["क", "्य", "ा"]),
        ("qwen35", "क्या 12's", ["क्या", " ", "1", "2", "'s"]),
        ("falcon", "a(12345)?! b", ["a", "(", "123", "45", ")?!", " b"]),
        ("falcon", "in 12", ["in", " ", "12"]),
        ("refact", "in 1999's", ["in", " ", "1", "9", "9", "9", "'s"]),
        ("olmo", "in 1999's", ["in", " 1999", "'s"]),
        ("dbrx", "in 12345'S", ["in", " ", "123", "45", "'S"]),
        ("tekken", "aB HTTPCodes's 12", ["a", "B", " HTTPCodes", "'s", " ", "1", "2"]),
        ("gpt-4o", "aB It's WE'LL 1234", [*"aB", " It's", " WE'LL", " ", "123", "4"]),
    ],
)
def test_words_of_each_pre(pre, text, words):
    backend = gguf_tokenizer.build(bpe_metadata(pre))
    found = [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == words


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def known_pipeline(pre, vocab, merges):
    """The same vocabulary in the pipeline that the family publishes."""
    merges = [tuple(merge.split(" ")) for merge in merges]
    if pre == "qwen2":
        return transformers.Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    if pre == "qwen35":
        made = transformers.Qwen3_5Tokenizer(vocab=vocab, merges=merges)
        return made.backend_tokenizer
    if pre == "gpt-2":
        return transformers.GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    whole = pre in ("llama-bpe", "tekken")
    backend = Backend(models.BPE(vocab, merges, ignore_merges=whole))
    split = {"tekken": TEKKEN, "gpt-4o": GPT4O}.get(pre, LLAMA3)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


@pytest.mark.parametrize(
    "pre",
    [
        *("qwen2", "qwen35", "gpt-2", "llama-bpe", "dbrx", "smaug-bpe", "glm4"),
        *("tekken", "gpt-4o"),
    ],
)
def test_byte_level_equals_the_published_pipeline(pre):
    metadata = bpe_metadata(pre)
    ours = gguf_tokenizer.build(metadata)
    vocab = {token: n for n, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    theirs = known_pipeline(pre, vocab, metadata["tokenizer.ggml.merges"])
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids == expected, text
        if not pre.startswith("qwen"):  # whose NFC is not undone
            assert ours.decode(expected) == text


def test_sentencepiece_equals_the_greedy_rule():
    metadata = spm_metadata()
    backend = gguf_tokenizer.build(metadata)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert ids == spm_oracle(text, metadata), text
        assert backend.decode(ids) == text


def test_pieces_of_gemma4_equal_the_published_pipeline():
    metadata = gemma4_metadata()
    tokens, merges = (metadata[f"tokenizer.ggml.{x}"] for x in ("tokens", "merges"))
    theirs = transformers.GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    backend = gguf_tokenizer.build(metadata)
    for text in [*TEXTS, "the\n\n\nthe \n the"]:
        expected = theirs.encode(text, add_special_tokens=False)
        assert backend.encode(text).ids == expected, text
        assert backend.decode(expected) == text


def test_sentencepiece_equals_the_transformers_conversion():
    base = pytest.importorskip("transformers.tokenization_utils_base")
    if not hasattr(base, "generate_merges"):
        pytest.skip("this transformers keeps its merges elsewhere")
    metadata = spm_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = list(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    merges = base.generate_merges(vocab, scores)
    kinds = metadata["tokenizer.ggml.token_type"]
    ours = gguf_tokenizer._merges(tokens, metadata["tokenizer.ggml.scores"], kinds)
    assert ours == merges
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    backend = gguf_tokenizer.build(metadata)
    for text in TEXTS:
        if not text.startswith(" "):  # where the older rule marks one space more
            expected = theirs.encode(text, add_special_tokens=False)
            assert backend.encode(text).ids == expected


def test_space_prefix_is_honoured():
    backend = gguf_tokenizer.build(
        spm_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    )
    assert not backend.encode("the").tokens[0].startswith("▁")
    assert backend.decode(backend.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("metadata", "adds"),
    [
        (spm_metadata(), True),
        (spm_metadata(**{"tokenizer.ggml.add_bos_token": False}), False),
        (bpe_metadata("smollm"), False),
        (bpe_metadata("smollm", **{"tokenizer.ggml.add_bos_token": True}), True),
        (bpe_metadata("llama-bpe"), True),
        (bpe_metadata("tekken"), True),
        (gemma4_metadata(), True),
        (bpe_metadata("dbrx"), False),
    ],
)
def test_bos_by_metadata_survives_saving(tmp_path, metadata, adds):
    metadata["tokenizer.chat_template"] = CHATML
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "a.gguf", metadata))
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.from_folder(tmp_path / "saved")
    for one in (tokenizer, again):
        assert one.adds_bos is adds
        assert len(one.hf) == len(metadata["tokenizer.ggml.tokens"])
        assert one.bos_id == metadata["tokenizer.ggml.bos_token_id"]
        assert one.render(" a ")[2] == "<|end|>\n<|assistant|>\n"
    for text in [*TEXTS, "a<s>b</s> c"]:
        assert tokenizer.encode(text) == again.encode(text)


def test_add_eos_and_padding(tmp_path):
    metadata = spm_metadata(
        **{"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.padding_token_id": 0}
    )
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "a.gguf", metadata))
    assert tokenizer.hf.encode("the")[-1] == tokenizer.eos_id == 2
    assert tokenizer.encode("the")[-1] != 2
    assert tokenizer.pad_id == 0


def test_space_after_the_control_tokens_of_phi3(tmp_path):
    metadata = spm_metadata()
    for key, value in (("tokens", "<|user|>"), ("scores", 0.0), ("token_type", 3)):
        metadata[f"tokenizer.ggml.{key}"].append(value)
    user = len(metadata["tokenizer.ggml.tokens"]) - 1
    for arch, space in (("phi3", ""), ("llama", "\n ")):
        tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / arch, metadata, arch))
        encode = functools.partial(tokenizer.hf.encode, add_special_tokens=False)
        assert encode("<|user|>\n the") == [user, *encode(f"{space}the")]
        assert encode("<s>\n the") == [1, *encode("\n the")]


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({}, (2,)),
        ({"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}, (2, 5)),
        ({"tokenizer.ggml.tokens": ["<end_of_turn>"]}, (2, -1)),
        ({"tokenizer.ggml.tokens": ["<|tool_response>", "<turn|>"]}, (2, -1, -2)),
        ({"tokenizer.ggml.tokens": ["<|return|>", "<|call|>", "<|end|>"]}, (2, -3, -2)),
    ],
)
def test_what_ends_a_response(tmp_path, more, want):
    metadata = spm_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    if last := more.get("tokenizer.ggml.tokens"):
        more = {"tokenizer.ggml.tokens": [*tokens[: -len(last)], *last]}
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "a.gguf", metadata | more))
    assert tokenizer.stop_ids == tuple(end % len(tokens) for end in want)


def test_user_defined_tokens_are_whole_and_not_special():
    metadata = spm_metadata()
    for key, value in (("tokens", "<tool>"), ("scores", 0.0), ("token_type", 4)):
        metadata[f"tokenizer.ggml.{key}"].append(value)
    backend = gguf_tokenizer.build(metadata)
    ids = backend.encode("the<tool>").ids
    assert ids[-1] == len(metadata["tokenizer.ggml.tokens"]) - 1
    assert backend.decode(ids, skip_special_tokens=True) == "the<tool>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no 'tokenizer.ggml.tokens'"),
        (bpe_metadata("smollm", **{"tokenizer.ggml.merges": []}), "ggml.merges'"),
        (bpe_metadata(None), "no 'tokenizer.ggml.pre'"),
        (bpe_metadata("default"), "'default'.*known: chatglm-bpe, dbrx, .*tekken"),
        (bpe_metadata("viking"), "tokenizer.ggml.pre is 'viking'"),
        (spm_metadata(**{"tokenizer.ggml.scores": None}), "ggml.scores'"),
        (gemma4_metadata(**{"tokenizer.ggml.merges": None}), "ggml.merges'"),
        (spm_metadata(**{"tokenizer.ggml.model": "t5"}), "'t5'; known: gpt2, llama"),
        (spm_metadata(**{"tokenizer.ggml.bos_token_id": None}), "ggml.bos_token_id'"),
        (spm_metadata(**{"tokenizer.ggml.eos_token_id": 10**6}), "is 1000000 but"),
    ],
)
def test_metadata_errors(tmp_path, metadata, message):
    given_ = {key: value for key, value in metadata.items() if value not in (None, [])}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(write_gguf(tmp_path / "a.gguf", given_))


# --- folders ------------------------------------------------------------------------


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json, tokenizer.model, voc"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "spm.model").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="save a tokenizer.json made of other"):
        Tokenizer.from_folder(tmp_path)


def test_a_vocabulary_of_word_pieces(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertConfig(vocab_size=len(words)).save_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path).encode("a bc") == [5, 6, 7]


def test_broken_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json makes no fast tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("family", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_saved_by_transformers(tmp_path, family):
    vocab, merges = vocab_and_merges(byte_level())
    merges = [tuple(merge.split(" ")) for merge in merges]
    hf = getattr(transformers, family)(vocab=vocab, merges=merges)
    hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == hf.encode(text, add_special_tokens=False)


def test_slow_tokenizers_are_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow is a slow tokenizer"):
        Tokenizer(Slow())


def test_a_checkpoints_truncation_and_trimming_do_not_apply(tmp_path, plain):
    from tokenizers import processors

    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_token="</s>")
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert ids == plain.encode(text)
        np.testing.assert_array_equal(offsets, plain.encode_with_offsets(text)[1])


def test_ids(plain):
    assert (plain.bos_id, plain.eos_id, plain.pad_id) == (0, 1, 1)
    bare = wrap(bos=None, eos=None)
    assert (bare.bos_id, bare.eos_id, bare.pad_id) == (None, None, 0)
    assert not bare.adds_bos
    assert plain.encode("a<s>", [(1, 4)]) == [*plain.encode("a"), plain.bos_id]


@pytest.mark.parametrize(
    ("tokens", "size", "noted"),
    [
        (151_665, 151_936, False),  # Qwen2.5
        (50_295, 51_200, False),  # Phi-2
        (300, 1_024, False),
        (128_256, 151_936, True),  # that of Llama 3 beside the weights of Qwen2.5
        (32_000, 49_152, True),
        (300, 32_000, True),
    ],
)
def test_a_tokenizer_of_another_model_is_noted(tokens, size, noted, capsys):
    vocabulary = {str(number): number for number in range(tokens)}
    backend = Backend(models.WordLevel(vocabulary, "0"))
    tokenizer = Tokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    )
    tokenizer.check_ids(size, "model")
    said = capsys.readouterr().err
    assert (f"has {tokens} tokens and the model knows {size}" in said) == noted
    assert bool(said) == noted
    with pytest.raises(ValueError, match=f"has a token {tokens - 1}"):
        tokenizer.check_ids(tokens - 1, "model")


# --- offsets ------------------------------------------------------------------------


def assert_spans_tile(text, offsets):
    starts, ends = offsets.T
    assert (np.diff(starts) >= 0).all() and (ends > starts).all()
    covered = np.zeros(len(text), bool)
    for start, end in offsets:
        covered[start:end] = True
    assert covered.all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(text=st.text(max_size=30))
def test_byte_level_spans_hold_their_bytes(plain, text):
    ids, offsets = plain.encode_with_offsets(text)
    assert_spans_tile(text, offsets)
    assert plain.decode(ids) == text
    byte_of = {written: byte for byte, written in byte_alphabet().items()}
    for token, (start, end) in zip(ids, offsets, strict=True):
        written = plain.hf.convert_ids_to_tokens(token)
        if token > 2:
            raw = bytes(byte_of[c] for c in written)
            assert raw in text[start:end].encode()


def byte_alphabet():
    """Byte to the printable character that byte-level BPE writes for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {
        b: chr(256 + n) for n, b in enumerate(rest)
    }


def test_characters_in_several_tokens(plain):
    _, offsets = plain.encode_with_offsets("a🙂b")
    assert offsets.tolist() == [[0, 1], *[[1, 2]] * 4, [2, 3]]


def test_combining_marks_join_the_character_before():
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    for text in ("cafe\u0301 x", "\u1112\u1161\u11ab z", "e\u0301"):
        _, offsets = Tokenizer(hf).encode_with_offsets(text)
        assert_spans_tile(text, offsets)


def test_space_prefix_does_not_shift_offsets():
    tokenizer = Tokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=gguf_tokenizer.build(spm_metadata())
        )
    )
    for text in filter(None, TEXTS):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert_spans_tile(text, offsets)
        for token, (start, end) in zip(ids, offsets, strict=True):
            piece = tokenizer.hf.convert_ids_to_tokens(token).replace("▁", " ")
            if not piece.startswith("<0x"):
                assert piece.strip() == text[start:end].strip() or piece == " "


def test_lone_surrogate(plain):
    with pytest.raises(ValueError, match=r"surrogate '\\ud800' at character 2"):
        plain.encode("ab\ud800")


# --- prompts ------------------------------------------------------------------------


def test_no_template_is_the_text_alone(plain):
    assert plain.render(" a ") == ("", " a ", "")


def test_template_frames_the_text(chat):
    text = "What {{ is }} <|user|> this?\n"
    assert chat.render(text) == ("<|user|>\n", text, "<|end|>\n<|assistant|>\n")


def test_the_default_of_several_templates():
    several = {"default": CHATML, "tool_use": "{{ tools[0].name ** 2 }}"}
    assert wrap(several).render("hi") == wrap(CHATML).render("hi")
    with pytest.raises(ValueError, match="computes powers"):
        wrap({"default": several["tool_use"]}).render("hi")


def test_template_that_strips():
    tokenizer = wrap(STRIPS)
    assert tokenizer.render("  a b\n") == ("<user>", "a b", "</>")
    example = Example(response="r", context="\n The cat. \n", question=" which? ")
    prompt = tokenizer.prompt(example)
    assert prompt.text == "<user>The cat. \n\n\n which?</>"
    assert prompt.text[slice(*prompt.document[0])] == "The cat. \n"
    assert prompt.text[slice(*prompt.question)] == " which?"
    assert prompt.text[slice(*prompt.user)] == "The cat. \n\n\n which?"


# As published: Llama 2 puts the system's text into the first turn of the user, Mistral
# into the last; Llama 3 trims.
_MERGED = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] "
    "{% if s is defined and loop.WHERE %}{{ s + '\n\n' }}{% endif %}"
    "{{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
CHATS = {
    "chatml": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n"
    "{% endfor %}<s>assistant\n",
    "llama 2": _MERGED.replace("WHERE", "first"),
    "mistral": _MERGED.replace("WHERE", "last"),
    "llama 3": "{% for m in messages %}<s>{{ m.role }}\n\n{{ m.content | trim }}</s>"
    "{% endfor %}<s>assistant\n\n",
    "half": "{% for m in messages %}{{ m.content.lstrip() if loop.first else "
    "m.content.rstrip() }}</s>{% endfor %}",
    # In the shapes of those that newer families have.
    "gemma 3": "<s>{% set s = messages[0].content + '\n\n' if messages[0].role == "
    "'system' else '' %}{% for m in messages if m.role != 'system' %}<start>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ s if loop.first }}"
    "{{ m.content | trim }}<end>\n{% endfor %}<start>model\n",
    "gemma 4": "<s>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' "
    "else m.role }}\n{{ m.content | trim }}<turn|>\n{% endfor %}<|turn>model\n",
    "phi 3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
    "{% endfor %}<|assistant|>\n",
    "phi 4": "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}"
    "<|im_end|>{% endfor %}<|im_start|>assistant<|im_sep|>",
    "glm 4": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% endfor %}<|assistant|>\n",
    "granite": "{% if messages[0].role != 'system' %}<|start_of_role|>system"
    "<|end_of_role|>You are Granite.<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}<|start_of_role|>assistant<|end_of_role|>",
    "smollm 3": "<s>system\n## Metadata\n\n{% if "
    "messages[0].role == 'system' %}{{ messages[0].content.rstrip() }}\n\n{% endif %}"
    "</s>\n{% for m in messages if m.role != 'system' %}<s>{{ m.role }}\n"
    "{{ '<think>\n\n</think>\n' + m.content.lstrip('\n') if m.role == 'assistant' else "
    "m.content }}</s>\n{% endfor %}<s>assistant\n",
    "olmo 3": "{% if messages[0].role != 'system' %}<s>system\nYou are helpful.</s>\n"
    "{% endif %}{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n"
    "{% endfor %}<s>assistant\n",
    "qwen 3.5": "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' "
    "%}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}"
    "{{ m.content | trim }}{% endif %}</s>\n{% endfor %}<s>assistant\n<think>\n",
    "gpt-oss": "<|start|>system<|message|>You are ChatGPT."
    "<|end|>{% for m in messages %}<|start|>{% if m.role == 'system' %}developer"
    "<|message|># Instructions\n\n{{ m.content }}\n\n{% elif m.role == 'assistant' %}"
    "assistant<|channel|>final<|message|>{{ m.content }}{% else %}user<|message|>"
    "{{ m.content }}{% endif %}<|end|>{% endfor %}<|start|>assistant",
    "ministral 3": "<s>{% for m in messages %}{% if m.role == 'system' %}"
    "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% elif m.role == 'user' %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
}
TURNS = (
    Turn("system", " Answer from the text:\nthe cat is red. "),
    Turn("user", "Which cat?\n"),
    Turn("assistant", "\n The red one."),
    Turn("user", " And which dog? "),
)


@pytest.mark.parametrize("template", CHATS)
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:], TURNS[:2], TURNS[3:]], ids=len)
def test_a_conversation_is_what_the_template_makes_of_it(template, turns):
    tokenizer = wrap(CHATS[template])
    example = Example("None.", turns=turns)
    made = tokenizer.prompt(example)
    messages = [turn._asdict() for turn in turns]
    whole = tokenizer.hf.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert made.text == whole
    said = [made.text[slice(*place)].strip() for place in made.document]
    assert said == [turn.content.strip() for turn in turns]
    assert made.user == (min(made.document)[0], max(made.document)[1])
    row = tokenizer.encode_example(example)
    assert row.prompt_ids.tolist() == tokenizer.hf.encode(
        whole, add_special_tokens=False
    )
    inside = pieces(tokenizer, row.prompt_ids[row.document])
    assert inside == "".join(
        made.text[slice(*place)] for place in sorted(made.document)
    )
    assert not row.question.any()


def test_a_turn_of_the_user_is_a_prompt(chat):
    alone = Example("r", turns=(Turn("user", " What? "),))
    assert alone.prompt == alone.source_text == " What? "
    ours = chat.encode_example(alone)
    theirs = chat.encode_example(Example("r", prompt=" What? "))
    for field in dataclasses.fields(ours):
        np.testing.assert_array_equal(
            getattr(ours, field.name), getattr(theirs, field.name)
        )


def test_conversations_that_cannot_be_read(plain):
    turns = TURNS[1:]
    with pytest.raises(ValueError, match="user, assistant, user need a chat template"):
        plain.prompt(Example("r", turns=turns))
    dropping = wrap("{{ messages[-1].content }}</s>")
    with pytest.raises(ValueError, match="shows the user's text 0 times, not once"):
        dropping.prompt(Example("r", turns=turns))
    assert dropping.prompt(Example("r", prompt="a")).text == "a</s>"
    strict = wrap("{{ raise_exception('no system') if messages[0].role == 'system' }}")
    with pytest.raises(ValueError, match="turns of system, user .*no system"):
        strict.prompt(Example("r", turns=TURNS[:2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": (Turn("bot", "x"),)}, "turn 0 is by 'bot'; use system, user"),
        ({"turns": TURNS[:3]}, "the turn before the answer is by 'assistant'"),
        ({"turns": TURNS, "prompt": "x"}, "got 'turns' and 'prompt'"),
        ({"turns": TURNS, "context": "x"}, "got 'turns' and 'context'"),
        ({"turns": TURNS, "question": "x"}, "got 'turns' and 'question'"),
        ({"turns": TURNS, "templated": True}, "got 'turns' and 'templated'"),
        ({"turns": (Turn("user", " "),)}, "prompt is ' '; it must hold text"),
    ],
)
def test_turns_are_the_whole_prompt(options, message):
    with pytest.raises(ValueError, match=message):
        Example("r", **options)
    again = dataclasses.replace(Example("r", turns=TURNS), response="s")
    assert again.turns == TURNS and again.prompt.startswith(" Answer from")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content | upper }}!", "shows the user's text 0 times"),
        ("{{ messages[0].content }}={{ messages[0].content }}", "2 times"),
        ("Q: {{ messages[0].content | replace('b', '') }}", "0 times"),
        ("{{ messages[0].content | replace('\n', ' ') }}", "0 times"),
        ("{{ messages[0].content | e }}", "0 times"),
        ("{{ messages[0].content | indent }}", "0 times"),
        ("{{ messages[0].content.strip(' ') }}", "changes the space around"),
        ("{{ raise_exception('system first') }}", "cannot render .*system first"),
    ],
)
def test_templates_that_cannot_be_followed(template, message):
    with pytest.raises(ValueError, match=message):
        wrap(template).render("a b")


@pytest.mark.parametrize(
    "today, want",
    [
        (
            "{% if not date_string is defined %}{% set date_string = "
            "strftime_now('%d %b %Y') %}{% endif %}{{ date_string }} ",
            "26 Jul 2024 ",
        ),
        # as those of SmolLM3, Granite and Ministral
        ("{% set today = strftime_now('%B %d, %Y') %}{{ today }}: ", "July 26, 2024: "),
        # as that of GPT-OSS
        (
            "{% macro day() %}On {{ strftime_now('%Y-%m-%d') }}{% endmacro %}"
            "{{ day() }}: ",
            "On 2024-07-26: ",
        ),
    ],
)
def test_dates_in_templates_stand_still(today, want):
    assert wrap(today + "{{ messages[0].content }}").render("hi")[0] == want


@pytest.mark.parametrize(
    ("template", "adds", "prompt", "templated", "count"),
    [
        (None, True, "raw", False, 1),
        (None, True, "<s>raw", True, 1),
        (None, False, "raw", False, 0),
        (None, False, "<s>raw", True, 1),
        (LLAMA2, True, "hi", False, 1),
        (LLAMA2, False, "hi", False, 1),
        (LLAMA2, True, "<s>[INST] hi [/INST]", True, 1),
        (LLAMA2, True, "[INST] hi [/INST]", True, 1),
        (CHATML, True, "hi", False, 1),
        (CHATML, False, "hi", False, 0),
    ],
)
def test_never_two_bos(template, adds, prompt, templated, count):
    tokenizer = wrap(template, add_bos_token=adds)
    example = Example(response="ok", prompt=prompt, templated=templated)
    encoded = tokenizer.encode_example(example)
    ids = encoded.prompt_ids.tolist()
    assert ids.count(tokenizer.bos_id) == count
    assert ids[:count] == [tokenizer.bos_id] * count
    assert tokenizer.bos_id not in encoded.response_ids
    assert encoded.context[0] and not encoded.context[-1]


def test_a_finished_prompt_gets_no_second_template():
    text = "<s>[INST] hi [/INST]"
    finished = Example("r", prompt=text, templated=True)
    assert wrap(LLAMA2).prompt(finished).text == text
    ids = wrap(LLAMA2).encode_prompt(finished).prompt_ids.tolist()
    assert (
        ids == wrap(LLAMA2).encode_prompt(Example("r", prompt="hi")).prompt_ids.tolist()
    )


@pytest.mark.parametrize("template", [LLAMA2, CHATML])
def test_a_finished_prompt_is_marked_as_one_that_was_not(template):
    """What opens the answer is no context, whoever wrote it."""
    tokenizer = wrap(template)
    parts = dict(context="Opened in 1887.", question="When was it opened?")
    plain = Example("In 1887.", **parts)
    text = tokenizer.prompt(plain).text
    want = tokenizer.encode_prompt(plain)
    whole, bare = (
        tokenizer.encode_prompt(Example("-", prompt=text, templated=True, **more))
        for more in (parts, {})
    )
    for name in ("prompt_ids", "context", "document", "question"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(want, name))
    np.testing.assert_array_equal(bare.context, want.context)
    assert (bare.document <= bare.context).all() and not bare.question.any()
    # Behind it may be an empty thought; of another template, and where what follows is
    # no opening of an answer, all is context but for what queries the first token.
    thought = Example("-", prompt=f"{text}<think>\n\n</think>\n\n", templated=True)
    assert tokenizer.encode_prompt(thought).context.sum() == want.context.sum()
    for more in ("Human: when?\n\nAI:", f"{text} Rain, said a tool. [END]"):
        other = Example("-", prompt=more, templated=True)
        assert tokenizer.encode_prompt(other).context[:-1].all()
    behind = Example("-", prompt=f"{text}<Rain>", context="<Rain>", templated=True)
    assert tokenizer.encode_prompt(behind).document.any()


@pytest.mark.parametrize(
    ("template", "stop", "want"),
    [
        (CHATML, None, "</s>"),  # a template's end that stops nothing
        (CHATML, ("</s>", "<|end|>"), "<|end|>"),
        (LLAMA2, ("</s>", "<|end|>"), "</s>"),
        (None, ("</s>", "<|end|>"), "</s>"),
        ("{{ messages[0].content }}", ("<|end|>", "</s>"), "</s>"),  # no answers
    ],
)
def test_a_response_ends_as_the_model_ends_its_own(template, stop, want):
    hf = wrap(template).hf
    hf.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    ids = stop and [hf.convert_tokens_to_ids(one) for one in stop]
    tokenizer, example = Tokenizer(hf, ids), Example("ok", prompt="hi")
    found = tokenizer.encode_example(example)
    assert found.response_ids[-1] == hf.convert_tokens_to_ids(want)
    assert found.offsets[-1].tolist() == [2, 2]
    bare = tokenizer.encode_example(example, eos=False)
    assert bare.response_ids.tolist() == found.response_ids[:-1].tolist()


def test_bare_prompt(plain, chat):
    for tokenizer in (plain, chat):
        example = Example(response="It is Paris.", prompt="The capital of France?")
        encoded = tokenizer.encode_example(example)
        ids = encoded.prompt_ids
        assert pieces(tokenizer, ids[encoded.document]) == example.prompt
        assert not encoded.question.any()
        assert not encoded.context[-1]
    last = encoded.context.nonzero()[0][-1]
    assert encoded.context[: last + 1].all()
    assert tokenizer.decode(ids[: last + 1]) == "<|user|>\nThe capital of France?"


@pytest.mark.parametrize("question", ["Which 東京 café?", "", None])
def test_context_and_question(chat, question):
    example = Example(response="x", context="naïve 東京 🙂 text", question=question)
    encoded = chat.encode_example(example)
    ids = encoded.prompt_ids
    assert chat.decode(ids[encoded.document]) == example.context
    assert chat.decode(ids[encoded.question]) == (question or "")
    assert not (encoded.document & encoded.question).any()
    assert chat.decode(ids) == chat.prompt(example).text


def test_response_and_eos(plain):
    example = Example(response="Paris 東京.", prompt="Where?")
    encoded = plain.encode_example(example)
    assert encoded.response_ids[-1] == plain.eos_id
    assert encoded.offsets[-1].tolist() == [9, 9]
    assert plain.decode(encoded.response_ids[:-1]) == example.response
    without = plain.encode_example(example, eos=False)
    np.testing.assert_array_equal(without.response_ids, encoded.response_ids[:-1])
    assert {a.dtype for a in (without.prompt_ids, without.offsets)} == {np.dtype("i4")}
    ended = plain.encode_example(Example(response="Paris</s>", prompt="Where?"))
    assert ended.response_ids.tolist().count(plain.eos_id) == 1
    assert plain.decode(ended.response_ids[:-1]) == "Paris</s>"


def test_encoding_errors_name_the_example():
    bare = wrap(eos=None)
    example = Example(response="r", prompt="p", id="row 7")
    with pytest.raises(ValueError, match="example 'row 7': .*no EOS.*use eos=False"):
        bare.encode_example(example)
    bare._backend.normalizer = normalizers.Replace("r", "")
    with pytest.raises(ValueError, match="'row 7': .*no token of the response"):
        bare.encode_example(example, eos=False)
    with pytest.raises(ValueError, match="example 'x': .*surrogate"):
        bare.encode_example(Example(response="\udc00", prompt="p", id="x"), eos=False)


# --- batches ------------------------------------------------------------------------


def encoded(prompt, response, first=10):
    context = np.arange(prompt) < prompt - 1
    return Encoded(
        prompt_ids=np.arange(first, first + prompt),
        response_ids=np.arange(500, 500 + response),
        offsets=np.stack([np.arange(response), np.arange(response) + 1], axis=1),
        context=context,
        document=context,
        question=~context,
    )


def test_buckets():
    prompts = sorted({bucket(n, 64) for n in range(1, 1025)})
    assert prompts == [64, 96, 128, 192, 256, 384, 512, 768, 1024]
    responses = sorted({bucket(n, 16) for n in range(0, 257)})
    assert responses == [16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(bucket(n, 16) == n for n in responses)


def test_collate_has_its_seam_at_p():
    rows = [encoded(3, 2), encoded(65, 17)]
    batch = collate(rows, pad_id=7)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
    batch = jax.tree.map(np.asarray, batch)
    assert batch.prompt_length == 96 and batch.tokens.shape == (2, 96 + 24)
    for row, one in enumerate(rows):
        valid = batch.valid[row]
        expected = np.concatenate([one.prompt_ids, one.response_ids])
        np.testing.assert_array_equal(batch.tokens[row][valid], expected)
        assert (batch.tokens[row][~valid] == 7).all()
        assert batch.tokens[row, 96] == 500
        assert batch.response_mask[row].sum() == len(one.response_ids)
        for name in ("context", "document", "question"):
            mask = getattr(batch, name)[row]
            assert not mask[~valid].any() and not mask[96:].any()
            held = mask[valid][: len(one.prompt_ids)]
            np.testing.assert_array_equal(held, getattr(one, name))
        held = batch.offsets[row]
        np.testing.assert_array_equal(held[: len(one.offsets)], one.offsets)
        assert not held[len(one.offsets) :].any()


def test_dummy_rows_keep_the_shape():
    batch = collate([encoded(3, 2)], pad_id=7, batch_size=3)
    batch = jax.tree.map(np.asarray, batch)
    assert batch.tokens.shape == (3, 64 + 16)
    assert (batch.tokens[1:] == 7).all()
    assert batch.valid[1:].nonzero()[1].tolist() == [63, 64, 63, 64]
    for mask in (batch.context, batch.document, batch.question, batch.offsets):
        assert not mask[1:].any()


def test_collate_errors():
    rows = [encoded(5, 4)]
    assert collate(rows, 0, prompt_length=5, response_length=4).tokens.shape == (1, 9)
    with pytest.raises(ValueError, match="prompt_length=4 is too small .* 5 tokens"):
        collate(rows, 0, prompt_length=4)
    with pytest.raises(ValueError, match="response_length=3 is too small .* 4 tokens"):
        collate(rows, 0, response_length=3)
    with pytest.raises(ValueError, match="2 examples do not fit batch_size=1"):
        collate(rows * 2, 0, batch_size=1)
    with pytest.raises(ValueError, match="no example to collate"):
        collate([], 0)


def test_plan_fills_batches_before_it_adds_shapes():
    sizes = [(3, 2), (70, 2), (5, 9), (64, 17), (96, 16), (1, 1), (2, 2), (3, 3)]
    rows = [encoded(*size) for size in sizes]
    batches = plan(rows, batch_size=2)
    # Buckets (64, 16), (64, 24) and (96, 16): five, one and two rows.  The fifth row
    # joins the sixth; nothing may move from (64, 24) to the shorter (96, 16).
    assert [batch[:3] for batch in batches] == [
        ([0, 2], 64, 16),
        ([5, 6], 64, 16),
        ([3, 7], 64, 24),
        ([1, 4], 96, 16),
    ]
    shapes = {
        collate([rows[i] for i in batch.rows], 0, *batch[1:4]).tokens.shape
        for batch in batches
    }
    assert shapes == {(2, 80), (2, 88), (2, 112)}
    with pytest.raises(ValueError, match="batch_size is 0"):
        plan(rows, 0)


def test_plan_keeps_every_row_once():
    rng = np.random.default_rng(0)
    sizes = zip(rng.integers(1, 300, 50), rng.integers(1, 80, 50), strict=True)
    rows = [encoded(int(p), int(r)) for p, r in sizes]
    batches = plan(rows, batch_size=8)
    assert sorted(i for batch in batches for i in batch.rows) == list(range(50))
    assert all(len(batch.rows) <= 8 for batch in batches)
    for batch in batches:
        prompt, response = lengths([rows[i] for i in batch.rows])
        assert prompt <= batch.prompt_length and response <= batch.response_length
    shapes = {batch[1:] for batch in batches}
    assert len(shapes) < len({lengths([row]) for row in rows}) / 2


@pytest.mark.parametrize(
    ("answers", "want"),
    [
        ([2, 2], [(2, 4, 4)]),  # fewer than a batch, but all there is
        ([5], [(1, 5, 6)]),  # two programs would cost more than they save
        ([6], [(2, 6, 6)]),
        ([8], [(8, 8, 8)]),
        ([6, 6], [(4, 8, 8), (2, 4, 4)]),
        ([2] * 9 + [1] * 3, [(2, 18, 6), (1, 3, 3)]),
    ],
)
def test_prompts_are_shared_where_that_fills_batches(answers, want):
    """By number of answers to a prompt: copies, rows and size of batches."""
    prompts = [number for number, count in enumerate(answers) for _ in range(count)]
    np.random.default_rng(0).shuffle(prompts)
    rows = [encoded(10, 5, prompt) for prompt in prompts]
    found = collections.defaultdict(int)
    for batch in plan_shared(rows, 8):
        assert len(batch.rows) <= batch.size <= 8
        for run in np.reshape(batch.rows, (-1, batch.copies)):
            assert len({prompts[row] for row in run}) == 1
        found[batch.copies, batch.size] += len(batch.rows)
    assert [(copies, n, size) for (copies, size), n in found.items()] == want


@given(
    st.lists(st.integers(0, 4), max_size=40), st.integers(1, 9), st.sampled_from([1, 4])
)
def test_shared_plans_hold_every_row_once(prompts, batch_size, ways):
    rows = [encoded(70 * (p + 1), 7 * (at % 5 + 1), p) for at, p in enumerate(prompts)]
    batches = plan_shared(rows, batch_size, ways)
    assert sorted(row for batch in batches for row in batch.rows) == [*range(len(rows))]
    for rows_of, *columns, size, copies in batches:
        # Each way reads as much as a lone one, and no prompt lies on two.
        assert size <= ways * batch_size and size % (ways * copies) == 0
        batch = collate([rows[row] for row in rows_of], 0, *columns, size)
        heads = np.asarray(batch.tokens)[:, : columns[0]]
        np.testing.assert_array_equal(heads, np.repeat(heads[::copies], copies, 0))


def test_check_length():
    check_length(encoded(5, 4), 9)
    with pytest.raises(
        ValueError, match="5 prompt .* 4 response .* 9, .* of 8; shorten"
    ):
        check_length(encoded(5, 4), 8)
    with pytest.raises(ValueError, match="20 response .* context of 8; split the resp"):
        check_length(encoded(5, 20), 8)


# --- the real model -----------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return Tokenizer.from_gguf(GGUFSource(smollm2_gguf))


def test_smollm2_texts(smollm2):
    for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["texts"]:
        text = case["text"]
        assert smollm2.encode(text, [(0, len(text))]) == case["ids"]
        assert smollm2.decode(case["ids"]) == case["text"]


def test_smollm2_chat(smollm2):
    case = json.loads(GOLDEN.read_text(encoding="utf-8"))["chat"]
    example = Example(
        response="Brazil.", context=case["context"], question=case["question"]
    )
    encoded = smollm2.encode_example(example)
    assert encoded.prompt_ids.tolist() == case["ids"]
    assert smollm2.decode(case["ids"])[-23:] == "\n<|im_start|>assistant\n"
    decoded = smollm2.decode(encoded.prompt_ids[encoded.document])
    assert decoded.rstrip() == case["context"]
    decoded = smollm2.decode(encoded.prompt_ids[encoded.question])
    assert decoded == case["question"]
    assert smollm2.decode(encoded.response_ids) == "Brazil.<|im_end|>"
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.pad_id) == (1, 2, 2)
    assert len(smollm2.hf) == 49152 and not smollm2.adds_bos
