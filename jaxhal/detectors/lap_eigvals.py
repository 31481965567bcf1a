"""LapEigvals and SinkProbe: on which tokens does attention gather?"""

from jaxhal.detectors import base
from jaxhal.features.spectrum import LaplacianEigenvalues, SinkScores


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


@base.factory
def sink_probe(top: int = 10) -> base.Detector:
    """Logistic regression on the largest sink scores of every head.

    The published probe has an L1 penalty, which leaves 1 to 4 % of the scores; here it
    is L2, of a strength that is chosen in training.

    Args:
      top: scores a head, as :class:`~jaxhal.features.spectrum.SinkScores` has them.
    """
    name = f"sinks_{top}"
    return base.logistic(
        "sink_probe",
        f"logistic regression on the {top} largest sink scores of each head",
        "Binkowski et al. 2026 (SinkProbe), attention of response tokens",
        lambda f: base.flat_heads(f[name]),
        (name, SinkScores(top)),
    )
