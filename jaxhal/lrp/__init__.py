"""Layer-wise relevance propagation: rules, and the passes that follow them."""

from jaxhal.lrp import rules as rules
from jaxhal.lrp.passes import Relevance as Relevance
from jaxhal.lrp.passes import relevance as relevance
from jaxhal.lrp.passes import relevance_means as relevance_means
from jaxhal.lrp.passes import relevance_resampled as relevance_resampled
from jaxhal.lrp.passes import relevance_sums as relevance_sums
from jaxhal.lrp.programs import Means as Means
from jaxhal.lrp.reducers import PromptRelevance as PromptRelevance
from jaxhal.lrp.reducers import RelevanceMap as RelevanceMap
from jaxhal.lrp.reducers import ResponseRelevance as ResponseRelevance
from jaxhal.lrp.reducers import features as features
from jaxhal.lrp.rules import Rule as Rule
from jaxhal.lrp.rules import RuleSet as RuleSet
from jaxhal.lrp.rules import rule_set as rule_set
from jaxhal.lrp.rules import rules_of as rules_of
from jaxhal.lrp.sets import RULE_SETS as RULE_SETS
from jaxhal.lrp.sets import attnlrp as attnlrp
from jaxhal.lrp.sets import cp_lrp as cp_lrp
from jaxhal.lrp.sets import epsilon as epsilon
from jaxhal.lrp.sets import epsilon_linear as epsilon_linear
from jaxhal.lrp.sets import gradient_x_input as gradient_x_input
from jaxhal.lrp.sets import lrp4rag as lrp4rag
from jaxhal.lrp.sets import resolve as resolve
