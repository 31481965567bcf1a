"""LapEigvals: what the spectrum of each head's attention graph tells."""

from jaxhal.detectors import base
from jaxhal.features.spectrum import LaplacianEigenvalues


@base.factory
def lap_eigvals(top: int = 10) -> base.Detector:
    """Logistic regression on the largest Laplacian eigenvalues of every head.

    The published probe reduces them to 512 principal components first; here a penalty
    that is chosen in training does that work.

    Args:
      top: eigenvalues a head, as :mod:`jaxhal.features.spectrum` has them.
    """
    name = f"laplacian_{top}"
    return base.logistic(
        "lap_eigvals",
        f"logistic regression on the {top} largest Laplacian eigenvalues of each head",
        "Binkowski et al. 2025 (LapEigvals), edges of response tokens",
        lambda f: base.flat_heads(f[name]),
        (name, LaplacianEigenvalues(top)),
    )
