"""Slow, obvious NumPy versions of what the package computes, and test data."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxhal.types import View

KINDS = ("softmax", "peaked", "ties", "zeros", "sink")


# Data ---------------------------------------------------------------------------------


def causal_attention(seed, *shape, kind="softmax"):
    """Random causal attention ``[*shape, shape[-1]]``, float32, rows summing to one."""
    rng = np.random.default_rng(seed)
    n = shape[-1]
    scores = rng.normal(size=(*shape, n)) * {"peaked": 6.0}.get(kind, 1.5)
    if kind == "ties":
        scores = np.round(scores)
    if kind == "zeros":
        scores = np.where(rng.random(scores.shape) < 0.6, -np.inf, scores)
        scores[..., np.arange(n), np.arange(n)] = 0.0
    if kind == "sink":
        scores[..., 0] += 5.0
    scores = np.where(np.tri(n) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def padded(attention, prompt, *, left=0, right=0, context=1, garbage=0.0):
    """One sample in the seam layout: ``[heads, seq, seq]`` attention and its view.

    Rows and columns of padding hold ``garbage``.  The view lacks rows: see ``reduce``.
    """
    n = attention.shape[-1]
    seq = left + n + right
    matrix = np.full((*attention.shape[:-2], seq, seq), garbage, np.float32)
    matrix[..., left : left + n, left : left + n] = attention
    column = np.arange(seq)
    valid = (column >= left) & (column < left + n)
    view = View(
        position=jnp.arange(seq),
        target=jnp.zeros(seq, int),
        valid=jnp.asarray(valid),
        # Padding to the left is marked too: a reducer has to look at `valid`.
        context=jnp.asarray(column < left + context),
        document=jnp.zeros(seq, bool),
        question=jnp.zeros(seq, bool),
        tokens=jnp.zeros(seq, int),
        prompt_length=left + prompt,
    )
    return jnp.asarray(matrix), view


def reduce(reducer, matrix, view, tokens=None, block=None):
    """What a reducer makes of one sample, from ``[heads seq ...]`` or ``[seq ...]``.

    ``block`` hands it that many query rows at a time.
    """
    tokens = np.zeros(len(view.valid), int) if tokens is None else tokens
    masks = view._replace(prompt_length=None, tokens=jnp.asarray(tokens))
    args = (matrix, masks, np.asarray(tokens), view.prompt_length, block)
    return np.asarray(_reduce(reducer, *args))


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _reduce(reducer, matrix, masks, tokens, prompt_length, block):
    view = masks._replace(prompt_length=prompt_length)
    seq, valid = len(tokens), view.valid[prompt_length:]
    query = np.arange(prompt_length, seq) - (reducer.row == "predictor")
    block = block or len(query)

    def one(rows):
        parts = []
        for start in range(0, len(query), block):
            at = query[start : start + block]
            target = tokens[np.minimum(at + 1, seq - 1)]
            local = view._replace(position=jnp.asarray(at), target=target)
            parts.append(reducer.rows(rows[at], local))
        out = jax.tree.map(lambda *some: jnp.concatenate(some), *parts)
        out = jax.tree.map(
            lambda one: jnp.where(valid.reshape(-1, *[1] * (one.ndim - 1)), one, 0.0),
            out,
        )
        return reducer.finish(reducer.pack(out, view), view)

    return jax.vmap(one)(matrix) if reducer.reads == "probs" else one(matrix)


# Topology -----------------------------------------------------------------------------


def pseudo_distance(attention, prompt_length):
    """``1 - attention``, symmetric, zero on the diagonal and inside the prompt."""
    distance = 1.0 - np.clip(np.asarray(attention, np.float64), 0.0, None)
    np.fill_diagonal(distance, 0.0)
    distance = np.minimum(distance, distance.T)
    distance[:prompt_length, :prompt_length] = 0.0
    return distance


def spanning_tree(distance):
    """Weights of a minimum spanning tree, by Kruskal's algorithm with union-find."""
    parent = list(range(len(distance)))

    def find(vertex):
        while parent[vertex] != vertex:
            parent[vertex] = vertex = parent[parent[vertex]]
        return vertex

    weights = []
    rows, columns = np.tril_indices(len(distance), -1)
    order = np.argsort(distance[rows, columns], kind="stable")
    for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        a, b = find(i), find(j)
        if a != b:
            parent[a] = b
            weights.append(distance[i, j])
            if len(weights) == len(distance) - 1:
                break
    return weights


def mtop_div(attention, prompt_length):
    return sum(spanning_tree(pseudo_distance(attention, prompt_length)))


def max_prompt(attention, prompt_length):
    return np.asarray(attention)[..., prompt_length:, :prompt_length].max(-1)


# Lookback -----------------------------------------------------------------------------


def lookback_ratio(attention, context_length, prompt_length):
    ratios = []
    for row in range(prompt_length - 1, len(attention) - 1):
        context = [float(attention[row][j]) for j in range(context_length)]
        new = [float(attention[row][j]) for j in range(context_length, row + 1)]
        back = sum(context) / len(context)
        ahead = sum(new) / len(new) if new else 0.0
        ratios.append(back / (back + ahead) if new else 1.0)
    return np.array(ratios)


# Uncertainty --------------------------------------------------------------------------


def log_probabilities(logits):
    highest = max(logits)
    total = math.log(sum(math.exp(z - highest) for z in logits)) + highest
    return [z - total for z in logits]


def token_logprob(logits, target):
    return np.array(
        [
            log_probabilities([float(z) for z in row])[t]
            for row, t in zip(logits, target, strict=True)
        ]
    )


def token_entropy(logits):
    return np.array(
        [
            -sum(
                math.exp(logp) * logp if math.exp(logp) > 0 else 0.0
                for logp in log_probabilities([float(z) for z in row])
            )
            for row in logits
        ]
    )


# Support ------------------------------------------------------------------------------


def context_support(logits, tokens, prompt_length, document):
    """The columns of jaxhal.features.support, token by token, place by place."""
    n, places = len(tokens), [j for j in range(prompt_length) if document[j]]

    def like(token):
        return [j for j in places if tokens[j] == token]

    def run(t, j):
        length = 0
        while (
            length < 8
            and t - length - 1 >= prompt_length
            and j - length - 1 in places
            and tokens[t - length - 1] == tokens[j - length - 1]
        ):
            length += 1
        return length

    def near(t, j):
        around = [a for a in range(t - 10, t + 11) if a != t and prompt_length <= a < n]
        weight = {a: 1 / math.sqrt(max(len(like(tokens[a])), 1)) for a in around}
        there = [a for a in around if any(abs(b - j) <= 10 for b in like(tokens[a]))]
        return sum(weight[a] for a in there) / max(sum(weight.values()), 1e-6)

    rows = []
    for t in range(prompt_length, n):
        nats = log_probabilities([float(z) for z in logits[t - 1]])
        own = like(tokens[t])
        other = [j for j in places if j not in own]
        ran = max([run(t, j) for j in other], default=-1)
        followed = [j for j in other if run(t, j) == ran > 0]
        nearest = max([near(t, j) for j in places], default=0)
        best = [j for j in places if near(t, j) >= nearest - 1e-4]
        there = [j for j in other if any(abs(j - b) <= 10 for b in best)]
        rows.append(
            [
                nats[tokens[t]],
                -sum(math.exp(one) * one for one in nats),
                max([-20, *(nats[tokens[j]] for j in other)]),
                len(own) > 0,
                max([run(t, j) for j in own], default=-1),
                ran,
                max([-20, *(nats[tokens[j]] for j in followed)]),
                max([near(t, j) for j in own], default=0),
                nearest,
                max([-20, *(nats[tokens[j]] for j in there)]),
                math.log1p(len(own)),
            ]
        )
    return np.array(rows, float)


def copied_attention(attention, tokens, prompt_length, document):
    shares = []
    for t in range(prompt_length, len(tokens)):
        row = [attention[t - 1][j] * document[j] for j in range(prompt_length)]
        same = sum(row[j] for j in range(prompt_length) if tokens[j] == tokens[t])
        shares.append(same / max(sum(row), 1e-9))
    return np.array(shares)


# Words --------------------------------------------------------------------------------


def words(text):
    return [word.lower() for word in re.split(r"[^\w]+", text) if word]


# Forests and graphs -------------------------------------------------------------------


def forest(attention, prompt_length):
    """``(parents, weights)`` of the forest, joining the closest token one by one."""
    attention = np.maximum(np.asarray(attention, np.float32), 0)
    joined, loose, edges = [], list(range(prompt_length, len(attention))), {}
    while loose:
        best = None
        for token in loose:
            prompt = attention[token, :prompt_length]
            found = (1 - prompt.max(), int(prompt.argmax()))
            for other in joined:
                weight = 1 - attention[max(token, other), min(token, other)]
                if weight < found[0]:
                    found = (weight, other)
            if best is None or found[0] < best[0]:
                best = (*found, token)
        weight, parent, token = best
        edges[token] = (parent, weight)
        joined.append(token)
        loose.remove(token)
    parents, weights = zip(*(edges[token] for token in sorted(edges)), strict=True)
    return np.array(parents), np.array(weights)


def bar_statistics(bars, thresholds):
    bars = [float(bar) for bar in bars]
    total, mean = sum(bars), sum(bars) / len(bars)
    shares = [bar / total for bar in bars if bar > 0]
    return [
        total,
        mean,
        sum((bar - mean) ** 2 for bar in bars) / len(bars),
        max(bars),
        -sum(share * math.log(share) for share in shares),
        *(sum(bar >= t for bar in bars) for t in thresholds),
    ]


def degree_statistics(attention, prompt_length, thresholds):
    """Edges, mean and largest degree of the response, a triple for each threshold."""
    out = []
    for threshold in thresholds:
        degree, edges = [0] * len(attention), 0
        for later in range(prompt_length, len(attention)):
            for earlier in range(later):
                if attention[later, earlier] >= np.float32(threshold):
                    degree[later] += 1
                    degree[earlier] += 1
                    edges += 1
        response = degree[prompt_length:]
        out += [edges, sum(response) / len(response), max(response)]
    return out
