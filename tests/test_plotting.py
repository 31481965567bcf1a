"""Pictures show what they are given."""

import matplotlib
import numpy as np
import pytest

from jaxhal.plotting import head_map

matplotlib.use("Agg")


def test_head_map_shows_the_values():
    values = np.arange(12.0).reshape(4, 3)
    ax = head_map(values, "divergence", "edge weight")
    np.testing.assert_array_equal(ax.images[0].get_array(), values)
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == (
        "divergence",
        "head",
        "layer",
    )


def test_signed_values_are_centred_on_zero():
    low, high = head_map(np.array([[-1.0, 3.0]])).images[0].get_clim()
    assert (low, high) == (-3.0, 3.0)


def test_batches_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 3, 4\]"):
        head_map(np.zeros((2, 3, 4)))
