"""Does the source support each sentence of the answer?  Classifiers of pairs say so.

Tang et al., `MiniCheck <https://arxiv.org/abs/2404.10774>`_, EMNLP 2024; Lei et al.,
`FactCG <https://arxiv.org/abs/2501.17144>`_, NAACL 2025; Li et al., `HHEM-2.1-Open
<https://doi.org/10.57967/hf/3240>`_, 2024.
"""

from collections.abc import Sequence
from typing import Literal

from jaxhal.detectors.base import Detector, factory
from jaxhal.detectors.selfcheck import SentenceSupport, over_sentences
from jaxhal.llm.entailment import Entailment, Inference, named


@factory
def nli_context(
    entailment: str | Entailment = "similarity",
    how: Literal["mean", "max"] = "mean",
) -> Detector:
    """How little the source text supports the answer, sentence by sentence.

    That is 1 minus the probability that a sentence follows from it; nothing is sampled.
    A baseline of Lookback Lens.  Arguments are those of :func:`selfcheck_nli`.
    """
    support = SentenceSupport(entailment, None, "ordinary")
    summary = f"sentences that the source does not support; {named(entailment)}"
    reference = "baseline of Chuang et al., Lookback Lens, EMNLP 2024"
    return over_sentences("nli_context", summary, "0 to 1", reference, support, how)


def pair_grader(
    source: str = "lytang/MiniCheck-DeBERTa-v3-Large",
    labels: Sequence[str] | None = None,
    template: str | None = None,
    length: int | None = None,
    name: str | None = None,
) -> Detector:
    """1 minus the support of the sentence that the source supports least.

    A classifier of pairs grades each sentence of the answer.  A source longer than it
    reads is cut into windows that overlap by a quarter, of which the one that supports
    a sentence most counts; published code cuts between sentences.

    Args:
      source: MiniCheck's or FactCG's DeBERTa, HHEM-2.1-Open, or any classifier of
        natural language inference, as :func:`jaxhal.models.encoders.load_encoder` takes
        it.
      labels: its classes in order, of which ``entailment`` is support; needed where
        its configuration does not name them, as for a copy of MiniCheck's in a folder:
        ``[contradiction, entailment]``.
      template, length: as :class:`~jaxhal.llm.entailment.Inference` takes them.
    """
    classes = None if labels is None else tuple(labels)
    return _pair_grader(Inference(source, classes, template, length), name=name)


@factory
def _pair_grader(grader: Inference) -> Detector:
    support = SentenceSupport(grader, None, "ordinary")
    return over_sentences(
        "pair_grader",
        f"support of the least supported sentence; {grader.name}",
        "1 - probability, 0 to 1",
        "Tang et al., MiniCheck, EMNLP 2024; Lei et al., FactCG, NAACL 2025; Li et "
        "al., HHEM-2.1-Open, 2024",
        support,
        "max",
    )
