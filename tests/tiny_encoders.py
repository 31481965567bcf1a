"""Tiny encoders of every family whose weights follow from their names alone."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import tiny

_BASE = dict(
    vocab_size=53,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=40,
    pad_token_id=0,
    num_labels=3,
)
_DEBERTA = _BASE | dict(
    relative_attention=True,
    position_buckets=8,
    max_relative_positions=-1,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type="p2c|c2p",
    position_biased_input=False,
    type_vocab_size=0,
    pooler_hidden_act="gelu",
)
_MODERN = _BASE | dict(
    num_hidden_layers=4,
    local_attention=6,
    layer_types=["full_attention", "sliding_attention", "sliding_attention"] * 2,
)
_MODERN["layer_types"] = _MODERN["layer_types"][:4]

_EURO = _BASE | dict(
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    mask_token_id=3,
)

_T5 = dict(
    vocab_size=53,
    d_model=32,
    d_ff=48,
    d_kv=6,
    num_layers=3,
    num_heads=4,
    feed_forward_proj="gated-gelu",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    layer_norm_epsilon=1e-5,
    pad_token_id=0,
    num_labels=3,
)

# Their blocks are those of the cases above; the heads are what is new.
_SHORT = {"num_hidden_layers": 1, "num_labels": 2}

# What transformers calls an encoder without a classifier, with one of texts, of tokens.
PLAIN, TEXTS, TOKENS = (
    "Model",
    "ModelForSequenceClassification",
    "ModelForTokenClassification",
)
# name -> (model_type, kind, settings)
CASES = {
    "bert": ("bert", TEXTS, _BASE | dict(type_vocab_size=2)),
    "bert-headless": ("bert", PLAIN, _BASE | dict(layer_norm_eps=1e-5)),
    "roberta": ("roberta", TEXTS, _BASE | dict(pad_token_id=1, type_vocab_size=1)),
    "deberta-v3": ("deberta-v2", TEXTS, _DEBERTA),
    "deberta-conv": (
        "deberta-v2",
        TEXTS,
        _DEBERTA | dict(conv_kernel_size=3, conv_act="gelu", max_relative_positions=20),
    ),
    "deberta-conv-groups": (
        "deberta-v2",
        PLAIN,
        _DEBERTA | dict(conv_kernel_size=5, conv_groups=2, share_att_key=False),
    ),
    "deberta-no-buckets": (
        "deberta-v2",
        TEXTS,
        _DEBERTA
        | dict(
            position_buckets=-1,
            max_relative_positions=7,
            norm_rel_ebd="none",
            pos_att_type=["c2p"],
            share_att_key=False,
            position_biased_input=True,
            type_vocab_size=2,
            pooler_hidden_act="tanh",
        ),
    ),
    "deberta-p2c": (
        "deberta-v2",
        PLAIN,
        _DEBERTA | dict(pos_att_type=["p2c"], share_att_key=False),
    ),
    "deberta-absolute": (
        "deberta-v2",
        PLAIN,
        _DEBERTA
        | dict(
            relative_attention=False, norm_rel_ebd="none", position_biased_input=True
        ),
    ),
    "modernbert": ("modernbert", TEXTS, _MODERN),
    "modernbert-biases": (
        "modernbert",
        TEXTS,
        _MODERN
        | dict(
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            classifier_bias=True,
            classifier_pooling="mean",
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
    "eurobert": ("eurobert", TEXTS, _EURO),
    "eurobert-headless": (
        "eurobert",
        PLAIN,
        _EURO | _SHORT | dict(num_key_value_heads=4),
    ),
    "eurobert-mean": (
        "eurobert",
        TEXTS,
        _EURO
        | dict(
            classifier_pooling="mean",
            num_key_value_heads=1,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
    ),
    "eurobert-bos": ("eurobert", TEXTS, _EURO | _SHORT | {"classifier_pooling": "bos"}),
    "bert-tokens": ("bert", TOKENS, _BASE | _SHORT | dict(type_vocab_size=2)),
    "roberta-tokens": (
        "roberta",
        TOKENS,
        _BASE | _SHORT | dict(pad_token_id=1, type_vocab_size=1),
    ),
    "deberta-tokens": ("deberta-v2", TOKENS, _DEBERTA | _SHORT),
    "modernbert-tokens": (
        "modernbert",
        TOKENS,
        _MODERN
        | dict(num_hidden_layers=2, num_labels=2)
        | dict(layer_types=["full_attention", "sliding_attention"]),
    ),
    "eurobert-tokens": ("eurobert", TOKENS, _EURO | _SHORT),
    "t5-tokens": ("t5", TOKENS, _T5),
}
LENGTHS = (22, 13)
VALID = np.arange(22) < np.array(LENGTHS)[:, None]
TYPES = (VALID & (np.arange(22) >= 9)).astype(np.int32)


def tokens(pad: int) -> np.ndarray:
    some = np.arange(2 * 22).reshape(2, 22) * 37 % 50 + 2
    return np.where(VALID, some, pad).astype(np.int32)


def golden(case: str) -> dict:
    """Config, tensor shapes and Hugging Face's outputs of one case."""
    meta = json.loads((tiny.GOLDEN / "encoders.json").read_text("utf-8"))[case]
    with np.load(tiny.GOLDEN / "encoders.npz") as arrays:
        prefix = f"{case}/"
        outputs = {
            name.removeprefix(prefix): arrays[name]
            for name in arrays.files
            if name.startswith(prefix)
        }
    return {**meta, "outputs": outputs}


_TEXT = (
    "The box holds many red balls, and a café beside it serves 猫 and naïve 🙂 tea. "
)


def write_any_text(
    folder: Path,
    case: str,
    context: int = 1024,
    roberta: bool = False,
    classes: int | None = None,
    **changes,
) -> Path:
    """A folder of a tiny model that reads any text; tokens may cut characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT], trainer)
    kind = processors.RobertaProcessing if roberta else processors.BertProcessing
    own = {"trim_offsets": False} if roberta else {}
    backend.post_processor = kind(("[SEP]", 3), ("[CLS]", 2), **own)
    want = golden(case)
    sizes = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": context}
    old = want["config"]["vocab_size"]
    shapes = {
        name: [sizes["vocab_size"], *shape[1:]] if shape[0] == old else shape
        for name, shape in want["shapes"].items()
    }
    if classes is not None:
        names = {str(at): f"LABEL_{at}" for at in range(classes)}
        sizes |= {"id2label": names, "label2id": None}
        for name in ("classifier.weight", "classifier.bias"):
            shapes[name] = [classes, *shapes[name][1:]]
    tiny.write_folder(folder, want["config"] | sizes | changes, shapes)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]"
    ).save_pretrained(folder)
    return folder


@functools.cache
def lent(case: str, context: int, classes: int | None = None) -> str:
    """Such a folder that all tests of a process share."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(write_any_text(Path(folder), case, context, classes=classes))
