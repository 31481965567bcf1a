"""A labelled data set of one's own: a reader answers questions, a judge labels them."""

import collections
import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxhal
from jaxhal.datasets import QUESTIONS as QUESTIONS
from jaxhal.datasets import Question
from jaxhal.datasets.jsonl import write_rows
from jaxhal.experiments.writing import (
    Writing,
    check_writing,
    journal,
    keys_of,
    prompt_of,
    questions_of,
    source_of,
)
from jaxhal.generation import Sampling, generate
from jaxhal.io.checks import one_of
from jaxhal.io.configuration import claim, structured, write_config
from jaxhal.io.extras import need
from jaxhal.io.files import alone
from jaxhal.io.progress import progress_bar
from jaxhal.io.showing import quoted
from jaxhal.io.threads import at_once
from jaxhal.llm import hosts
from jaxhal.llm.endpoint import Endpoint, NoReply
from jaxhal.llm.judges import NEARNESS, EndpointJudge, Judge, OverlapRule, ReferenceRule
from jaxhal.models.lm import LM
from jaxhal.models.lm import kept_lm as model
from jaxhal.reading.keys import fingerprint
from jaxhal.types import Example


@dataclasses.dataclass
class Making(Writing):
    """How a data set is made; beside the fields of :class:`Writing`:

    Attributes:
      stop: texts that end an answer.
      judge: ``reference`` (:class:`jaxhal.llm.judges.ReferenceRule`), ``overlap``
        (:class:`jaxhal.llm.judges.OverlapRule`, which of the next three takes
        ``contained: 0`` alone), or ``endpoint``: the first, which has a language model
        confirm what may be hallucinated.
      contained: label of an answer that holds a reference and says more; left out by
        default, as in the paper.
      refusals: answers that decline are grounded where a reference declines too, and
        left out elsewhere, as :class:`jaxhal.llm.judges.ReferenceRule` has it.
      nearness: of an answer to a reference, as it has it: ``rouge_l`` or
        ``unigram_f1``.
      endpoint: base address of that model.
      endpoint_model: its name there.
      balance: keep as many hallucinated answers as grounded ones, drawn by the seed.
    """

    stop: list[str] = dataclasses.field(default_factory=list)
    judge: str = "reference"
    contained: int | None = None
    refusals: bool = False
    nearness: str = "rouge_l"
    endpoint: str = ""
    endpoint_model: str = ""
    balance: bool = True


class Made(NamedTuple):
    """A data set that was made.

    The folder holds dataset.jsonl, answers.jsonl (every answer with its verdict, or
    with the error of its judge) and config.yaml; answers are counted by their kind.
    """

    folder: Path
    counts: dict[str, int]


def make(
    source: str | os.PathLike | Mapping[str, Any] | Making,
    overrides: Iterable[str] = (),
    *,
    progress: bool | None = None,
) -> Made:
    """Makes a data set, or goes on with one that was begun.

    Answers are kept as they come: a run that was killed asks nothing twice.  An answer
    that cannot be judged has its error in answers.jsonl and is not in the data set.

    Raises:
      ValueError: on a wrong configuration, a folder that holds a data set made by
        another one, or when no answer can be kept.
      OSError: when the folder cannot be written.
      RuntimeError: when another process writes to it.

    References:
      Bazarova et al., Hallucination Detection in LLMs with Topological Divergence on
      Attention Graphs, 2025, appendix C.
    """
    need("experiments")
    config = structured(Making, source, overrides)
    _check(config)
    folder = Path(config.out) / config.name
    questions = questions_of(config)
    judge, lm = _judge(config), model(config.model, config.dtype, config.mesh)
    claim(folder, config, _answers)  # not before all that it names is found
    with alone(folder):
        answers = _answered(lm, config, questions, folder, progress)
        # Labels may be judged in another way than before, and no data set come of them.
        (folder / "dataset.jsonl").unlink(missing_ok=True)
        rows = _judged(config, questions, answers, judge, folder, progress)
        write_config(folder, config)
        kept = _kept(config, rows)
        write_rows(folder / "dataset.jsonl", kept)
    counts = collections.Counter(_kind(row) for row in rows)
    counts["kept"] = len(kept)
    return Made(folder, dict(counts))


def _answers(config: Making) -> Making:
    """What answers depend on; labels are judged anew each time."""
    asked = {field.name for field in dataclasses.fields(Writing)} | {"stop"}
    plain = Making(batch_size=1)
    kept = {name: getattr(config, name) for name in asked - {"batch_size"}}
    return dataclasses.replace(plain, **kept)


def _check(config: Making) -> None:
    check_writing(config)
    one_of(("reference", "overlap", "endpoint"), judge=config.judge)
    one_of(NEARNESS, nearness=config.nearness)
    if "{question}" not in config.prompt:
        raise ValueError(f"prompt is {config.prompt!r}; it must hold {{question}}")
    if config.contained not in (None, 0, 1):
        raise ValueError(f"contained is {config.contained}; use 0, 1 or leave it out")
    if config.judge == "overlap" and (
        config.contained == 1 or config.refusals or config.nearness != "rouge_l"
    ):
        raise ValueError(
            f"judge is 'overlap', contained {config.contained}, refusals "
            f"{config.refusals} and nearness {config.nearness!r}; that judge takes "
            "'contained: 0' alone of these"
        )
    if (config.judge == "endpoint") != bool(config.endpoint and config.endpoint_model):
        raise ValueError(
            f"judge is {config.judge!r}, endpoint {config.endpoint!r} and "
            f"endpoint_model {config.endpoint_model!r}; an endpoint judges by all three"
        )
    _sampling(config)


def _sampling(config: Making) -> Sampling:
    return Sampling(temperature=config.temperature, top_p=config.top_p)


def _judge(config: Making) -> Judge:
    if config.judge == "overlap":
        return OverlapRule(contained=config.contained == 0)
    confirm = None
    if config.judge == "endpoint":
        with hosts.brought("the configuration"):
            there = Endpoint(config.endpoint, config.endpoint_model)
        confirm = EndpointJudge(there)
    return ReferenceRule(confirm, config.contained, config.refusals, config.nearness)


def _answered(
    lm: LM,
    config: Making,
    questions: Sequence[Question],
    folder: Path,
    progress: bool | None,
) -> dict[str, dict[str, Any]]:
    """Answer and how it ended, by the question's id."""
    prompts = [prompt_of(config, question) for question in questions]
    keys = keys_of(jax.random.key(config.seed), len(questions))
    about = {"model": config.model, "jaxhal": jaxhal.__version__, "made": _today()}

    def row(response: str, stopped: str, logprob: float, tokens: int) -> dict[str, Any]:
        ending = {"stopped": stopped, "logprob": logprob, "tokens": tokens}
        return about | {"response": response} | ending

    def write(part: list[int]) -> list[dict[str, Any]]:
        found = generate(
            lm,
            [prompts[at] for at in part],
            max_new_tokens=config.max_new_tokens,
            sampling=_sampling(config),
            key=keys[np.array(part)],
            stop=config.stop,
            batch_size=config.batch_size,
            progress=False,
        )
        return [
            row(
                one.text.strip(),
                one.stopped,
                float(one.logprobs.sum()),
                len(one.tokens),
            )
            for (one,) in found
        ]

    asked = dict(zip([one.id for one in questions], prompts, strict=True))
    failed, path = row("", "error", 0.0, 0), folder / "generated.jsonl"
    by = fingerprint(lm)
    return journal(path, lm, config, by, asked, write, failed, progress)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _judged(
    config: Making,
    questions: Sequence[Question],
    answers: Mapping[str, Mapping[str, Any]],
    judge: Judge,
    folder: Path,
    progress: bool | None,
) -> list[dict[str, Any]]:
    """A row for each question: the answer, its label or the judge's error, and why."""
    named = config.judge
    if config.endpoint:
        named += f": {config.endpoint_model} at {config.endpoint}"

    def row(question: Question) -> dict[str, Any]:
        answer = answers[question.id]
        about = {name: answer.get(name) for name in ("model", "jaxhal", "made")}
        about |= {"judge": named, "judged": _today()}
        return _row(config, question, answer, judge) | {"provenance": about}

    rows = []
    with (
        contextlib.closing(at_once(row, questions)) as found,
        progress_bar(len(questions), "judging", "answer", progress) as bar,
    ):
        for one in found:
            rows.append(one)
            bar.update()
    write_rows(folder / "answers.jsonl", rows)
    return rows


def _row(
    config: Making, question: Question, answer: Mapping[str, Any], judge: Judge
) -> dict[str, Any]:
    prompt = prompt_of(config, question)
    context = (question.context or "").strip()
    row: dict[str, Any] = {
        "id": question.id,
        "prompt": prompt,
        "context": context if context and context in prompt else None,
        "question": question.text.strip(),
        "response": answer["response"],
        "source": source_of(question),
        "split": question.split,
        "references": question.answer,
        "stopped": answer["stopped"],
        "label": None,
        "why": "",
        "error": None,
    }
    if not row["response"]:
        return row | {"error": answer.get("error", "the answer is empty")}
    if answer["stopped"] == "length":
        return row | {"error": f"the answer is cut off after {answer['tokens']} tokens"}
    try:
        verdict = judge(question, row["response"])
    except (NoReply, ValueError) as error:
        return row | {"error": str(error)}
    if verdict.spans is not None and verdict.label is not None:
        row["labels"] = [span._asdict() for span in verdict.spans]
    return row | {"label": verdict.label, "why": verdict.why}


def _kind(row: Mapping[str, Any]) -> str:
    if row["error"] is not None:
        return "errors"
    return {1: "hallucinated", 0: "grounded", None: "unsure"}[row["label"]]


def _kept(config: Making, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Labelled answers, of each label as many as of the other if asked for."""
    by_label = {
        label: [at for at, row in enumerate(rows) if row["label"] == label]
        for label in (0, 1)
    }
    if not all(by_label.values()):
        raise ValueError(
            f"{len(by_label[1])} answers are hallucinated and {len(by_label[0])} "
            f"grounded of {len(rows)}; a data set needs both: see answers.jsonl"
        )
    if config.balance:
        rng = np.random.default_rng(config.seed)
        size = min(map(len, by_label.values()))
        by_label = {k: rng.permutation(v)[:size].tolist() for k, v in by_label.items()}
    kept = [rows[at] for at in sorted(at for some in by_label.values() for at in some)]
    for row in kept:  # what a data set's row must hold, checked here
        names = ("response", "prompt", "context", "question", "label")
        try:
            Example(**{name: row[name] for name in names})
        except ValueError as error:
            raise ValueError(f"answer to {quoted(row['id'])}: {error}") from error
    return [{k: v for k, v in row.items() if k != "error"} for row in kept]
