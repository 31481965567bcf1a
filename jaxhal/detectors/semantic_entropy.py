"""Semantic entropy: do sampled answers mean the same?  And a probe that foresees it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhal.classifiers.selection import choose_linear
from jaxhal.detectors.base import (
    Detector,
    Features,
    HeldOut,
    Targets,
    factory,
    logistic_scores,
    measured,
)
from jaxhal.detectors.settings import Settings, draw_of
from jaxhal.features import semantic
from jaxhal.features.hidden import HiddenStates
from jaxhal.generation import Sampling
from jaxhal.io.checks import one_of
from jaxhal.llm import entailment
from jaxhal.llm.entailment import Entailment, named
from jaxhal.reading.bulk import Bulk, Measure
from jaxhal.reading.samples import Draw
from jaxhal.types import Example


@dataclasses.dataclass(frozen=True)
class Likelihood(Measure):
    """Log probabilities of the samples, ``[examples samples]``."""

    draw: Draw
    per_token: bool  # their mean over tokens instead of their sum
    end: bool = True  # that of a sample counts as a token

    @property
    def axes(self) -> tuple[str, ...]:
        return ("samples",)

    def __post_init__(self):
        if self.draw.given:
            raise ValueError(
                "samples that come with the answers have no log probabilities; use a "
                "detector that needs none, such as semantic_entropy_discrete"
            )

    def __call__(self, bulk: Bulk) -> np.ndarray:
        return np.array(
            [
                [s.likelihood(self.per_token, self.end) for s in some]
                for some in bulk.samples(self.draw)
            ],
            np.float32,
        )


@dataclasses.dataclass(frozen=True)
class Meanings(Measure):
    """Cluster of each sample, ``Int[examples samples]``, -1 for one without text."""

    draw: Draw
    entailment: str | Entailment
    rule: str  # of `semantic.equivalence`
    asked: bool  # samples are compared as answers to the question
    published: bool  # as `semantic.cluster` takes it

    @property
    def axes(self) -> tuple[str, ...]:
        return ("samples",)

    @property
    def by(self) -> str:
        return entailment.named(self.entailment)

    @property
    def extra(self) -> str:  # likeness is that of sentences
        return "sentences" if self.entailment == "similarity" else ""

    def __call__(self, bulk: Bulk) -> np.ndarray:
        backend = entailment.resolve(self.entailment, bulk.lm)
        said = [
            [self._said(backend, example, sample.text.strip()) for sample in some]
            for example, some in zip(
                bulk.examples, bulk.samples(self.draw), strict=True
            )
        ]
        present = [[text for text in some if text] for some in said]
        found = bulk.judged(functools.partial(entailment.both_ways, backend), present)
        there = np.array([[bool(text) for text in some] for some in said])
        bulk.refuse(
            [not any(row) for row in there], f"none of {self.draw.n} samples holds text"
        )
        probabilities = np.zeros((*there.shape, self.draw.n, 3), np.float32)
        for row, some in enumerate(found):
            if some is None:
                continue
            at = np.flatnonzero(there[row])
            probabilities[row, at[:, None], at] = some
        return np.asarray(_clustered(probabilities, there, self.rule, self.published))

    def _said(self, backend: Entailment, example: Example, text: str) -> str:
        question = example.question if self.asked else None
        return entailment.answering(backend, question, text)


@jax.jit(static_argnames=("rule", "published"))
def _clustered(probabilities: Any, valid: Any, rule: str, published: bool) -> Any:
    """Clusters of the samples of every example."""

    def one(probabilities: Any, valid: Any) -> Any:
        same = semantic.equivalence(probabilities, rule)
        return semantic.cluster(same, valid, published)

    return jax.vmap(one)(probabilities, valid)


# How the published codes sample, by preset.
_PUBLISHED = {
    "nature": Draw(n=10, max_new_tokens=50),
    "discrete": Draw(n=10, max_new_tokens=50),
    "toha": Draw(n=20, max_new_tokens=256),
    "iclr": Draw(n=10, max_new_tokens=256, sampling=Sampling(temperature=0.5)),
}


@factory
def semantic_entropy(
    preset: str = "nature",
    entailment: str | Entailment = "similarity",
    draw: Settings = None,
) -> Detector:
    """Entropy over the meanings of sampled answers.

    As published, all presets but ``"toha"`` compare samples as answers to the question,
    and Nature's two let a later cluster take over what an earlier one holds.  The code
    of ``"iclr"`` compares all pairs; here each sample is compared with the first of
    each cluster.  An answer none of whose samples holds text is in error.

    Args:
      preset: of :data:`jaxhal.features.semantic.PRESETS`.
      entailment: what decides that two answers mean the same: ``"similarity"``,
        ``"nli:SOURCE"``, ``"reader"``, ``"endpoint:MODEL@URL"``, or any
        :class:`jaxhal.llm.entailment.Entailment`.
      draw: how to sample, see :func:`jaxhal.detectors.settings.draw_of`.
    """
    one_of(semantic.PRESETS, preset=preset)
    how = draw_of(draw, _PUBLISHED[preset])
    rule = semantic.PRESETS[preset].rule
    asked, nature = preset != "toha", preset in ("nature", "discrete")
    meanings = Meanings(how, entailment, rule, asked, published=nature)
    score = functools.partial(semantic.semantic_entropy, preset=preset)
    measures: tuple[Measure, ...] = (meanings,)
    if semantic.PRESETS[preset].weighing != "number":
        measures += (Likelihood(how, per_token=True, end=not nature),)

    def inputs(features: Features) -> Any:
        return jax.vmap(score)(*(features[one.feature] for one in measures))

    return Detector(
        "semantic_entropy",
        f"entropy over meanings of {how}; {named(entailment)}",
        "nats, 0 to log n" if preset != "iclr" else "nats, shifted",
        "Farquhar et al., Nature 2024; Kuhn et al., ICLR 2023",
        measured(*measures),
        inputs,
    )


semantic_entropy_discrete = functools.partial(
    semantic_entropy, "discrete", name="semantic_entropy_discrete"
)


@factory
def predictive_entropy(normalized: bool = False, draw: Settings = None) -> Detector:
    r"""Monte Carlo entropy, :math:`-\frac{1}{n} \sum_i \sum_t \log p(y_{it})`.

    Mean negative log probability of sampled answers, in nats; it grows with their
    length, by which ``normalized`` divides (Malinin and Gales, `Uncertainty Estimation
    in Autoregressive Structured Prediction <https://arxiv.org/abs/2002.07650>`_, 2021).
    """
    how = draw_of(draw, _PUBLISHED["nature"])
    likely = Likelihood(how, per_token=normalized)
    return Detector(
        "predictive_entropy",
        f"entropy of {how}" + (", per token" if normalized else ""),
        "nats a token" if normalized else "nats",
        "Malinin and Gales, ICLR 2021",
        measured(likely),
        lambda f: -jnp.asarray(f[likely.feature]).mean(-1),
    )


length_normalized_entropy = functools.partial(
    predictive_entropy, True, name="length_normalized_entropy"
)


# In which its layer is chosen.
_FOLDS = 3


def _fit_entropy(inputs: tuple[Any, Any], targets: Targets) -> HeldOut:
    states, entropy = inputs
    entropy, groups = np.asarray(entropy), np.asarray(targets.groups)
    seen, sources = entropy[targets.rows], groups[targets.rows]
    high = np.zeros(len(entropy), int)
    if np.ptp(seen) > 1e-6:
        high = (entropy >= semantic.two_means(seen)).astype(int)
    few = min(len(set(sources[high[targets.rows] == kind])) for kind in (0, 1))
    if few < _FOLDS:
        raise ValueError(
            "a probe learns to tell a high semantic entropy from a low one, and one of "
            f"the two is that of {few} of {len(set(sources))} sources, fewer than "
            f"{_FOLDS}; draw more samples, or give answers to more prompts"
        )
    found = choose_linear(states, high, groups, targets.weight, folds=_FOLDS)
    return HeldOut(*found)


@factory
def semantic_entropy_probe(
    entailment: str | Entailment = "similarity", draw: Settings = None
) -> Detector:
    """Logistic regression on a hidden state, fitted to high and low semantic entropy.

    Labels of answers are not learnt from: in training the reader is sampled, answers
    whose entropy is in the higher of two groups (:func:`semantic.two_means`) are
    positive.  Then nothing is sampled any more.  As published the entropy is that of
    :func:`semantic_entropy` with ``"discrete"``, and the hidden state that of the token
    before the end; the layer is chosen by grouped folds, the paper concatenates a few.

    Args:
      entailment, draw: as :func:`semantic_entropy` takes them.
    """
    how = draw_of(draw, _PUBLISHED["discrete"])
    rule = semantic.PRESETS["discrete"].rule
    meanings = Meanings(how, entailment, rule, asked=True, published=True)
    score = functools.partial(semantic.semantic_entropy, preset="discrete")

    def inputs(features: Features) -> tuple[Any, Any]:
        clusters = features.get(meanings.feature)
        states = jnp.moveaxis(features["hidden_before_last"], 1, 0)
        return states, None if clusters is None else jax.vmap(score)(clusters)

    return Detector(
        "semantic_entropy_probe",
        "logistic regression on the last word's hidden state, fitted to semantic "
        f"entropy of {how}; {named(entailment)}",
        "log odds of a high semantic entropy",
        "Kossen et al. 2024, semantic entropy probes",
        (("hidden_before_last", HiddenStates(tokens="before_last")),),
        inputs,
        decide=lambda params, x: logistic_scores(params, x[0]),
        fit=_fit_entropy,
        taught=measured(meanings),
    )
