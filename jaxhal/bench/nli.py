"""How fast are pairs of texts classified beside a loop over them in Hugging Face?

The classifier has DeBERTa-v3-small's shape (6 layers of width 768, 12 heads), MiniLM's
tokenizer and random weights in float32.  Ten sampled answers to a question, made of
sentences of the bundled contexts, are asked about in pairs, both ways.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxhal import texts
from jaxhal.bench import interleave, peer, peers, row
from jaxhal.datasets import bundled
from jaxhal.models.encoders.encoding import TextEncoder, classify

SAMPLES = 10
# Different answers among the ten, and the most sentences of one.  At temperature 1 few
# repeat: none of the 2,380 paragraphs by GPT-3 that came with SelfCheckGPT, 24 of 3,880
# short answers of SmolLM2 to questions of SQuAD.  That half do is for a surer model.
CASES = ((10, 4), (10, 1), (5, 1))
_ROUNDS = 3
_SHAPE: dict[str, Any] = dict(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=6,
    num_attention_heads=12,
    max_position_embeddings=512,
    relative_attention=True,
    position_buckets=256,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["p2c", "c2p"],
    position_biased_input=False,
    type_vocab_size=0,
    id2label={0: "contradiction", 1: "neutral", 2: "entailment"},
    initializer_range=0.05,  # so that pairs differ in their probabilities
)

Classify = Callable[[list[tuple[str, str]]], Float[np.ndarray, "pairs labels"]]


def rows() -> Iterator[dict]:
    both = peer(encoder_and_peer, _SHAPE)
    for distinct, longest in CASES if both else ():
        yield from _speed(both, distinct, longest)


def pairs_of(distinct: int, longest: int) -> list[tuple[str, str]]:
    """Every two of the ten samples, both ways; so many of the samples differ.

    They have one to ``longest`` sentences each.
    """
    rng = np.random.default_rng(0)
    said = [
        s.text for one in bundled()[::2] for s in texts.sentences(one.context or "")
    ]
    answers = [
        " ".join(rng.choice(said, 1 + number % longest, replace=False).tolist())
        for number in range(distinct)
    ]
    drawn = [*answers, *rng.choice(answers, SAMPLES - distinct).tolist()]
    return [(a, b) for i, a in enumerate(drawn) for j, b in enumerate(drawn) if i != j]


def encoder_and_peer(shape: dict[str, Any]) -> tuple[TextEncoder, Classify]:
    """A random classifier here, and the same weights as a loop over Hugging Face's.

    Raises:
      ImportError: without torch, or one that cannot use JAX's device.
    """
    import torch

    encoder, model, tokenizer, device = peers.torch_encoder(
        "deberta-v2", "ModelForSequenceClassification", shape
    )

    def one_by_one(pairs: list[tuple[str, str]]) -> Float[np.ndarray, "pairs labels"]:
        found = []
        with torch.no_grad():
            for first, second in pairs:
                inputs = tokenizer(first, second, return_tensors="pt").to(device)
                found.append(model(**inputs).logits.softmax(-1)[0].cpu().numpy())
        return np.stack(found)

    return encoder, one_by_one


def _speed(
    both: tuple[TextEncoder, Classify], distinct: int, longest: int
) -> Iterator[dict]:
    encoder, theirs = both
    pairs, found = pairs_of(distinct, longest), {}
    length = "1 sentence" if longest == 1 else f"1-{longest} sentences"
    case = f"{length}, {distinct} of {SAMPLES} differ"
    functions = {
        "ours": lambda: found.update(ours=classify(encoder, pairs)),
        "peer": lambda: found.update(peer=theirs(pairs)),
    }
    times = interleave("nli", case, functions, _ROUNDS)
    worst = np.abs(found["ours"] - found["peer"]).max() / found["peer"].std(0).max()
    metric = "largest difference of a probability / spread of pairs"
    yield row("nli", case, metric, float(worst), 1e-2)
    metric = f"pairs per second, {len(set(pairs))} of {len(pairs)} different"
    yield times.pace(metric, "ours", len(pairs))
    metric = "Hugging Face one by one / classify"
    yield times.ratio(metric, "peer", "ours", 5.0, "higher")
