"""Figures of features, scores and results.

Every function takes plain arrays and returns a ``matplotlib.figure.Figure`` that
belongs to no window and no pyplot state: show it by naming it in a notebook, keep it
with ``figure.savefig(path)``.

``scores`` are ``[rows]`` by detector, higher for what is more likely hallucinated;
``labels`` are ``[rows]``, 1 for hallucinated and 0 for grounded; ``controls`` are names
to be drawn grey; ``title`` stands above the axes.  Nothing to draw, numbers that are
not finite, rows that do not pair up, labels of one class, unknown names and intervals
other than ``(AUROC, low, high)`` in [0, 1] raise ``ValueError``.
"""

from jaxhal.plotting.comparisons import auroc_intervals as auroc_intervals
from jaxhal.plotting.comparisons import calibration_curve as calibration_curve
from jaxhal.plotting.comparisons import guided_pairs as guided_pairs
from jaxhal.plotting.comparisons import (
    precision_recall_curves as precision_recall_curves,
)
from jaxhal.plotting.comparisons import roc_curves as roc_curves
from jaxhal.plotting.comparisons import score_histograms as score_histograms
from jaxhal.plotting.comparisons import timing_bars as timing_bars
from jaxhal.plotting.forests import forest_drawing as forest_drawing
from jaxhal.plotting.maps import head_map as head_map
from jaxhal.plotting.maps import relevance_boxes as relevance_boxes
from jaxhal.plotting.maps import relevance_lines as relevance_lines
from jaxhal.plotting.maps import relevance_maps as relevance_maps
from jaxhal.plotting.maps import transfer_map as transfer_map
from jaxhal.plotting.series import ablations as ablations
from jaxhal.plotting.series import entropy_trend as entropy_trend
from jaxhal.plotting.series import layer_curve as layer_curve
from jaxhal.plotting.series import loss_curve as loss_curve
from jaxhal.plotting.series import sweep_curves as sweep_curves
