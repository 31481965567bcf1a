"""HHEM-2.1-Open from a folder like its own, against transformers' T5."""

import json

import jax
import numpy as np
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import jaxhal
import tiny
import tiny_encoders
from jaxhal.detectors import pair_grader
from jaxhal.models.encoders import classify, encoder, load_encoder, windows
from jaxhal.models.encoders.text_encoder import Framed
from jaxhal.types import Example
from tiny_lm import tiny_lm

PROMPT = (
    "<pad> Determine if the hypothesis is true given the premise?\n\n"
    "Premise: {text1}\n\nHypothesis: {text2}"
)
CONFIG = {
    "model_type": "HHEMv2Config",
    "architectures": ["HHEMv2ForSequenceClassification"],
    "auto_map": {"AutoConfig": "configuration_hhem_v2.HHEMv2Config"},
    "foundation": "google/flan-t5-base",
    "id2label": {"0": "hallucinated", "1": "consistent"},
    "prompt": PROMPT,
}
FACT = "The box holds many red balls, and a café beside it serves tea."
SENTENCES = ("It holds red balls.", "A café is near.", "The tea costs $4.")
# Within the buckets of one distance, past their last, and in blocks of rows.
PAIRS = [
    (FACT, SENTENCES[0]),
    (" ".join(f"Nr. {at} is red." for at in range(20)), SENTENCES[1]),
    (" ".join(f"Nr. {at} is a café, {at**2}." for at in range(60)), SENTENCES[2]),
]


def tokenizer():
    """Like T5's: pieces of words, <pad> and </s> first, </s> after each text."""
    words = "".join((PROMPT, *sum(PAIRS, ()), "</>")).replace("\n", " ").split()
    letters = sorted({letter for word in words for letter in word})
    pieces = ["▁", *letters, *sorted({f"▁{word}" for word in words if len(word) < 6})]
    scores = [(piece, -4.0 - at / 64) for at, piece in enumerate(pieces)]
    control = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    made = Tokenizer(models.Unigram([*control, *scores], unk_id=2))
    made.add_special_tokens([piece for piece, _ in control])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def write(folder, classes=2, lost=(), **changes):
    """The folder of a tiny one; ``lost`` are ends of names of weights that it lacks."""
    words = tokenizer()
    words.save_pretrained(folder)
    shapes = {
        f"t5.{name}": [len(words) + 3 if shape[0] == 53 else shape[0], *shape[1:]]
        for name, shape in tiny_encoders.golden("t5-tokens")["shapes"].items()
        if not name.endswith(tuple(lost))
    }
    for name in ("t5.classifier.weight", "t5.classifier.bias"):
        shapes[name] = [classes, *shapes[name][1:]]
    return str(tiny.write_folder(folder, CONFIG | changes, shapes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hhem"))


def theirs(folder):
    """What the published code does of pairs, in transformers: logits of token 0."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    state = {
        name.removeprefix("t5."): torch.from_numpy(tensor)
        for name, tensor in load_file(f"{folder}/model.safetensors").items()
    }
    shared = state["transformer.shared.weight"]
    state["transformer.encoder.embed_tokens.weight"] = shared
    sizes = tiny_encoders.CASES["t5-tokens"][2] | dict(
        vocab_size=len(shared),
        num_labels=2,
        relative_attention_max_distance=128,
        layer_norm_epsilon=1e-6,
    )
    config = transformers.T5Config(**sizes)
    model = transformers.T5ForTokenClassification(config).eval()
    model.load_state_dict(state)

    def logits(pairs):
        texts = [PROMPT.format(text1=first, text2=second) for first, second in pairs]
        rows = words(
            texts, return_tensors="pt", padding=True, return_token_type_ids=False
        )
        with torch.no_grad():
            return rows["input_ids"].numpy(), model(**rows).logits[:, 0].numpy()

    return logits


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def test_it_is_that_of_transformers(folder):
    ids, want = theirs(folder)(PAIRS)
    ours = load_encoder(folder)
    assert ours.labels == ("contradiction", "entailment")
    framed = [Framed.of(ours.config.template, *pair) for pair in PAIRS]
    pieces = [ours.tokenizer.framed_windows(one, None, 4096)[0] for one in framed]
    lengths = [len(piece) for piece in pieces]
    assert lengths[0] < 128 < lengths[1] and lengths[2] > 256
    for row, piece in zip(ids, pieces, strict=True):
        assert piece.ids == row[: len(piece)].tolist() and not row[len(piece) :].any()

    @jax.jit
    def read(graphdef, params, tokens, types, valid):
        model = nnx.merge(graphdef, params)
        hidden = encoder.run(model, encoder.embed(model, tokens, types, valid), valid)
        return encoder.logits(model, hidden, valid)

    batch = windows.collate(ours, pieces, len(pieces))
    logits = np.asarray(read(ours.graphdef, ours.params, *batch))
    assert np.ptp(want[:, 0]) > 0.05
    np.testing.assert_allclose(logits, want, atol=1e-4)
    together, alone = classify(ours, PAIRS), classify(ours, PAIRS[:1])
    np.testing.assert_allclose(together, softmax(want), atol=5e-5)
    np.testing.assert_allclose(alone[0], together[0], atol=1e-5)


def test_texts_spell_no_control_tokens(folder):
    ours = load_encoder(folder)
    framed = Framed.of(ours.config.template, "<pad> It </s> is", "<pad></s>")
    (piece,) = ours.tokenizer.framed_windows(framed, None, 4096)
    assert [at for at, i in enumerate(piece.ids) if i in (0, 1)] == [0, len(piece) - 1]


def test_pair_grader(folder):
    """Of a long source the window that supports most, of sentences the least."""
    logits, (long, claim) = theirs(folder), PAIRS[2]

    def score(answer, context, length):
        examples = [Example(answer, context=context)]
        grader = pair_grader(folder, length=length)
        (report,) = jaxhal.score(lm, examples, [grader], progress=False)
        return report.scores["pair_grader"]

    lm = tiny_lm(context=4096)
    support = softmax(logits([(FACT, one) for one in SENTENCES])[1])[:, 1]
    assert np.ptp(support) > 1e-3
    found = score(" ".join(SENTENCES), FACT, None)
    assert found == pytest.approx(1 - support.min(), abs=5e-5)
    ours = load_encoder(folder)
    framed = Framed.of(ours.config.template, long, claim)
    pieces = ours.tokenizer.framed_windows(framed, None, 200)
    parts = [ours.tokenizer.decode(piece.ids, True) for piece in pieces]
    parts = [part.partition("Premise: ")[2].partition(" Hypo")[0] for part in parts]
    support = softmax(logits([(part, claim) for part in parts])[1])[:, 1]
    assert len(parts) > 3 and np.ptp(support) > 1e-3
    assert score(claim, long, 200) == pytest.approx(1 - support.max(), abs=5e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lost": ["shared.weight"]}, r"t5\.transformer\.shared\.weight is missing"),
        ({"lost": ["wi_0.weight"]}, r"DenseReluDense\.wi_0\.weight is missing"),
        ({"lost": ["attention_bias.weight"]}, "relative_attention_bias.* is missing"),
        ({"lost": ["block.1.layer.0.SelfAttention.o.weight"]}, "block.1.* is missing"),
        ({"lost": ["final_layer_norm.weight"]}, "layer_norm.weight is missing"),
        ({"classes": 3}, r"classifier.weight has shape \[3, 32\]"),
        ({"prompt": "Is it {text1}?"}, "prompt is Is it .*give a text with.*{text2}"),
        ({"prompt": ["{text1}", "{text2}"]}, "prompt is .*give a text with"),
        ({"foundation": {"\n": 1}}, "foundation is .*; give the name of a model"),
        ({"model_type": "HHEM"}, "unknown architecture 'HHEM'"),
    ],
)
def test_folders_that_are_not_whole(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_encoder(write(tmp_path, **changes))


def test_the_tokenizer_is_its_foundations(folder, tmp_path, monkeypatch):
    own = tmp_path / "own"
    write(own)
    (own / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="copy that of google/flan-t5-base"):
        load_encoder(own)
    asked = {}

    def download(repo, allow_patterns, ignore_patterns, local_files_only):
        asked[repo] = allow_patterns
        return own if repo.startswith("vectara") else folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = load_encoder("vectara/hallucination_evaluation_model")
    assert [*asked] == ["vectara/hallucination_evaluation_model", "google/flan-t5-base"]
    assert not any("safetensors" in name for name in asked["google/flan-t5-base"])
    want = classify(load_encoder(folder), PAIRS[:1])
    np.testing.assert_array_equal(classify(found, PAIRS[:1]), want)
    # Prompt and foundation are also those of the code where the config lacks them.
    config = {key: CONFIG[key] for key in ("model_type", "architectures")}
    (own / "config.json").write_text(json.dumps(config))
    again = load_encoder("vectara/hallucination_evaluation_model")
    assert again.config == found.config
