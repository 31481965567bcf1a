"""Embeddings and classifications of texts: windows, order, batches, pooling, errors."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from flax import nnx
from tokenizers import models, normalizers, pre_tokenizers, processors

import sampling_oracles as oracles
import tiny
import tiny_encoders
from jaxhal.models import registry
from jaxhal.models.encoders import encoder as encoder_lib
from jaxhal.models.encoders import encoding, text_encoder, windows
from jaxhal.models.encoders.encoding import (
    bertscores,
    classify,
    embed,
    load_encoder,
    token_states,
)

WORDS = [f"w{number}" for number in range(45)]
LABELS = {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"}


def write_tokenizer(folder: Path, roberta: bool = False) -> None:
    """A token a word; settings that cut and pad, as some checkpoints have them."""
    vocab = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
    vocab |= {word: len(vocab) + at for at, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if roberta:
        backend.post_processor = processors.RobertaProcessing(
            ("[SEP]", 3), ("[CLS]", 2)
        )
    else:
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.enable_truncation(6)
    backend.enable_padding(length=12)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]"
    ).save_pretrained(folder)


def write(folder: Path, case: str = "bert", **changes) -> Path:
    """A folder of a tiny model with a tokenizer."""
    want = tiny_encoders.golden(case)
    tiny.write_folder(folder, want["config"] | changes, want["shapes"])
    write_tokenizer(folder, case == "roberta")
    return folder


@pytest.fixture(scope="module")
def nli(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("nli"), id2label=LABELS)
    write_pooling(folder, mean=True)
    return load_encoder(folder)


@pytest.fixture(scope="module")
def minilm():
    """The real small encoder; skipped only where JAXHAL_OFFLINE forbids to get it."""
    try:
        return load_encoder("all-minilm-l6-v2")
    except RuntimeError as error:
        if os.environ.get("JAXHAL_OFFLINE"):
            pytest.skip(str(error))
        raise


def words(start: int, count: int) -> str:
    return " ".join(WORDS[(start + 7 * at) % 45] for at in range(count))


@jax.jit
def hidden_states(encoder, row, types):
    model, valid = (
        nnx.merge(encoder.graphdef, encoder.params),
        jnp.ones(row.shape, bool),
    )
    return encoder_lib.run(model, encoder_lib.embed(model, row, types, valid), valid)


def alone(encoder, ids, types=None):
    """Hidden states ``[1 seq width]`` of one row of ids without padding."""
    row = jnp.asarray(ids)[None]
    types = jnp.zeros_like(row) if types is None else jnp.asarray(types)[None]
    return hidden_states(encoder, row, types)


def test_no_room_for_texts(tmp_path):
    tokenizer = load_encoder(write(tmp_path)).tokenizer
    assert len(tokenizer.windows(words(0, 3), 3)) == 3
    assert len(tokenizer.pair_windows(words(0, 3), words(0, 2), 5, True)) == 2
    with pytest.raises(ValueError, match="length is 2, .* adds 2 tokens.* at least 3"):
        tokenizer.windows("w0", 2)
    with pytest.raises(ValueError, match="length is 4, .* adds 3 tokens.* at least 5"):
        tokenizer.pair_windows("w0", "w1", 4, True)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) + 4 for word in text.split()]


@pytest.mark.parametrize("case", ["bert", "roberta"])
def test_tokens_are_those_of_transformers(case, tmp_path):
    tokenizer = load_encoder(write(tmp_path, case)).tokenizer
    first, second = words(0, 5), words(3, 8)
    hf = tokenizer.hf
    hf.backend_tokenizer.no_truncation()
    hf.backend_tokenizer.no_padding()
    (pair,) = tokenizer.pair_windows(first, second, 40, True)
    for ours, theirs in (
        (tokenizer.windows(first, 40), hf(first, return_token_type_ids=True)),
        (pair, hf(first, second, return_token_type_ids=True)),
    ):
        assert len(ours) == 1
        assert ours[0].ids == theirs["input_ids"]
        assert ours[0].type_ids == theirs["token_type_ids"]


def test_embeddings_are_means_over_tokens(nli):
    texts = [words(at, count) for at, count in enumerate((17, 1, 30, 17, 1))]
    found = embed(nli, texts)
    assert found.shape == (5, 32) and found.dtype == np.float32
    for text, row in zip(texts, found, strict=True):
        hidden = alone(nli, [2, *ids(text), 3])
        np.testing.assert_allclose(row, np.mean(hidden[0], axis=0), atol=2e-6)


def test_first_token_and_unit_length(tmp_path):
    folder = write(tmp_path)
    write_pooling(folder, cls=True, normalize=True)
    encoder = load_encoder(folder)
    assert encoder.pooling == text_encoder.Pooling("cls", True)
    text = words(2, 9)
    hidden = alone(encoder, [2, *ids(text), 3])
    want = hidden[0, 0] / jnp.linalg.norm(hidden[0, 0])
    np.testing.assert_allclose(embed(encoder, [text])[0], want, atol=1e-6)


def test_long_texts_are_read_in_windows(nli):
    # The encoder takes 40 tokens: 38 words and two special tokens; 100 words are three
    # windows of 34, 34 and 32.
    text = words(0, 100)
    parts = text.split()[:34], text.split()[34:68], text.split()[68:]
    short = embed(nli, [" ".join(part) for part in parts])
    want = np.average(short, axis=0, weights=[36, 36, 34])
    found = embed(nli, [words(1, 38), text, words(5, 2)])
    np.testing.assert_allclose(found[1], want, atol=1e-6)
    assert len(nli.tokenizer.windows(words(1, 38), 40)) == 1
    assert len(nli.tokenizer.windows(words(1, 39), 40)) == 2


def test_probabilities(nli):
    assert nli.labels == ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
    pairs = [(words(at, 4), words(at + 1, 3 + 17 * (at % 2))) for at in range(4)]
    found = classify(nli, pairs)
    model = nnx.merge(nli.graphdef, nli.params)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    for (first, second), row in zip(pairs, found, strict=True):
        a, b = [2, *ids(first), 3], [*ids(second), 3]
        types = [0] * len(a) + [1] * len(b)
        hidden = alone(nli, a + b, types)
        want = jax.nn.softmax(model.head(hidden[:, 0])[0])
        np.testing.assert_allclose(row, want, atol=2e-6)


@pytest.mark.parametrize("swap", [False, True])
def test_the_longer_text_is_read_in_overlapping_windows(nli, swap):
    # 40 tokens less three special ones and 9 words leave 28, of which 7 overlap.
    long, short = words(3, 80).split(), words(1, 9)
    starts = (0, 21, 42, 63)
    pieces = [" ".join(long[start : start + 28]) for start in starts]
    assert len(pieces[-1].split()) == 17

    def pair(piece):
        return (short, piece) if swap else (piece, short)

    rows = classify(nli, [pair(piece) for piece in pieces])
    # Of a premise one window is enough; all of a hypothesis have to follow.
    best = rows[np.argmin(rows[:, 2]) if swap else np.argmax(rows[:, 2])]
    assert len(set(rows[:, 2].round(6))) == 4
    found = classify(nli, [pair("w1 w2"), pair(" ".join(long)), pair("w7")])
    np.testing.assert_allclose(found[1], best, atol=1e-6)


@pytest.mark.parametrize("counts", [(80, 60), (45, 29), (30, 70)])
def test_both_texts_are_read_in_windows_where_neither_leaves_room(nli, counts):
    # Three special tokens of 40 leave 37: 18 for each text, of which 4 overlap.
    first, second = (words(at, count).split() for at, count in enumerate(counts))
    windows = [
        [
            " ".join(text[start : start + 18])
            for start in range(0, max(1, len(text) - 4), 14)
        ]
        for text in (first, second)
    ]
    lowest = None
    for part in windows[1]:
        rows = classify(nli, [(piece, part) for piece in windows[0]])
        highest = rows[np.argmax(rows[:, 2])]
        if lowest is None or highest[2] < lowest[2]:
            lowest = highest
    pair = (" ".join(first), " ".join(second))
    found = classify(nli, [("w1", "w2"), pair, ("w3", words(0, 60)), pair])
    np.testing.assert_allclose(found[1], lowest, atol=1e-6)
    np.testing.assert_array_equal(found[1], found[3])


def test_equal_texts_are_read_once_and_order_is_kept(nli, monkeypatch):
    texts = [words(at % 4, 1 + 9 * (at % 4)) for at in range(11)]
    read = []
    collate = windows.collate

    def counted(encoder, pieces, batch_size):
        read.extend(piece.ids for piece in pieces)
        return collate(encoder, pieces, batch_size)

    monkeypatch.setattr(windows, "collate", counted)
    found = embed(nli, texts)
    assert len(read) == 4
    assert [len(row) for row in read] == sorted(len(row) for row in read)
    states = token_states(nli, texts)
    assert len(read) == 8
    assert all(row is states[at % 4] for at, row in enumerate(states))
    singles = np.concatenate([embed(nli, [text]) for text in texts])
    np.testing.assert_allclose(found, singles, atol=2e-6)
    pair = ("w1 w2", "w3")
    rows = classify(nli, [pair, ("w3", "w1 w2"), list(pair)])
    assert (rows[0] == rows[2]).all() and (rows[0] != rows[1]).any()


@pytest.mark.parametrize("case", ["roberta", "deberta-conv", "modernbert"])
def test_token_states_are_those_of_transformers(case, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    encoder = load_encoder(write(tmp_path, case))
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    texts = [words(at, count) for at, count in enumerate((17, 1, 5, 17))]
    layers = 0, 2, encoder.config.num_hidden_layers
    found = {layer: token_states(encoder, texts, layer=layer) for layer in layers}
    last = token_states(encoder, texts)
    for at, text in enumerate(texts):
        with torch.no_grad():
            row = torch.tensor([[2, *ids(text), 3]])
            theirs = model(row, output_hidden_states=True)
        for layer in layers:
            want = theirs.hidden_states[layer][0, 1:-1].numpy()
            got = found[layer][at]
            assert got.shape == want.shape and got.dtype == np.float32
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
        want = theirs.last_hidden_state[0, 1:-1].numpy()
        np.testing.assert_allclose(last[at], want, atol=1e-5 * np.abs(want).max())


def test_token_states_of_long_texts_are_those_of_windows(nli):
    parts = [words(0, 100).split()[at : at + 34] for at in (0, 34, 68)]
    want = token_states(nli, [" ".join(part) for part in parts])
    short, long = token_states(nli, [words(5, 2), words(0, 100)])
    assert short.shape == (2, 32) and long.shape == (100, 32)
    np.testing.assert_allclose(long, np.concatenate(want), atol=2e-6)


@pytest.mark.parametrize("layer, at_once", [(None, 4096), (1, 16)])
def test_bertscores_equal_loops(nli, layer, at_once, monkeypatch):
    monkeypatch.setattr(encoding, "_COMPARED", at_once)
    texts = [words(at, count) for at, count in enumerate((17, 1, 5, 60, 9, 30))]
    pairs = [(a, b) for a in texts for b in texts[::-1]]
    pairs = [*pairs, list(pairs[4]), *pairs[:3]]
    found = bertscores(nli, pairs, layer=layer)
    assert found.shape == (40, 3) and found.dtype == np.float32
    states = {text: token_states(nli, [text], layer=layer)[0] for text in texts}
    for pair, row in zip(pairs, found, strict=True):
        want = oracles.bertscore(*(states[text].astype(float) for text in pair))
        np.testing.assert_allclose(row, want, atol=2e-6)
    assert (found[36] == found[4]).all() and (found[37:] == found[:3]).all()


def test_pairs_of_like_length_are_compared_in_one_program(nli):
    encoding._compared.clear_cache()
    texts = [words(at, 1 + at % 38) for at in range(45)]
    bertscores(nli, [(a, b) for a in texts for b in texts])
    # Columns of 16, 24, 32 and 48; 2,025 pairs, of which the longer decides.
    assert encoding._compared._cache_size() == 4


def test_the_first_word_is_compared_like_any_other(tmp_path):
    encoder = load_encoder(write(tmp_path))
    words = ["ant", "Ġant", "bee", "Ġbee", "cat", "Ġcat"]  # Ġ is a space before
    vocab = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
    vocab |= {word: len(vocab) + at for at, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]"
    )
    tokenizer = text_encoder.TextTokenizer(hf)
    encoder = dataclasses.replace(encoder, tokenizer=tokenizer)
    pair = "ant bee", "cat ant bee"
    (found,) = bertscores(encoder, [pair], layer=0)
    spaced, plain = (
        oracles.bertscore(*token_states(encoder, [before + t for t in pair], layer=0))
        for before in (" ", "")
    )
    np.testing.assert_allclose(found, spaced, atol=1e-6)
    assert np.abs(found - plain).max() > 1e-3


def test_few_programs_are_compiled(nli):
    windows._read.clear_cache()
    texts = [words(at, 1 + at % 38) for at in range(45)]
    embed(nli, texts)
    # 45 distinct texts in batches of 8, the last of 5 rows in the bucket of 6; columns
    # of 16, 24, 32 and 40.
    assert windows._read._cache_size() <= 5
    embed(nli, texts[::-1])
    assert windows._read._cache_size() <= 5


def test_bfloat16(tmp_path):
    folder = write(tmp_path, "modernbert", id2label=LABELS)
    pairs = [("w1 w2 w3", "w4"), ("w5", "w6 w7")]
    whole, half = (
        classify(load_encoder(folder, dtype=dtype), pairs)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, whole, atol=0.03)
    assert (half != whole).any()


def test_without_entailment_long_pairs_are_an_error(tmp_path):
    encoder = load_encoder(write(tmp_path, "bert"))
    assert encoder.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert classify(encoder, [(words(0, 20), words(1, 17))]).shape == (1, 3)
    with pytest.raises(ValueError, match="pair 1: texts of 20 and 18 .* 37 .*'entail"):
        classify(encoder, [("w1", "w2"), (words(0, 20), words(1, 18))])


@pytest.mark.parametrize(
    "texts, kind, message",
    [
        ([], ValueError, "texts is empty"),
        ("w1", TypeError, "texts is the string 'w1'"),
        (["w1", " \n"], ValueError, r"text 1 is ' \\n'"),
        (["w1", "w2", 3.5], TypeError, "text 2 is 3.5, a float"),
        (["w1", "\ud800"], ValueError, "text 1: .*lone surrogate"),
    ],
)
def test_bad_texts(nli, texts, kind, message):
    for read in (embed, token_states):
        with pytest.raises(kind, match=message):
            read(nli, texts)


@pytest.mark.parametrize("layer", [-1, 4])
def test_unknown_layers(nli, layer):
    message = f"layer is {layer}; encoder .* has 0, its embeddings, to 3"
    with pytest.raises(ValueError, match=message):
        token_states(nli, ["w1"], layer=layer)
    with pytest.raises(ValueError, match=message):
        bertscores(nli, [("w1", "w2")], layer=layer)


@pytest.mark.parametrize(
    "pairs, kind, message",
    [
        ([], ValueError, "pairs is empty"),
        (["w1"], TypeError, "pair 0 is 'w1'; give two texts"),
        ([("w1", "w2"), ("w1",)], TypeError, "pair 1 is .*give two texts"),
        ([("w1", "w2"), 3], TypeError, "pair 1 is 3; give two texts"),
        ([("w1", "")], ValueError, "the second text of pair 0 is ''"),
        ([("w1", "w2"), (None, "w2")], TypeError, "the first text of pair 1 is None"),
    ],
)
def test_bad_pairs(nli, pairs, kind, message):
    with pytest.raises(kind, match=message):
        classify(nli, pairs)
    with pytest.raises(kind, match=message):
        bertscores(nli, pairs)


def test_encoders_that_cannot(tmp_path, nli):
    plain = load_encoder(write(tmp_path, "bert-headless"))
    with pytest.raises(ValueError, match="does not say how to pool; .*pooling='mean'"):
        embed(plain, ["w1"])
    with pytest.raises(ValueError, match="has no classifier"):
        classify(plain, [("w1", "w2")])


def test_an_encoder_is_loaded_once(tmp_path):
    folder = str(write(tmp_path))
    known = encoding.kept_encoder(folder)
    assert encoding.kept_encoder(folder) is known
    (Path(folder) / "notes.log").write_text("no part of it")
    assert encoding.kept_encoder(folder) is known
    write_pooling(Path(folder), mean=True)
    assert encoding.kept_encoder(folder) is not known


def write_pooling(folder: Path, normalize: bool = False, more: str = "", **modes):
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    raw = {f"pooling_mode_{long}": bool(modes.get(k)) for k, long in names.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(raw))
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize + [more] * bool(more)
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_pooling_is_read_from_the_folder(tmp_path):
    write(tmp_path, "bert-headless")
    assert load_encoder(tmp_path).pooling is None
    write_pooling(tmp_path, mean=True)
    assert load_encoder(tmp_path).pooling == ("mean", False)
    write_pooling(tmp_path, mean=True, normalize=True)
    assert load_encoder(tmp_path, pooling="cls").pooling == ("cls", True)
    write_pooling(tmp_path, max=True)
    with pytest.raises(ValueError, match="asks for pooling_mode_max_tokens; one of"):
        load_encoder(tmp_path)
    write_pooling(tmp_path, mean=True, max=True)
    with pytest.raises(ValueError, match="mean_tokens and pooling_mode_max_tokens"):
        load_encoder(tmp_path)
    assert load_encoder(tmp_path, pooling="mean").pooling == ("mean", False)
    write_pooling(tmp_path, mean=True, more="Dense")
    with pytest.raises(ValueError, match="modules.json has Dense"):
        load_encoder(tmp_path)


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match="no known text .*did you mean 'all-minilm-l6"):
        load_encoder("all-minilm-l6")
    with pytest.raises(ValueError, match=r"known encoders: all-minilm-l6-v2\)"):
        load_encoder("smollm2-135m")
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        load_encoder(tmp_path)
    with pytest.raises(ValueError, match="dtype is <class .*float16'>"):
        load_encoder(tmp_path, dtype=jnp.float16)
    with pytest.raises(ValueError, match="pooling is 'max'"):
        text_encoder._read_pooling(tmp_path, "max")
    want = tiny_encoders.golden("bert")
    tiny.write_folder(tmp_path, want["config"], want["shapes"])
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        load_encoder(tmp_path)


def test_an_encoder_is_a_pytree(nli):
    twice = jax.tree.map(lambda leaf: leaf * 1, nli)
    assert twice.labels == nli.labels and twice.pooling == nli.pooling
    assert (embed(twice, ["w1"]) == embed(nli, ["w1"])).all()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nli))


def test_minilm_gives_the_reference_embeddings(minilm):
    with np.load(tiny.GOLDEN / "minilm.npz") as arrays:
        want = dict(arrays)
    sentences = want["sentences"].tolist()
    for text, row, mask in zip(sentences, want["input_ids"], want["mask"], strict=True):
        assert minilm.tokenizer.windows(text, 256)[0].ids == row[mask].tolist()
    found = embed(minilm, sentences)
    assert np.abs(found[:, ::24] - want["embedding"]).max() < 1e-6
    assert np.abs(found @ found.T - want["cosine"]).max() < 2e-6
    hidden = alone(minilm, want["input_ids"][0][want["mask"][0]])
    theirs = want["hidden"][0][want["mask"][0]]
    assert np.abs(hidden[0, :, :4] - theirs).max() < 1e-5


def test_minilm_finds_what_is_said_again(minilm):
    said = "The Eiffel Tower was finished in 1889."
    others = [
        said,
        "It was in 1889 that the Eiffel Tower was completed.",
        "Interest rates rose by a quarter of a point.",
    ]
    same, again, other = bertscores(minilm, [(said, one) for one in others])[:, 2]
    assert same == pytest.approx(1, abs=1e-5)
    assert 1 > again > other + 0.2


def test_minilm_says_how_it_is_used(minilm):
    assert minilm.pooling == ("mean", True)
    assert minilm.config.context_length == 256
    assert minilm.labels == ()
    assert minilm.name in registry.names("encoder")
    long, near, far = embed(
        minilm,
        [
            "The cat sat on the mat and slept. " * 100,
            "A sleeping cat.",
            "Interest rates rose in March.",
        ],
    )
    assert np.abs(np.linalg.norm(long) - 1) < 1e-6
    assert long @ near > long @ far + 0.3
