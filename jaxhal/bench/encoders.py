"""How fast are answers' tokens classified beside a padded batch in Hugging Face?

Families have the width and heads of their published base models, few layers, MiniLM's
tokenizer and random weights in float32.  Each answer is read after several of the
bundled contexts.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxhal.bench import interleave, peer, peers, row
from jaxhal.datasets import bundled
from jaxhal.detectors.lettucedetect import framed
from jaxhal.models.encoders.encoding import token_probabilities
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


def rows() -> Iterator[dict]:
    asked = answers()
    for family, shape in SHAPES.items():
        shape = _BASE | {"num_hidden_layers": LAYERS} | shape
        found = peer(peers.torch_encoder, family, "ModelForTokenClassification", shape)
        if found is not None:
            yield from _speed(family, found, asked)


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
    found: peers.EncoderPeer, asked: list[tuple[Framed, str]]
) -> Callable[[], list[np.ndarray]]:
    """Probabilities of class 1 of all answers' tokens by Hugging Face, padded."""
    import torch

    firsts = [text.around(text.middle) for text, _ in asked]
    seconds = [answer for _, answer in asked]
    # A classifier of any of these families takes no more than these two.
    names = ("input_ids", "attention_mask")

    def read() -> list[np.ndarray]:
        given = found.tokenizer(firsts, seconds, padding=True, return_tensors="pt")
        with torch.no_grad():
            tensors = {name: given[name].to(found.device) for name in names}
            logits = found.model(**tensors).logits
        values = logits.softmax(-1)[..., 1].cpu().numpy()
        of_answer = [np.array(given.sequence_ids(at)) == 1 for at in range(len(asked))]
        return [row[mask] for row, mask in zip(values, of_answer, strict=True)]

    return read


def _speed(
    family: str, found: peers.EncoderPeer, asked: list[tuple[Framed, str]]
) -> Iterator[dict]:
    said = {}
    theirs = in_a_batch(found, asked)
    functions = {
        "ours": lambda: said.update(
            ours=token_probabilities(found.encoder, asked, progress=False)
        ),
        "peer": lambda: said.update(peer=theirs()),
    }
    length = max(
        len(found.tokenizer(text.around(text.middle), answer)["input_ids"])
        for text, answer in asked
    )
    case = f"{family}, {length} tokens"
    times = interleave("encoders", case, functions, _ROUNDS)
    ours, others = np.concatenate(said["ours"]), np.concatenate(said["peer"])
    worst = np.abs(ours - others).max() / others.std()
    metric = "largest difference of a probability / spread of tokens"
    yield row("encoders", case, metric, float(worst), 1e-2)
    yield times.pace("answers per second", "ours", len(asked))
    metric = "Hugging Face in a batch / token_probabilities"
    yield times.ratio(metric, "peer", "ours", 1.0, "higher")
