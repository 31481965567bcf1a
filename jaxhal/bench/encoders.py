"""How fast are answers classified beside a padded batch in Hugging Face?

Token by token, and as a pair with what they should rest on.  Families have the width
and heads of their published base models, few layers, MiniLM's tokenizer and random
weights in float32.  Each answer is read after several of the bundled contexts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxhal.bench import interleave, peer, peers, row
from jaxhal.datasets import bundled
from jaxhal.detectors.lettucedetect import framed
from jaxhal.models.encoders.encoding import classify, token_probabilities
from jaxhal.models.encoders.text_encoder import Framed
from jaxhal.types import Example

ANSWERS, CONTEXTS, LAYERS = 8, 4, 4
_ROUNDS = 3
_BASE: dict[str, Any] = dict(
    hidden_size=768,
    num_attention_heads=12,
    max_position_embeddings=4096,
    initializer_range=0.05,  # so that tokens differ in their probabilities
    num_labels=2,
    **dict(pad_token_id=0, bos_token_id=101, eos_token_id=102),
)
# By what transformers calls them.
SHAPES: dict[str, dict[str, Any]] = {
    "modernbert": dict(intermediate_size=1152, cls_token_id=101, sep_token_id=102),
    "eurobert": dict(intermediate_size=3072, mask_token_id=103),
    "deberta-v2": dict(
        intermediate_size=3072,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
    ),
}
# The family of graders, and what of a pair they are asked.
GRADER = "deberta-v2"
_LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}


def rows() -> Iterator[dict]:
    asked = answers()
    pairs = [(text.around(text.middle), answer) for text, answer in asked]
    for family in SHAPES:
        found = _encoder(family, "ModelForTokenClassification")
        if found is not None:
            theirs = in_a_batch(found, pairs)
            yield from _speed(
                *(family, found, pairs, "tokens", "token_probabilities"),
                partial(token_probabilities, found.encoder, asked, progress=False),
                lambda theirs=theirs: of_tokens(*theirs()),
            )
    labels = {"num_labels": len(_LABELS), "id2label": _LABELS}
    found = _encoder(GRADER, "ModelForSequenceClassification", **labels)
    if found is not None:
        theirs = in_a_batch(found, pairs)
        yield from _speed(
            *(f"{GRADER} grader", found, pairs, "pairs", "classify"),
            lambda: [classify(found.encoder, pairs)],
            lambda: [theirs()[1]],
        )


def _encoder(family: str, kind: str, **options: Any) -> peers.EncoderPeer | None:
    shape = _BASE | {"num_hidden_layers": LAYERS} | SHAPES[family] | options
    return peer(peers.torch_encoder, family, kind, shape)


def answers() -> list[tuple[Framed, str]]:
    """Bundled answers, each after so many contexts, its own among them."""
    examples = bundled()
    contexts = list(dict.fromkeys(one.context or "" for one in examples))
    around = itertools.cycle(contexts)
    made = []
    for one in examples[:ANSWERS]:
        others = itertools.islice(around, CONTEXTS - 1)
        text = "\n\n".join([one.context or "", *others])
        example = Example(one.response, context=text, question=one.question)
        made.append((framed(example), one.response))
    return made


def in_a_batch(
    found: peers.EncoderPeer, pairs: Sequence[tuple[str, str]]
) -> Callable[[], tuple[Any, np.ndarray]]:
    """Reads all pairs by Hugging Face, padded: tokens, and probabilities of classes."""
    import torch

    firsts, seconds = (list(side) for side in zip(*pairs, strict=True))
    # A classifier of any of these families takes no more than these two.
    names = ("input_ids", "attention_mask")

    def read() -> tuple[Any, np.ndarray]:
        given = found.tokenizer(firsts, seconds, padding=True, return_tensors="pt")
        with torch.no_grad():
            tensors = {name: given[name].to(found.device) for name in names}
            logits = found.model(**tensors).logits
        return given, logits.softmax(-1).cpu().numpy()

    return read


def of_tokens(given: Any, values: np.ndarray) -> list[np.ndarray]:
    """Per answer the probabilities of class 1 of its tokens."""
    masks = [np.array(given.sequence_ids(at)) == 1 for at in range(len(values))]
    return [row[mask, 1] for row, mask in zip(values, masks, strict=True)]


def _speed(
    name: str,
    found: peers.EncoderPeer,
    pairs: Sequence[tuple[str, str]],
    of: str,
    function: str,
    ours: Callable[[], list[np.ndarray]],
    theirs: Callable[[], list[np.ndarray]],
) -> Iterator[dict]:
    said = {}
    functions = {
        "ours": lambda: said.update(ours=ours()),
        "peer": lambda: said.update(peer=theirs()),
    }
    length = max(len(found.tokenizer(*pair)["input_ids"]) for pair in pairs)
    case = f"{name}, {length} tokens"
    times = interleave("encoders", case, functions, _ROUNDS)
    mine, others = np.concatenate(said["ours"]), np.concatenate(said["peer"])
    worst = np.abs(mine - others).max() / others.std(0).max()
    metric = f"largest difference of a probability / spread of {of}"
    yield row("encoders", case, metric, float(worst), 1e-2)
    yield times.pace("answers per second", "ours", len(pairs))
    metric = f"Hugging Face in a batch / {function}"
    yield times.ratio(metric, "peer", "ours", 1.0, "higher")
