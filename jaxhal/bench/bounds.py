"""The least that passes through a model take: products, and bytes read and sent."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxhal import lrp
from jaxhal.features.base import Reducer
from jaxhal.models.config import ATTENTION, Config

_RELEVANCE = lrp.PromptRelevance, lrp.RelevanceMap, lrp.ResponseRelevance


class Shape(NamedTuple):
    """Answers read or written together, tokens of each, those of the response."""

    answers: int
    tokens: int
    response: int

    def __str__(self) -> str:
        return f"{self.answers} x {self.tokens}"


class Bound(NamedTuple):
    """The least time of a pass, by the data sheet of its devices."""

    flops: float  # of all devices
    arithmetic: float  # seconds at the peak
    moving: float  # seconds to read what it needs of memory once
    sending: float = 0.0  # seconds to add up over links what devices share out

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.moving, self.sending)

    @property
    def by(self) -> str:
        """What takes that time."""
        if self.sending == self.seconds > 0:
            return "sums over links"
        return "products" if self.arithmetic > self.moving else "reading memory"


def sent(config: Config, tokens: int, devices: int) -> float:
    """Numbers that each of the devices that share a layer sends in a forward pass.

    Every layer adds up what they make of each token twice, after attention and after
    the network; around a ring all but a device's own part goes there and back.
    """
    summed = 2 * config.num_hidden_layers * config.hidden_size * tokens
    return 2 * (devices - 1) / devices * summed


def flops(config: Config, shape: Shape) -> int:
    """Of all layers of a forward pass; of attention what is not masked."""
    return layers(config, shape.answers * shape.tokens, 0, shape.tokens)


def layers(config: Config, tokens: int, first: int, last: int) -> int:
    """Of all layers for some tokens, evenly spread over columns of their sequences."""
    return sum(_part(part, tokens, first, last) for part in config.parts)


def seen(first: int, last: int, window: int) -> float:
    """Columns that a token between two sees on average; a window of 0 is none."""
    if not window or window >= last:
        return (first + last) / 2
    if window <= first:
        return float(window)
    rising = (window**2 - first**2) / 2  # over those that see all before them
    return (rising + window * (last - window)) / (last - first)


def _part(config: Config, tokens: int, first: int, last: int) -> int:
    """Of layers with keys of their own, or of those that borrow them."""

    def attention(own: Config, window: int) -> int:
        heads = own.num_attention_heads * own.head_dim
        kv = own.num_key_value_heads * own.head_dim * (not own.borrows)
        made = (3 if own.attention_gate else 2) * heads + (2 - own.keys_as_values) * kv
        return own.hidden_size * made + round(2 * seen(first, last, window)) * heads

    mlp = (3 if config.gated else 2) * config.inner_size + config.num_experts
    mlp += config.shared == "gated"
    if config.layer_inputs is not None:  # each layer's own, its gate and its projection
        mlp += 3 * config.layer_inputs[1]
    each = sum(
        attention(config.of(kind), config.windows[layer])
        for kind in ATTENTION
        for layer in config.layers_with(kind)
    )
    if (delta := config.delta) is not None:
        keys = delta.key_heads * delta.key_dim
        values = delta.value_heads * delta.value_dim
        linear = config.hidden_size * (2 * keys + 3 * values + 2 * delta.value_heads)
        # Its state is multiplied by a key and by a query, and a product is added to it.
        each += len(delta.layers) * (linear + 3 * values * delta.key_dim)
    return 2 * tokens * (each + config.num_hidden_layers * config.hidden_size * mlp)


def experts_read(config: Config, tokens: int) -> float:
    """The share of a layer's experts that some tokens go through, evenly spread."""
    if not config.num_experts:
        return 1.0
    return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens


def vocabulary(config: Config, rows: int) -> int:
    """Of the logits of some rows."""
    return 2 * rows * config.hidden_size * config.vocab_size


def reading(config: Config, shape: Shape, reducers: Mapping[str, Reducer]) -> int:
    """Of what reducers read: layers, logits, and relevance there and back.

    Not of what they make of it, nor of layers that are computed again to save memory.
    """
    reads = {reducer.reads for reducer in reducers.values()}
    streams = ("logits" in reads) + 2 * config.num_hidden_layers * ("lens" in reads)
    rows = shape.answers * (shape.response + 1)
    layers = round(passes(shape, reducers) * flops(config, shape))
    return layers + streams * vocabulary(config, rows)


def passes(shape: Shape, reducers: Mapping[str, Reducer]) -> float:
    """Forward passes that make as many products as reading does at least."""
    reads = {reducer.reads for reducer in reducers.values()}
    return _relevance_passes(shape, reducers) + bool(reads - {"relevance"})


def prompts(config: Config, shape: Shape) -> int:
    """Of reading prompts and choosing the first token of each response."""
    answers, prompt = shape.answers, shape.tokens - shape.response
    return flops(config, Shape(answers, prompt, 0)) + vocabulary(config, answers)


def step(config: Config, shape: Shape) -> int:
    """Of one more token of every response, on average."""
    prompt, answers = shape.tokens - shape.response, shape.answers
    return layers(config, answers, prompt, shape.tokens) + vocabulary(config, answers)


def _relevance_passes(shape: Shape, reducers: Mapping[str, Reducer]) -> float:
    passes, means = 0.0, {}
    for reducer in reducers.values():
        if not isinstance(reducer, _RELEVANCE):
            continue
        # CP-LRP goes through values and one factor of gates alone: half the products.
        linear = 0.5 if reducer.rules == "cp_lrp" else 1.0
        if isinstance(reducer, lrp.RelevanceMap):
            response = min(reducer.response_bins, shape.response)
            prompt = min(reducer.prompt_bins, shape.tokens - shape.response)
            passes += 1 + linear * min(response, prompt)
        else:  # a push for the response, a pull-back for the prompt
            means[(reducer.rules, reducer.seed), type(reducer)] = linear
    return passes + sum(means.values()) + len({flow for flow, _ in means})
