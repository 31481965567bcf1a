"""The catalogue: every detector by its name."""

import difflib
import functools
import inspect
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxhal.detectors.base import Detector
from jaxhal.detectors.controls import (
    max_prompt_attention,
    max_prompt_probe,
    novel_word_share,
    novel_words,
    response_length,
    tfidf,
)
from jaxhal.detectors.eigenscore import eigenscore
from jaxhal.detectors.ensemble import ensemble
from jaxhal.detectors.lookback_lens import lookback_lens, lookback_probe, lookback_ratio
from jaxhal.detectors.lrp4rag import (
    lrp4rag_comb,
    lrp4rag_forest,
    lrp4rag_lstm,
    lrp4rag_mlp,
    lrp4rag_svm,
    lrp4rag_threshold,
)
from jaxhal.detectors.probes import (
    attention_pooling,
    hidden_probe,
    linear_probe,
    linear_probe_last,
    mlp_probe,
    token_probe,
)
from jaxhal.detectors.prompts import detection_prompt, icl_prompt
from jaxhal.detectors.selfcheck import (
    nli_context,
    selfcheck_bertscore,
    selfcheck_ngram,
    selfcheck_nli,
    selfcheck_prompt,
)
from jaxhal.detectors.semantic_entropy import (
    length_normalized_entropy,
    predictive_entropy,
    semantic_entropy,
    semantic_entropy_discrete,
)
from jaxhal.detectors.toha import (
    mtop_div,
    sink_share,
    toha,
    toha_supervised,
    topology_probe,
)
from jaxhal.detectors.uncertainty import (
    context_gain,
    context_gain_count,
    predictive_probability,
    predictive_probability_max,
    token_entropy,
    token_entropy_mean,
)
from jaxhal.features.base import OfText, Reducer
from jaxhal.llm import hosts

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
    "toha": toha,
    "toha_supervised": toha_supervised,
    "topology_probe": topology_probe,
    "lookback_lens": lookback_lens,
    "lookback_probe": lookback_probe,
    "linear_probe": linear_probe,
    "linear_probe_last": linear_probe_last,
    "hidden_probe": hidden_probe,
    "mlp_probe": mlp_probe,
    "attention_pooling": attention_pooling,
    "token_probe": token_probe,
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

    Raises:
      ValueError: on an unknown name, with the nearest known one, or ``"ensemble"``,
        which is no detector before it has members.

    Example:
      >>> [detector.name for detector in get(["mtop_div", "novel_words"])]
      ['mtop_div', 'novel_words']
    """
    chosen = []
    for name in AT_ONCE if names is None else names:
        if name == "ensemble":
            raise ValueError(
                "an ensemble needs members, and must be fitted: jaxhal.detectors.build("
                "{'ensemble': {'members': ['linear_probe', 'novel_words']}})"
            )
        if name not in CATALOGUE:
            near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"unknown detector {name!r}{hint} (known: {', '.join(CATALOGUE)})"
            )
        chosen.append(CATALOGUE[name]())
    return chosen


def build(spec: str | Mapping[str, Mapping[str, Any]]) -> Detector:
    """A detector from a name, or from ``{name: {option: value}}`` as configs write it.

    An option at its default changes nothing: the detector is the same object, which
    compiles once.

    Raises:
      ValueError: on an unknown name, an option it does not take, or a ``name`` that is
        another detector's.
      jaxhal.llm.hosts.Refused: on an endpoint at a host that the user has not named.

    Example:
      >>> build({"toha": {"max_heads": 3}}).name
      'toha'
    """
    if isinstance(spec, str):
        return get([spec])[0]
    if len(spec) != 1:
        raise ValueError(
            f"detector {dict(spec)!r} is not of the form {{name: options}}"
        )
    ((name, options),) = spec.items()
    options = dict(options or {})
    called = options.get("name", name)
    for other in {*CATALOGUE, "ensemble"} - {name}:
        if _bare(str(called)) == _bare(other):
            raise ValueError(
                f"detector {name!r} is given the name {called!r}, and {other!r} is "
                "another detector; give it a name of its own"
            )
    if name == "ensemble":
        members = [build(member) for member in options.pop("members", ())]
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
