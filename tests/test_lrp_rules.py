"""Every rule against its closed form, written out in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhal import lrp
from jaxhal.models import ops

EPS = 1e-6
SETS = [make() for make in lrp.RULE_SETS.values()]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def pulled(rules, primitive, args, relevance):
    """Relevance of the arguments that pass it on, for relevance of the output."""
    flows = lrp.rules.FLOWS[primitive]
    function = getattr(rules.ops(), primitive)

    args = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]

    def moving(*some):
        args_ = list(args)
        for at, value in zip(flows, some, strict=True):
            args_[at] = value
        out = function(*args_)
        return out[0] if primitive == "attend" else out

    inputs = [jnp.asarray(args[at]) for at in flows]
    output, pull = jax.vjp(moving, *inputs)
    slots = pull(jnp.asarray(relevance) / output)
    return [np.asarray(x * g) for x, g in zip(inputs, slots, strict=True)]


def close(ours, closed):
    for a, b in zip(ours, closed, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * np.abs(b).max())


def test_every_primitive_has_a_rule_and_flows():
    assert list(lrp.rules.FLOWS) == list(ops.Ops._fields)


@pytest.mark.parametrize("rules", SETS, ids=lambda rules: rules.name)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(rules, biased):
    x, w, r = draw(5, 4), draw(4, 3), draw(5, 3)
    b = draw(3) if biased else None
    z = x @ w if b is None else x @ w + b
    stabiliser = EPS * np.sign(z) if rules.name in ("epsilon", "lrp4rag") else 0
    close(
        pulled(rules, "linear", (x, w, b, None), r),
        [x * ((r / (z + stabiliser)) @ w.T)],
    )


def attention():
    q, k, v = draw(1, 2, 2, 3, 4), draw(1, 2, 5, 4), draw(1, 2, 5, 4, seed=1)
    bias = np.where(np.tril(np.ones((3, 5)), 2) > 0, 0.0, -1e30)[None, None, None]
    return q, k, v, bias


def test_scores():
    q, k, _, _ = attention()
    z = np.einsum("bngqd,bnkd->bngqk", q, k)
    r = draw(*z.shape, seed=2)
    whole = {
        stabiliser: [
            q * np.einsum("bngqk,bnkd->bngqd", r / (z + stabiliser * np.sign(z)), k),
            k * np.einsum("bngqk,bngqd->bnkd", r / (z + stabiliser * np.sign(z)), q),
        ]
        for stabiliser in (0.0, EPS)
    }
    share = {"attnlrp": (0.5, 0), "epsilon": (0.5, EPS), "lrp4rag": (1, EPS)}
    share |= {"gradient_x_input": (1, 0), "cp_lrp": (0, 0)}
    for rules in SETS:
        factor, eps = share[rules.name]
        want = [factor * part for part in whole[eps]]
        close(pulled(rules, "scores", (q, k), r), want)


SINK = draw(1, 2, 2, 1, 1, seed=5)


@pytest.mark.parametrize("sink", [(), (SINK,)], ids=["", "sink"])
def test_attend(sink):
    q, k, v, bias = attention()
    s = np.einsum("bngqd,bnkd->bngqk", q, k)
    weight = np.exp(s + bias)
    p = weight / (weight.sum(-1, keepdims=True) + sum(map(np.exp, sink)))
    out = np.einsum("bngqk,bnkd->bngqd", p, v)
    r = draw(*out.shape, seed=3)
    share = {"attnlrp": (0.5, 0.5, 0), "epsilon": (0.5, 0.5, EPS)}
    share |= {"gradient_x_input": (1, 1, 0), "lrp4rag": (1, 1, EPS)}
    share |= {"cp_lrp": (0, 1, 0)}
    for rules in SETS:
        to_scores, to_values, eps = share[rules.name]
        slot = r / (out + eps * np.sign(out))
        of_values = v * np.einsum("bngqk,bngqd->bnkd", p, slot)
        of_probs = p * np.einsum("bngqd,bnkd->bngqk", slot, v)
        # Deep Taylor: x * (R - softmax * sum of R).
        of_scores = s * (of_probs - p * of_probs.sum(-1, keepdims=True))
        close(
            pulled(rules, "attend", (s, bias, v, *sink), r),
            [to_scores * of_scores, to_values * of_values],
        )


@pytest.mark.parametrize("center", [False, True])
def test_norm(center):
    x, eps = draw(3, 8), 1e-5
    middle = x - x.mean(-1, keepdims=True) if center else x
    scale = 1 / np.sqrt((middle**2).mean(-1, keepdims=True) + eps)
    out = middle * scale
    r = draw(3, 8, seed=1)

    def ordinary(slot):
        inner = (out * slot).mean(-1, keepdims=True)
        back = scale * (slot - out * inner)
        return x * (back - back.mean(-1, keepdims=True) if center else back)

    def detached(slot):
        back = scale * slot
        return x * (back - back.mean(-1, keepdims=True) if center else back)

    for rules in SETS:
        ours = pulled(rules, "normalize", (x, eps, center), r)
        if rules.name == "lrp4rag":
            close(ours, [ordinary(r / (out + EPS * np.sign(out)))])
        elif rules.name == "gradient_x_input":
            close(ours, [ordinary(r / out)])
        else:
            close(ours, [detached(r / out)])
            if not center:  # everything is passed on
                np.testing.assert_allclose(ours[0], r, rtol=1e-8)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activation(kind):
    x = draw(3, 7)
    f = lambda x: np.asarray(ops.activate(jnp.asarray(x), kind))  # noqa: E731
    r, out, h = draw(3, 7, seed=1), f(x), 1e-6
    slope = (f(x + h) - f(x - h)) / (2 * h)
    for rules in SETS:
        ours = pulled(rules, "activate", (x, kind), r)
        if rules.name in ("gradient_x_input", "lrp4rag"):
            eps = EPS * np.sign(out) if rules.name == "lrp4rag" else 0
            np.testing.assert_allclose(ours[0], x * slope * r / (out + eps), rtol=1e-5)
        else:
            close(ours, [r])


@pytest.mark.parametrize("kind", ["clip", "quick_gelu"])
def test_what_a_limit_leaves_takes_all(kind):
    x, r = draw(3, 7), draw(3, 7, seed=1)
    want = np.clip(x, -0.5 if kind == "clip" else None, 0.5)
    want = want / (1 + np.exp(-1.702 * want)) if kind == "quick_gelu" else want
    np.testing.assert_allclose(ops.activate(jnp.asarray(x), kind, 0.5), want)
    close(pulled(lrp.attnlrp(), "activate", (x, kind, 0.5), r), [r])


def test_activation_at_the_origin():
    value, pull = jax.vjp(
        lambda x: lrp.attnlrp().ops().activate(x, "silu"), jnp.zeros(2)
    )
    assert (np.asarray(pull(value + 1)[0]) == 0.5).all()


def test_products_and_sums():
    a, b, r = draw(4, 3), draw(4, 3, seed=1), draw(4, 3, seed=2)
    halves = {"attnlrp": (0.5, 0.5), "epsilon": (0.5, 0.5), "cp_lrp": (0, 1)}
    for rules in SETS:
        first, second = halves.get(rules.name, (1, 1))
        product, total = a * b, a + b
        gain = product / (product + EPS * np.sign(product))
        gain = gain if rules.name == "lrp4rag" else 1
        close(
            pulled(rules, "multiply", (a, b), r), [first * r * gain, second * r * gain]
        )
        first = float(rules.name in ("gradient_x_input", "lrp4rag"))
        close(pulled(rules, "route", (a, b), r), [first * r * gain, r * gain])
        eps = EPS * np.sign(total) if rules.name in ("epsilon", "lrp4rag") else 0
        share = r / (total + eps)
        close(pulled(rules, "add", (a, b), r), [a * share, b * share])


@pytest.mark.parametrize("rules", SETS, ids=lambda rules: rules.name)
def test_primitives_compute_what_they_did(rules):
    q, k, v, bias = map(jnp.asarray, attention())
    for forward in (False, True):
        mine = rules.ops(forward)
        scores = mine.scores(q, k)
        np.testing.assert_array_equal(scores, ops.scores(q, k))
        for ours, theirs in zip(
            mine.attend(scores, bias, v), ops.attend(scores, bias, v), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("rules", SETS, ids=lambda rules: rules.name)
def test_the_forward_twin_is_the_transpose(rules):
    q, k, v, bias = map(jnp.asarray, attention())
    x, w, b = map(jnp.asarray, (draw(5, 4), draw(4, 3), draw(3)))
    a, c = jnp.asarray(draw(4, 3)), jnp.asarray(draw(4, 3, seed=1))
    cases = {
        "linear": (x, w, b, None),
        "scores": (q, k),
        "attend": (ops.scores(q, k), bias, v),
        "normalize": (x, 1e-5, True),
        "activate": (x, "silu"),
        "multiply": (a, c),
        "add": (a, c),
        "route": (a, c),
    }
    for primitive, args in cases.items():
        flows = lrp.rules.FLOWS[primitive]

        def function(mode, *some, primitive=primitive, args=args, flows=flows):
            args = list(args)
            for at, value in zip(flows, some, strict=True):
                args[at] = value
            out = getattr(rules.ops(mode), primitive)(*args)
            return out[0] if primitive == "attend" else out

        inputs = [args[at] for at in flows]
        moves = [jnp.asarray(draw(*i.shape, seed=7 + n)) for n, i in enumerate(inputs)]
        output, pull = jax.vjp(lambda *some: function(False, *some), *inputs)
        slot = jnp.asarray(draw(*output.shape, seed=9))
        _, pushed = jax.jvp(lambda *some: function(True, *some), inputs, moves)
        back = sum((m * g).sum() for m, g in zip(moves, pull(slot), strict=True))
        assert float((slot * pushed).sum()) == pytest.approx(float(back), rel=1e-10)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("primitive", ["scores", "attend"])
@pytest.mark.parametrize("rules", SETS, ids=lambda rules: rules.name)
def test_slots_together_are_slots_one_by_one(rules, primitive, dtype):
    q, k, v, bias = map(jnp.asarray, attention())
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    scores = ops.scores(q, k)
    bias, sink = bias.astype(scores.dtype), jnp.asarray(SINK, scores.dtype)

    def pull(slot, q, scores):
        if primitive == "scores":
            return jax.vjp(rules.ops().scores, q, k)[1](slot)
        mixed = lambda s, v: rules.ops().attend(s, bias, v, sink)[0]  # noqa: E731
        return jax.vjp(mixed, scores, v)[1](slot)

    shape = scores.shape if primitive == "scores" else q.shape
    kind = scores.dtype if primitive == "scores" else q.dtype
    slots = jnp.asarray(draw(6, *shape)).astype(kind)
    many = jax.vmap(pull, (0, None, None))(slots, q, scores)
    each = [pull(slot, q, scores) for slot in slots]
    # With arguments of their own they are pulled back by the plain rule.
    own = [jnp.broadcast_to(x, (6, *x.shape)) for x in (q, scores)]
    for got in (many, jax.vmap(pull)(slots, *own)):
        for at, ours in enumerate(got):
            want = jnp.stack([one[at] for one in each])
            assert ours.dtype == want.dtype
            ours, want = np.asarray(ours, np.float64), np.asarray(want, np.float64)
            within = 1e-12 if dtype == "float64" else 0.02
            np.testing.assert_allclose(ours, want, atol=within * np.abs(want).max())


def test_a_stabiliser_absorbs():
    x, w, r = draw(5, 4), draw(4, 3), draw(5, 3)
    loose = lrp.rule_set(
        "loose", lrp.rules_of(lrp.attnlrp()) | {"linear": lrp.epsilon_linear(0.5)}
    )
    z = x @ w
    close(
        pulled(loose, "linear", (x, w, None, None), r),
        [x * ((r / (z + 0.5 * np.sign(z))) @ w.T)],
    )


def test_a_pullback_of_ones_own():
    mine = lrp.rule_set(
        "mine", lrp.rules_of(lrp.attnlrp()) | {"linear": lrp.Rule(positive_linear())}
    )
    x, w, r = draw(5, 4), draw(4, 3), draw(5, 3)
    want = x * (np.maximum(r / (x @ w), 0) @ w.T)
    close(pulled(mine, "linear", (x, w, None, None), r), [want])
    assert not mine.linear
    with pytest.raises(ValueError, match="'mine' has a custom_vjp"):
        mine.ops(forward=True)


def positive_linear():
    """Only what speaks for the output, which is not linear in the slot."""
    linear = jax.custom_vjp(ops.linear, nondiff_argnums=(2, 3))
    linear.defvjp(
        lambda x, kernel, bias, dtype: (ops.linear(x, kernel, bias, dtype), kernel),
        lambda bias, dtype, kernel, slot: (jnp.maximum(slot, 0) @ kernel.T, 0 * kernel),
    )
    return linear


def test_equal_rules_are_one():
    assert lrp.epsilon_linear(0.5) is lrp.epsilon_linear(eps=0.5)


def test_nothing_has_no_relevance_without_a_stabiliser():
    def linear(x):
        return lrp.epsilon(0.0).ops().linear(x, jnp.ones((2, 1)), None)

    x = jnp.array([[0.0, 0.0], [1.0, 2.0]])
    (found,) = jax.vjp(linear, x)[1](jnp.ones((2, 1)))
    np.testing.assert_array_equal(x * found, [[0, 0], [1, 2]])
    assert jnp.isfinite(found).all()


def test_bad_sets():
    rules = lrp.rules_of(lrp.attnlrp())
    with pytest.raises(ValueError, match="has no rule for 'add'"):
        lrp.rule_set("mine", {k: v for k, v in rules.items() if k != "add"})
    with pytest.raises(ValueError, match="has a rule for unknown 'softmax'"):
        lrp.rule_set("mine", rules | {"softmax": rules["add"]})
    with pytest.raises(TypeError, match="'add' as <function"):
        lrp.rule_set("mine", rules | {"add": lambda a, b: a + b})  # pyright: ignore[reportArgumentType]
    alone = lrp.Rule(jnp.add, pullbacks=lambda *_: (0, 0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'add' has pullbacks and no tangent"):
        lrp.rule_set("mine", rules | {"add": alone})
    with pytest.raises(ValueError, match="eps is -1.0"):
        lrp.epsilon(-1.0)
