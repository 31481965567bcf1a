"""Detectors, a file a paper: what each method reads, computes, learns and cites.

All of them take a ``name``: what to call one beside another choice of its settings.
"""

import difflib
import functools
import inspect
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxhal.detectors.attentive import attentive_probe as attentive_probe
from jaxhal.detectors.base import Detector as Detector
from jaxhal.detectors.base import Features as Features
from jaxhal.detectors.base import HeldOut as HeldOut
from jaxhal.detectors.base import Targets as Targets
from jaxhal.detectors.base import factory as factory
from jaxhal.detectors.base import features_of as features_of
from jaxhal.detectors.base import held_out as held_out
from jaxhal.detectors.base import response_mean as response_mean
from jaxhal.detectors.base import scores_of as scores_of
from jaxhal.detectors.base import take as take
from jaxhal.detectors.contradiction import contradiction as contradiction
from jaxhal.detectors.controls import max_prompt_attention as max_prompt_attention
from jaxhal.detectors.controls import max_prompt_probe as max_prompt_probe
from jaxhal.detectors.controls import novel_word_share as novel_word_share
from jaxhal.detectors.controls import novel_words as novel_words
from jaxhal.detectors.controls import response_length as response_length
from jaxhal.detectors.controls import tfidf as tfidf
from jaxhal.detectors.eigenscore import eigenscore as eigenscore
from jaxhal.detectors.ensemble import ensemble as ensemble
from jaxhal.detectors.graders import nli_context as nli_context
from jaxhal.detectors.graders import pair_grader as pair_grader
from jaxhal.detectors.lap_eigvals import lap_eigvals as lap_eigvals
from jaxhal.detectors.lap_eigvals import sink_probe as sink_probe
from jaxhal.detectors.lettucedetect import token_classifier as token_classifier
from jaxhal.detectors.lookback_lens import lookback_lens as lookback_lens
from jaxhal.detectors.lookback_lens import lookback_probe as lookback_probe
from jaxhal.detectors.lookback_lens import lookback_ratio as lookback_ratio
from jaxhal.detectors.lrp4rag import lrp4rag_comb as lrp4rag_comb
from jaxhal.detectors.lrp4rag import lrp4rag_forest as lrp4rag_forest
from jaxhal.detectors.lrp4rag import lrp4rag_lstm as lrp4rag_lstm
from jaxhal.detectors.lrp4rag import lrp4rag_mlp as lrp4rag_mlp
from jaxhal.detectors.lrp4rag import lrp4rag_svm as lrp4rag_svm
from jaxhal.detectors.lrp4rag import lrp4rag_threshold as lrp4rag_threshold
from jaxhal.detectors.multimax import multimax_probe as multimax_probe
from jaxhal.detectors.probes import attention_pooling as attention_pooling
from jaxhal.detectors.probes import hidden_probe as hidden_probe
from jaxhal.detectors.probes import linear_probe as linear_probe
from jaxhal.detectors.probes import linear_probe_last as linear_probe_last
from jaxhal.detectors.probes import mlp_probe as mlp_probe
from jaxhal.detectors.probes import token_probe as token_probe
from jaxhal.detectors.prompts import detection_prompt as detection_prompt
from jaxhal.detectors.prompts import icl_prompt as icl_prompt
from jaxhal.detectors.redeep import redeep as redeep
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
from jaxhal.detectors.semantic_entropy import (
    semantic_entropy_probe as semantic_entropy_probe,
)
from jaxhal.detectors.series import Ragged as Ragged
from jaxhal.detectors.series import Series as Series
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
from jaxhal.features.base import OfText, Reducer
from jaxhal.io.extras import need
from jaxhal.io.showing import shown
from jaxhal.llm import hosts

# What makes each of those named, in this order.
CATALOGUE: dict[str, Callable[[], Detector]] = {
    "mtop_div": mtop_div,
    "sink_share": sink_share,
    "lookback_ratio": lookback_ratio,
    "predictive_probability": predictive_probability,
    "predictive_probability_max": predictive_probability_max,
    "token_entropy": token_entropy,
    "token_entropy_mean": token_entropy_mean,
    "context_gain": context_gain,
    "context_gain_count": context_gain_count,
    "detection_prompt": detection_prompt,
    "icl_prompt": icl_prompt,
    "semantic_entropy": semantic_entropy,
    "semantic_entropy_discrete": semantic_entropy_discrete,
    "predictive_entropy": predictive_entropy,
    "length_normalized_entropy": length_normalized_entropy,
    "eigenscore": eigenscore,
    "selfcheck_nli": selfcheck_nli,
    "selfcheck_prompt": selfcheck_prompt,
    "selfcheck_ngram": selfcheck_ngram,
    "selfcheck_bertscore": selfcheck_bertscore,
    "nli_context": nli_context,
    "pair_grader": pair_grader,
    "token_classifier": token_classifier,
    "toha": toha,
    "toha_supervised": toha_supervised,
    "topology_probe": topology_probe,
    "lap_eigvals": lap_eigvals,
    "sink_probe": sink_probe,
    "lookback_lens": lookback_lens,
    "lookback_probe": lookback_probe,
    "linear_probe": linear_probe,
    "linear_probe_last": linear_probe_last,
    "hidden_probe": hidden_probe,
    "mlp_probe": mlp_probe,
    "attention_pooling": attention_pooling,
    "multimax_probe": multimax_probe,
    "semantic_entropy_probe": semantic_entropy_probe,
    "token_probe": token_probe,
    "attentive_probe": attentive_probe,
    "contradiction": contradiction,
    "redeep": redeep,
    "lrp4rag_svm": lrp4rag_svm,
    "lrp4rag_mlp": lrp4rag_mlp,
    "lrp4rag_forest": lrp4rag_forest,
    "lrp4rag_lstm": lrp4rag_lstm,
    "lrp4rag_threshold": lrp4rag_threshold,
    "lrp4rag_comb": lrp4rag_comb,
    "max_prompt_probe": max_prompt_probe,
    "max_prompt_attention": max_prompt_attention,
    "response_length": response_length,
    "novel_words": novel_words,
    "novel_word_share": novel_word_share,
    "tfidf": tfidf,
}


def _at_once(detector: Detector) -> bool:
    """No labelled answers, one forward pass, no forest drawn twice."""
    once = all(
        isinstance(one, OfText)
        or (isinstance(one, Reducer) and one.reads != "relevance")
        for _, one in detector.features
    )
    return once and detector.fit is None and detector.name != "sink_share"


# Those that score at once.
AT_ONCE = tuple(name for name, make in CATALOGUE.items() if _at_once(make()))


def get(names: Sequence[str] | None = None) -> list[Detector]:
    """Detectors by catalogue name; for ``None`` those of :data:`AT_ONCE`.

    A name with a colon has behind it what the detector is loaded from.

    Raises:
      ValueError: on an unknown name.
      MissingExtra: where one computes with what is not installed.

    Example:
      >>> [detector.name for detector in get(["mtop_div", "novel_words"])]
      ['mtop_div', 'novel_words']
      >>> get(["token_classifier:owner/name"])[0].by
      'token classifier (owner/name)'
    """
    chosen = []
    for spec in AT_ONCE if names is None else names:
        name, _, source = spec.partition(":")
        if name == "ensemble":
            raise ValueError(
                "an ensemble needs members, and must be fitted: jaxhal.detectors.build("
                "{'ensemble': {'members': ['linear_probe', 'novel_words']}}), or the "
                "same among the detectors of a configuration for jaxhal run"
            )
        if name not in CATALOGUE:
            near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"unknown detector {name!r}{hint} (fitted ones are named by the folder "
                f"they were saved in; known: {', '.join(CATALOGUE)})"
            )
        made = build({name: source}) if ":" in spec else CATALOGUE[name]()
        for _, feature in made.features:
            if feature.extra:
                need(feature.extra)
        chosen.append(made)
    return chosen


def build(spec: str | Mapping[str, Any]) -> Detector:
    """A detector from a name, or from ``{name: {option: value}}`` as configs write it.

    ``{name: text}`` is ``{name: {"source": text}}``: what the detector is loaded from.

    An option at its default changes nothing: the detector is the same object, which
    compiles once.

    Raises:
      ValueError: on an unknown name, an option it does not take, or a ``name`` that is
        another detector's.
      jaxhal.llm.hosts.Refused: on an endpoint at a host that the user has not named.
    """
    if isinstance(spec, str):
        return get([spec])[0]
    if not isinstance(spec, Mapping) or len(spec) != 1:
        given = spec.name if isinstance(spec, Detector) else shown(spec)
        raise ValueError(
            f"detector {given!r} is not a name or of the form {{name: options}}; what "
            "was made in Python is fitted by jaxhal.scoring.fit"
        )
    ((name, given),) = spec.items()
    given = {"source": given} if isinstance(given, str) else given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"detector {name!r}: options are {shown(given)}; give {{option: value}}"
        )
    options: dict[str, Any] = dict(given or {})
    called = options.get("name", name)
    for other in {*CATALOGUE, "ensemble"} - {name}:
        if _bare(str(called)) == _bare(other):
            raise ValueError(
                f"detector {name!r} is given the name {called!r}, and {other!r} is "
                "another detector; give it a name of its own"
            )
    if name == "ensemble":
        specs = options.pop("members", ())
        if isinstance(specs, str) or not isinstance(specs, Sequence):
            raise ValueError(
                f"ensemble: members is {shown(specs)}; give a list of them"
            )
        members = [build(member) for member in specs]
        make: Callable[..., Detector] = functools.partial(ensemble, members)
    else:
        get([name])
        make = CATALOGUE[name]
        usual = {k: p.default for k, p in inspect.signature(make).parameters.items()}
        options = {k: v for k, v in options.items() if k not in usual or usual[k] != v}
    try:
        with hosts.brought(f"detector {name!r}"):
            return make(**options)
    except TypeError as error:
        raise ValueError(f"detector {name!r}: {error}") from error


def _bare(name: str) -> str:
    """What people see of a name: its letters and digits, however they are written."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    return "".join(letter for letter in plain if letter.isalnum())
