"""A labelled data set of one's own: a reader answers questions, a judge labels them."""

import collections
import dataclasses
import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from omegaconf import MISSING

import jaxhal
from jaxhal.datasets import QUESTIONS as QUESTIONS
from jaxhal.datasets import Question, check_questions, load_questions
from jaxhal.datasets.jsonl import write_rows
from jaxhal.generation import Sampling, generate, requests
from jaxhal.io.checks import one_of
from jaxhal.io.configuration import check_name, claim, structured, write_config
from jaxhal.io.files import alone, append, lines_of
from jaxhal.io.progress import progress_bar
from jaxhal.llm import hosts
from jaxhal.llm.endpoint import Endpoint, NoReply
from jaxhal.llm.judges import NEARNESS, EndpointJudge, Judge, OverlapRule, ReferenceRule
from jaxhal.models.lm import DTYPES, LM
from jaxhal.models.lm import kept_lm as model
from jaxhal.reading.keys import digest
from jaxhal.types import Example

_JUDGES = ("reference", "overlap", "endpoint")


@dataclasses.dataclass
class Writing:
    """Questions and what answers them.

    Attributes:
      name: of the folder that results go to.
      questions: of :data:`QUESTIONS`, or a file of one's own that ends in ``.jsonl``,
        as :func:`jaxhal.datasets.questions_from` takes it.
      options: of their loader.
      limit: keep this many questions, drawn by the seed; all by default.
      prompt: the user's turn, with ``{context}`` and ``{question}`` in it.
      max_new_tokens: the most tokens of an answer.
      temperature: of sampling; 0 takes the likeliest token.
      top_p: keep the likeliest tokens that hold this much probability.
      model: what answers.
      dtype: of its parameters.
      batch_size: answers written together.
      seed: of all chance.
      out: folder that the named folder goes to.
    """

    name: str = MISSING
    questions: str = MISSING
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit: int | None = None
    prompt: str = "{context}\n\n{question}"
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float | None = None
    model: str = "smollm2-135m"
    dtype: str = "float32"
    batch_size: int = 16
    seed: int = 0
    out: str = "runs"


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

    Attributes:
      folder: holds dataset.jsonl, answers.jsonl (every answer with its verdict, or with
        the error of its judge) and config.yaml.
      counts: how many answers there are of each kind.
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

    Args:
      source: the configuration.
      overrides: dotted ``key=value`` pairs.
      progress: show progress bars; ``None`` shows them on a terminal.

    Raises:
      ValueError: on a wrong configuration, a folder that holds a data set made by
        another one, or when no answer can be kept.
      OSError: when the folder cannot be written.
      RuntimeError: when another process writes to it.

    References:
      Bazarova et al., Hallucination Detection in LLMs with Topological Divergence on
      Attention Graphs, 2025, appendix C.
    """
    config = structured(Making, source, overrides)
    check_name(config.name)
    _check(config)
    folder = Path(config.out) / config.name
    claim(folder, config, _answers)
    questions = questions_of(config)
    judge, lm = _judge(config), model(config.model, config.dtype)
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
    return dataclasses.replace(
        config,
        batch_size=1,
        judge="",
        contained=None,
        refusals=False,
        nearness="",
        endpoint="",
        endpoint_model="",
        balance=True,
    )


def _check(config: Making) -> None:
    check_questions(config.questions)
    one_of(_JUDGES, judge=config.judge)
    one_of(NEARNESS, nearness=config.nearness)
    one_of(DTYPES, dtype=config.dtype)
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


def questions_of(config: Writing) -> list[Question]:
    """The questions that a configuration names, or those it draws from them."""
    found = load_questions(config.questions, config.options)
    if config.limit is not None:
        if not 1 <= config.limit <= len(found):
            raise ValueError(
                f"limit is {config.limit}; there are {len(found)} questions"
            )
        order = np.random.default_rng(config.seed).permutation(len(found))
        found = [found[at] for at in sorted(order[: config.limit])]
    names = [question.id for question in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two of the {len(names)} questions share an id; give others")
    return found


def _judge(config: Making) -> Judge:
    if config.judge == "overlap":
        return OverlapRule(contained=config.contained == 0)
    confirm = None
    if config.judge == "endpoint":
        with hosts.brought("the configuration"):
            there = Endpoint(config.endpoint, config.endpoint_model)
        confirm = EndpointJudge(there)
    return ReferenceRule(confirm, config.contained, config.refusals, config.nearness)


def prompt_of(config: Writing, question: Question) -> str:
    """The user's turn."""
    context = question.context or ""
    prompt = config.prompt.replace("{question}", question.text)
    return prompt.replace("{context}", context).strip()


def _answered(
    lm: LM,
    config: Making,
    questions: Sequence[Question],
    folder: Path,
    progress: bool | None,
) -> dict[str, dict[str, Any]]:
    """Answer and how it ended, by the question's id."""
    path = folder / "generated.jsonl"
    prompts = [prompt_of(config, question) for question in questions]
    names = [digest(prompt) for prompt in prompts]
    # An answer to what the question or its context was before is none.
    known = {(row["id"], row.get("prompt")): row for row in lines_of(path)}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()

    def row(
        at: int, response: str, stopped: str, logprob: float, tokens: int
    ) -> dict[str, Any]:
        about = {"model": config.model, "jaxhal": jaxhal.__version__, "made": today}
        ending = {"stopped": stopped, "logprob": logprob, "tokens": tokens}
        known_by = {"id": questions[at].id, "prompt": names[at]}
        return known_by | about | {"response": response} | ending

    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(config.seed), np.arange(len(questions))
    )
    asked = [(one.id, name) for one, name in zip(questions, names, strict=True)]
    lacking = [at for at, key in enumerate(asked) if key not in known]
    with progress_bar(len(lacking), "answering", "answer", progress) as bar:
        for start in range(0, len(lacking), config.batch_size):
            part = lacking[start : start + config.batch_size]
            some = {at: prompts[at] for at in part}
            errors = requests.unanswerable(lm, some, config.max_new_tokens)
            fresh = [
                row(at, "", "error", 0.0, 0) | {"error": error}
                for at, error in errors.items()
            ]
            if part := [at for at in part if at not in errors]:
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
                for at, (one,) in zip(part, found, strict=True):
                    total = float(one.logprobs.sum())
                    text = one.text.strip()
                    fresh.append(row(at, text, one.stopped, total, len(one.tokens)))
            append(path, fresh)
            known |= {(row["id"], row["prompt"]): row for row in fresh}
            bar.update(len(fresh))
    return {one.id: known[key] for one, key in zip(questions, asked, strict=True)}


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
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = []
    with progress_bar(len(questions), "judging", "answer", progress) as bar:
        for question in questions:
            answer = answers[question.id]
            about = {name: answer.get(name) for name in ("model", "jaxhal", "made")}
            about |= {"judge": named, "judged": today}
            row = _row(config, question, answer, judge)
            rows.append(row | {"provenance": about})
            bar.update()
    write_rows(folder / "answers.jsonl", rows)
    return rows


def _row(
    config: Making, question: Question, answer: Mapping[str, Any], judge: Judge
) -> dict[str, Any]:
    prompt = prompt_of(config, question)
    shown = bool(question.context) and str(question.context) in prompt
    row: dict[str, Any] = {
        "id": question.id,
        "prompt": prompt,
        "context": question.context if shown else None,
        "question": question.text,
        "response": answer["response"],
        "source": question.source or question.context or question.id,
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
        Example(**{name: row[name] for name in names})
    return [{k: v for k, v in row.items() if k != "error"} for row in kept]
