"""scikit-learn's multilayer perceptron, as published for relevance profiles.

It comes back as the arrays of :class:`~jaxhal.classifiers.mlp.MLP`, so
:func:`~jaxhal.classifiers.mlp.mlp_logits` decides and nothing is pickled.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxhal.classifiers.mlp import MLP, mlp_logits
from jaxhal.classifiers.nested import FOLDS, Tuned, choose, weighted_rows

# Of LRP4RAG, without scaling; 100 units, 200 epochs of Adam and the seed as well.
PUBLISHED = {"alpha": 1e-4}
_SEED = 42

ALPHAS = (1e-4, 1e-2, 1.0)


def fit_perceptron(
    x: Any,
    labels: Any,
    weight: Any,
    alpha: float = PUBLISHED["alpha"],
    *,
    standardize: bool = False,
) -> MLP:
    """scikit-learn's ``MLPClassifier`` with 100 rectified units, 200 epochs of Adam.

    Args:
      x: ``[samples, width]`` features.
      labels: ``[samples]``, 1 for hallucinated and 0 for grounded.
      weight: ``[samples]``; 0 leaves a row out.
      alpha: strength of the L2 penalty.
      standardize: scale features by their moments in training; constant ones drop out.

    Raises:
      ValueError: when shapes do not pair up, a value is not finite, a weight is
        negative, a class has no rows, or ``alpha`` is negative.

    Example:
      >>> x = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
      >>> probe = fit_perceptron(x, [0, 1, 1, 0], [1, 1, 1, 1])
      >>> print((mlp_logits(probe, jnp.array(x)) > 0).astype(int))
      [0 1 1 0]

    References:
      Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_, 2024, and its released
      code.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    if not 0 <= alpha < np.inf:
        raise ValueError(f"alpha is {alpha}; give 0 or more")
    rows = weighted_rows(x, labels, weight, standardize)
    network = MLPClassifier((100,), alpha=alpha, max_iter=200, random_state=_SEED)
    with warnings.catch_warnings():
        # So many epochs are what was published, converged or not.
        warnings.simplefilter("ignore", ConvergenceWarning)
        rows.fit(network)
    (w_in, w_out), (b_in, b_out) = network.coefs_, network.intercepts_
    leaves = (w_in, b_in, w_out[:, 0], b_out[0], rows.mean, rows.std)
    return MLP(*(jnp.asarray(leaf, jnp.float32) for leaf in leaves))


def choose_perceptron(
    x: Any,
    labels: Any,
    groups: Any,
    weight: Any,
    alphas: Sequence[float] = ALPHAS,
    folds: int = FOLDS,
) -> tuple[Tuned, Float[np.ndarray, " samples"]]:
    """A perceptron on standardised features whose penalty is chosen in training.

    Among equals the stronger penalty is taken.

    Args:
      x: ``[samples, width]`` features.
      labels: ``[samples]``, 1 for hallucinated and 0 for grounded.
      groups: ``[samples]``, the source of each answer; a fold never splits one.
      weight: ``[samples]``, 0 for the answers to leave out.
      alphas: values of ``alpha``.
      folds: number of parts, of which each is left out once.

    Returns:
      The choice, whose ``params`` are an :class:`~jaxhal.classifiers.mlp.MLP`, and
      scores of the rows to learn from by fits that had not seen their source; see
      :func:`~jaxhal.classifiers.nested.choose`.

    Raises:
      ValueError: as :func:`fit_perceptron` and
        :func:`~jaxhal.classifiers.nested.choose` do.
    """
    fit = functools.partial(fit_perceptron, standardize=True)
    grid = {"alpha": sorted(alphas, reverse=True)}
    return choose(fit, mlp_logits, grid, x, labels, groups, weight, folds)
