"""How fast does a data set become features, and what does sharing prompts save?

The reader is SmolLM2-135M in float32; two answers to each prompt, random tokens of the
lengths of a retrieval data set, eight answers a batch.
"""

from collections.abc import Iterator

import numpy as np

import jaxhal
from jaxhal.bench import interleave, peer, peers
from jaxhal.bench.read import REDUCERS, SUFFIX, random_batch
from jaxhal.capture.forward import read_jit

PROMPT, RESPONSE, ANSWERS, COPIES = 512, 192, 8, 2


def rows() -> Iterator[dict]:
    lm = jaxhal.load("smollm2-135m", mesh="data=1")
    about = lm.config.vocab_size, PROMPT + RESPONSE, RESPONSE, ANSWERS, COPIES
    batch, named = random_batch(*about), tuple(REDUCERS.items())
    attention = tuple((n, r) for n, r in named if n in ("mtop_div", "lookback"))
    case = f"{PROMPT}+{RESPONSE}"
    functions = {
        "shared": lambda: read_jit(lm, batch, named, copies=COPIES),
        "alone": lambda: read_jit(lm, batch, named),
    }
    found = interleave("extract", case, functions, 5)
    metric = "prompts read alone / shared, two answers each"
    yield found.ratio(metric, "alone", "shared", 1.3, "higher")
    metric = "answers per second, all reducers, prompts shared"
    yield found.pace(metric, "shared", ANSWERS)
    model = peer(peers.torch_llama, lm, "eager")
    if model is None:
        return
    one = np.asarray(batch.tokens)[:1]
    functions = {
        "peer": lambda: peers.toha_and_lookback(model, one, PROMPT - SUFFIX, PROMPT),
        "ours": lambda: read_jit(lm, batch, attention, copies=COPIES),
    }
    found = interleave("extract", case, functions, 3)
    metric = "answers per second, TOHA + lookback / Hugging Face + SciPy"
    yield found.ratio(metric, "peer", "ours", None, "higher", ANSWERS)
