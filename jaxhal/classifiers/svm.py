"""A support vector machine with a radial kernel: fitted by scikit-learn, decided here.

Nothing of scikit-learn is kept: a fitted machine is arrays, so that it is saved without
a pickle and judges under ``jit`` and ``vmap``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxhal.classifiers.data import Values, weighted_rows

# To choose from, for standardised features: the smallest C, then the widest kernel,
# first.
GRID = {"C": (0.1, 1.0, 10.0, 100.0), "gamma": (0.1, 0.3, 1.0, 3.0)}


class SVM(NamedTuple):
    r"""Support vectors and their dual coefficients; a pytree.

    .. math:: f(x) = \sum_i a_i e^{-\gamma \|\tilde x - v_i\|^2} + b, \quad
      \tilde x = (x - \mathrm{mean}) / \mathrm{std}

    As many as there were rows, so that every fold has one shape: rows that support
    nothing have ``dual = 0`` and are kept as zeros.
    """

    vectors: Float[Array, "samples width"]
    dual: Float[Array, " samples"]
    b: Float[Array, ""]
    gamma: Float[Array, ""]
    mean: Float[Array, " width"]
    std: Float[Array, " width"]


def fit_svm(
    x: Any,
    labels: Any,
    weight: Any,
    C: float = 30.0,
    gamma: float = 1.0,
    *,
    standardize: bool = False,
) -> SVM:
    """scikit-learn's ``SVC`` with a radial kernel, as arrays.

    The defaults are those of LRP4RAG's released code, chosen on the folds it reports.
    Standardised, constant features drop out, and ``gamma`` is in units of
    scikit-learn's ``"scale"``: one over the number of those that are left.
    """
    from sklearn.svm import SVC

    for name, value in (("C", C), ("gamma", gamma)):
        if not 0 < value < np.inf:
            raise ValueError(f"{name} is {value}; give a number above 0")
    rows = weighted_rows(x, labels, weight, standardize)
    if standardize:
        gamma = gamma / max(np.isfinite(rows.std).sum(), 1)
    radial = SVC(C=C, gamma=gamma)  # pyright: ignore[reportArgumentType]
    machine = rows.fit(radial)
    support = rows.number[machine.support_]
    vectors = np.zeros(np.shape(x), np.float32)
    vectors[support] = machine.support_vectors_
    dual = np.zeros(len(vectors), np.float32)
    dual[support] = machine.dual_coef_[0]
    b = np.float32(machine.intercept_[0])
    leaves = (vectors, dual, b, np.float32(gamma), rows.mean, rows.std)
    return SVM(*jax.device_put(leaves))


@jax.jit
def svm_logits(params: SVM, x: Float[Values, "*rows width"]) -> Float[Array, "*rows"]:
    """scikit-learn's ``decision_function``; higher = more likely hallucinated."""
    x = (jnp.asarray(x) - params.mean) / params.std
    # Differences: squares of far-away features would leave no digits to subtract.
    apart = ((x[..., None, :] - params.vectors) ** 2).sum(-1)
    with jax.default_matmul_precision("highest"):
        return jnp.exp(-params.gamma * apart) @ params.dual + params.b
