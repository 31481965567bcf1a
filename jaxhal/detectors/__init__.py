"""Detectors, a file a paper: what each method reads, computes, learns and cites."""

from jaxhal.detectors.base import Detector as Detector
from jaxhal.detectors.base import Features as Features
from jaxhal.detectors.base import HeldOut as HeldOut
from jaxhal.detectors.base import Info as Info
from jaxhal.detectors.base import Targets as Targets
from jaxhal.detectors.base import features_of as features_of
from jaxhal.detectors.base import held_out as held_out
from jaxhal.detectors.base import response_mean as response_mean
from jaxhal.detectors.base import take as take
from jaxhal.detectors.catalogue import AT_ONCE as AT_ONCE
from jaxhal.detectors.catalogue import CATALOGUE as CATALOGUE
from jaxhal.detectors.catalogue import build as build
from jaxhal.detectors.catalogue import get as get
from jaxhal.detectors.controls import max_prompt_attention as max_prompt_attention
from jaxhal.detectors.controls import max_prompt_probe as max_prompt_probe
from jaxhal.detectors.controls import novel_word_share as novel_word_share
from jaxhal.detectors.controls import novel_words as novel_words
from jaxhal.detectors.controls import response_length as response_length
from jaxhal.detectors.controls import tfidf as tfidf
from jaxhal.detectors.eigenscore import eigenscore as eigenscore
from jaxhal.detectors.ensemble import ensemble as ensemble
from jaxhal.detectors.lookback_lens import lookback_lens as lookback_lens
from jaxhal.detectors.lookback_lens import lookback_probe as lookback_probe
from jaxhal.detectors.lookback_lens import lookback_ratio as lookback_ratio
from jaxhal.detectors.lrp4rag import lrp4rag_comb as lrp4rag_comb
from jaxhal.detectors.lrp4rag import lrp4rag_forest as lrp4rag_forest
from jaxhal.detectors.lrp4rag import lrp4rag_lstm as lrp4rag_lstm
from jaxhal.detectors.lrp4rag import lrp4rag_mlp as lrp4rag_mlp
from jaxhal.detectors.lrp4rag import lrp4rag_svm as lrp4rag_svm
from jaxhal.detectors.lrp4rag import lrp4rag_threshold as lrp4rag_threshold
from jaxhal.detectors.probes import attention_pooling as attention_pooling
from jaxhal.detectors.probes import hidden_probe as hidden_probe
from jaxhal.detectors.probes import linear_probe as linear_probe
from jaxhal.detectors.probes import linear_probe_last as linear_probe_last
from jaxhal.detectors.probes import mlp_probe as mlp_probe
from jaxhal.detectors.probes import token_probe as token_probe
from jaxhal.detectors.prompts import detection_prompt as detection_prompt
from jaxhal.detectors.prompts import icl_prompt as icl_prompt
from jaxhal.detectors.selfcheck import nli_context as nli_context
from jaxhal.detectors.selfcheck import selfcheck_bertscore as selfcheck_bertscore
from jaxhal.detectors.selfcheck import selfcheck_ngram as selfcheck_ngram
from jaxhal.detectors.selfcheck import selfcheck_nli as selfcheck_nli
from jaxhal.detectors.selfcheck import selfcheck_prompt as selfcheck_prompt
from jaxhal.detectors.semantic_entropy import (
    length_normalized_entropy as length_normalized_entropy,
)
from jaxhal.detectors.semantic_entropy import predictive_entropy as predictive_entropy
from jaxhal.detectors.semantic_entropy import semantic_entropy as semantic_entropy
from jaxhal.detectors.semantic_entropy import (
    semantic_entropy_discrete as semantic_entropy_discrete,
)
from jaxhal.detectors.toha import mtop_div as mtop_div
from jaxhal.detectors.toha import sink_share as sink_share
from jaxhal.detectors.toha import toha as toha
from jaxhal.detectors.toha import toha_supervised as toha_supervised
from jaxhal.detectors.toha import topology_probe as topology_probe
from jaxhal.detectors.uncertainty import closed_book as closed_book
from jaxhal.detectors.uncertainty import context_gain as context_gain
from jaxhal.detectors.uncertainty import context_gain_count as context_gain_count
from jaxhal.detectors.uncertainty import (
    predictive_probability as predictive_probability,
)
from jaxhal.detectors.uncertainty import (
    predictive_probability_max as predictive_probability_max,
)
from jaxhal.detectors.uncertainty import token_entropy as token_entropy
from jaxhal.detectors.uncertainty import token_entropy_mean as token_entropy_mean
