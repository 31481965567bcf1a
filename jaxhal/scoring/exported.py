"""Judging answers by what the engine that wrote them exported, reading none again."""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxhal.capture.states import needed
from jaxhal.detectors import Detector, features_of
from jaxhal.features.base import Reducer
from jaxhal.features.uncertainty import TokenLogprob
from jaxhal.io.progress import note
from jaxhal.models.lm import LM, load, outline
from jaxhal.reading.exported import Exported, States, extract_exported
from jaxhal.reading.extract import kinds
from jaxhal.reporting.report import Report
from jaxhal.scoring import verdicts
from jaxhal.scoring.collection import Asked
from jaxhal.scoring.detection import (
    in_order,
    placed,
    resolve,
    resolve_for,
    score_batches,
)
from jaxhal.scoring.fitting import Fitted
from jaxhal.types import Example


def score_states(
    lm: LM | str | os.PathLike,
    examples: Iterable[Example],
    states: States,
    detectors: Iterable[Asked] | None = None,
    *,
    layers: Sequence[int] | None = None,
    dtype: Any = "float32",
    batch_size: int = 8,
    progress: bool | None = None,
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
    token_threshold: float | None = None,
    adapt: bool = False,
) -> list[Report]:
    """Scores answers of which an engine exported hidden states or log probabilities.

    The verdicts are those of :func:`jaxhal.score`; no layer of the model runs.  Where
    the engine gave nothing of the end of the sequence, the answer is judged without it,
    which a warning says.  An answer of which the states are not there, or of other
    tokens than its text, comes back with its ``error``.

    Args:
      lm: the model that wrote the answers.  Of a name, a folder or a file, as
        :func:`jaxhal.load` takes them, no weights are loaded but those that are needed:
        of the final norm and the vocabulary where the last hidden state was exported
        and is looked at, and all of them for a detector that knows its reader by them.
      examples: with their ``logprobs``, where detectors look at log probabilities and
        the last hidden state was not exported.
      states: a folder of ``.safetensors`` files as vLLM writes them, of which
        each example has the one that its ``states`` names, or its ``id``; or the
        ``token_ids`` ``[tokens]`` and ``hidden_states`` ``[tokens layers width]`` of
        each example; ``None`` for log probabilities alone.
      detectors: as :func:`jaxhal.score` takes them, of those that look at nothing else;
        by default all of its own that are sure to find what they look at.
      layers: ascending numbers of the hidden states, as vLLM was given them in
        ``eagle_aux_hidden_state_layer_ids``; by default all, from 0, the embeddings, to
        the number of layers, what comes out of the last before the final norm.
      dtype: of the weights that are loaded.
      batch_size, progress, threshold, confidence, token_threshold, adapt: as
        :func:`jaxhal.score` takes them.

    Raises:
      ValueError: as :func:`jaxhal.score`; on layers that the model does not have, and
        on a detector that looks at what was not exported, which names it.
    """
    sure: dict[str, Any] = {"threshold": threshold, "confidence": confidence}
    if isinstance(lm, LM):
        exported = Exported.of(states, layers, lm.config)
        chosen = resolve_for(lm, _named(lm, detectors, exported), **sure)
        check_exported(lm, chosen, exported)
    else:
        lm, chosen, exported = reader_for(
            lm, states, detectors, layers=layers, dtype=dtype, **sure
        )
    if adapt:
        verdicts.check_adaptable(chosen)
    found = score_batches(
        lm,
        examples,
        chosen,
        batch_size=batch_size,
        progress=progress,
        token_threshold=token_threshold,
        reading=reading_of(exported),
    )
    reports = in_order(found)
    return verdicts.adapted(reports, chosen, token_threshold) if adapt else reports


def reading_of(exported: Exported) -> Any:
    """What :func:`score_batches` takes to read what was exported."""
    return functools.partial(extract_exported, exported=exported)


def reader_for(
    source: str | os.PathLike,
    states: States,
    detectors: Iterable[Asked] | None = None,
    *,
    layers: Sequence[int] | None = None,
    dtype: Any = "float32",
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
) -> tuple[LM, list[Fitted], Exported]:
    """A reader with the weights that are needed, the detectors, and what was exported.

    Raises ValueError as :func:`score_states`, before any weights are loaded.
    """
    lm = outline(source, dtype=dtype)
    exported = Exported.of(states, layers, lm.config)
    names = _named(lm, detectors, exported)
    chosen = resolve(lm.name, names, threshold, confidence, lm)
    check_exported(lm, chosen, exported)
    if any(one.reader is not None for one in chosen):
        lm = load(source, dtype=dtype)
    else:
        own = kinds(features_of(one.detector for one in chosen)).own
        reducers = exported.of_states(own, lm.config).values()
        if only := needed(reducers, lm.config):
            lm = outline(source, dtype=dtype, only=only)
    for one in chosen:
        one.check_reader(lm)
    return lm, chosen, exported


def check_exported(lm: LM, chosen: Iterable[Fitted], exported: Exported) -> None:
    """ValueError that names a detector that looks at what was not exported."""
    for one in chosen:
        for _, feature in one.detector.features:
            if (missing := exported.lacks(feature, lm.config)) is not None:
                raise ValueError(
                    f"detector {one.detector.name!r} looks at {missing}, and what was "
                    f"exported is {exported}; have the engine export it if it can, "
                    "read the answers with jaxhal.score, or leave the detector out"
                )


def _named(
    lm: LM, detectors: Iterable[Asked] | None, exported: Exported
) -> Iterable[Asked]:
    """The detectors asked for, by default those that find all they look at.

    Controls that came along with others are left out where they do not.
    """
    if isinstance(detectors, str | Detector | Fitted):
        return detectors  # which is refused
    if detectors is None:
        found = resolve(lm.name, None)
        return [one for one in found if _finds(lm, one.detector, exported)]
    given = [*detectors]
    kept: list[str | Detector | Fitted] = []
    for one in placed(lm.name, given):
        named = any(one is each for each in given)
        control = one.detector if isinstance(one, Fitted) and not named else None
        if control is None or not control.control or _finds(lm, control, exported):
            kept.append(one)
        else:
            note(f"{control.name} is left out: it looks at what was not exported")
    return kept


def _finds(lm: LM, detector: Detector, exported: Exported) -> bool:
    for _, feature in detector.features:
        if exported.lacks(feature, lm.config) is not None:
            return False
        if isinstance(feature, Reducer) and feature.reads == "logits":
            # Log probabilities are of a row; of all that is known without looking at
            # rows is that there is nothing else, and that they are seldom all.
            alone = not exported.numbers and feature == TokenLogprob()
            if not (exported.has_logits(lm.config) or alone):
                return False
    return True
