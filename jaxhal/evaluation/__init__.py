"""How good scores are: metrics, intervals, splits, calibration and tables.

Plain NumPy on the host, in float64.  In every function

- ``scores`` are ``[rows]``, finite, higher for what is more likely hallucinated;
- ``probabilities`` are ``[rows]``, of being hallucinated, in [0, 1];
- ``labels`` are ``[rows]``, 1 for hallucinated and 0 for grounded;
- ``groups`` are ``[rows]``, the source of each answer: any hashable, and each answer by
  itself when left out;
- ``repeats`` is the number of draws, and one ``seed`` always gives the same ones.

Rows that are no such numbers or do not pair up raise ``ValueError`` with the first bad
one, and so do no rows, labels of one class where two are compared, and fewer than one
repeat.
"""

from jaxhal.evaluation.calibration import Isotonic as Isotonic
from jaxhal.evaluation.calibration import Platt as Platt
from jaxhal.evaluation.calibration import (
    best_accuracy_threshold as best_accuracy_threshold,
)
from jaxhal.evaluation.calibration import best_f1_threshold as best_f1_threshold
from jaxhal.evaluation.calibration import isotonic as isotonic
from jaxhal.evaluation.calibration import platt as platt
from jaxhal.evaluation.calibration import precision_threshold as precision_threshold
from jaxhal.evaluation.guarantees import Guarantee as Guarantee
from jaxhal.evaluation.guarantees import guarantee as guarantee
from jaxhal.evaluation.guarantees import guaranteed_highlights as guaranteed_highlights
from jaxhal.evaluation.guarantees import highlighted as highlighted
from jaxhal.evaluation.held_out import CalibrationSet as CalibrationSet
from jaxhal.evaluation.held_out import Measured as Measured
from jaxhal.evaluation.intervals import Difference as Difference
from jaxhal.evaluation.intervals import bootstrap as bootstrap
from jaxhal.evaluation.intervals import correlation as correlation
from jaxhal.evaluation.intervals import interval as interval
from jaxhal.evaluation.intervals import mean_interval as mean_interval
from jaxhal.evaluation.intervals import paired as paired
from jaxhal.evaluation.metrics import Decided as Decided
from jaxhal.evaluation.metrics import brier as brier
from jaxhal.evaluation.metrics import decided as decided
from jaxhal.evaluation.metrics import ece as ece
from jaxhal.evaluation.metrics import ece_by_chance as ece_by_chance
from jaxhal.evaluation.metrics import evaluate as evaluate
from jaxhal.evaluation.metrics import span_f1 as span_f1
from jaxhal.evaluation.metrics import token_metrics as token_metrics
from jaxhal.evaluation.prevalence import Rate as Rate
from jaxhal.evaluation.prevalence import adapted as adapted
from jaxhal.evaluation.prevalence import rate as rate
from jaxhal.evaluation.ranking import WithinParts as WithinParts
from jaxhal.evaluation.ranking import auprc as auprc
from jaxhal.evaluation.ranking import auprc_trapezoid as auprc_trapezoid
from jaxhal.evaluation.ranking import auroc as auroc
from jaxhal.evaluation.ranking import mann_whitney as mann_whitney
from jaxhal.evaluation.ranking import sampled_mann_whitney as sampled_mann_whitney
from jaxhal.evaluation.selective import aurc as aurc
from jaxhal.evaluation.selective import coverage_at_precision as coverage_at_precision
from jaxhal.evaluation.selective import prr as prr
from jaxhal.evaluation.splits import grouped_kfold as grouped_kfold
from jaxhal.evaluation.splits import holdout as holdout
from jaxhal.evaluation.splits import kfold as kfold
from jaxhal.evaluation.splits import leaky_halves as leaky_halves
from jaxhal.evaluation.splits import toha_splits as toha_splits
from jaxhal.evaluation.splits import unseen_kinds as unseen_kinds
from jaxhal.evaluation.tables import compare as compare
