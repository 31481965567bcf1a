"""Figures of features, scores and results.

Every function takes plain arrays and returns a ``matplotlib.figure.Figure`` that
belongs to no window and no pyplot state: show it by naming it in a notebook, keep it
with ``figure.savefig(path)``.
"""

from jaxhal.plotting.comparisons import auroc_intervals as auroc_intervals
from jaxhal.plotting.comparisons import timing_bars as timing_bars
from jaxhal.plotting.comparisons import transfer_map as transfer_map
from jaxhal.plotting.curves import precision_recall_curves as precision_recall_curves
from jaxhal.plotting.curves import roc_curves as roc_curves
from jaxhal.plotting.distributions import calibration_curve as calibration_curve
from jaxhal.plotting.distributions import score_histograms as score_histograms
from jaxhal.plotting.forests import forest_drawing as forest_drawing
from jaxhal.plotting.layers import head_map as head_map
from jaxhal.plotting.layers import layer_curve as layer_curve
from jaxhal.plotting.losses import loss_curve as loss_curve
from jaxhal.plotting.relevance import relevance_boxes as relevance_boxes
from jaxhal.plotting.relevance import relevance_lines as relevance_lines
from jaxhal.plotting.relevance import relevance_maps as relevance_maps
from jaxhal.plotting.sweeps import sweep_curves as sweep_curves
