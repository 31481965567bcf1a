"""What detectors and an exploration give, by number: recorded, compared.

    python tests/golden_scores.py            writes tests/golden/scores/*.json

A change that is meant to change a number records them anew and says so; every other one
leaves them equal.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import jaxhal
import tiny_encoders
from jaxhal import detectors
from jaxhal.datasets import bundled
from jaxhal.types import Example
from tiny import GOLDEN
from tiny_lm import write_lm

FOLDER = GOLDEN / "scores"

# Decided by a second reading of the answer, one backwards, or a text encoder.
DEMO_MORE = (
    "sink_share",
    "context_gain",
    "context_gain_count",
    "detection_prompt",
    "icl_prompt",
    "nli_context",
    "lrp4rag_threshold",
)
# Decided by a model of their own that has to be named, as :func:`own_model` names it.
OWN_MODEL = ("pair_grader", "token_classifier")
SAMPLED = (
    "semantic_entropy",
    "semantic_entropy_discrete",
    "predictive_entropy",
    "length_normalized_entropy",
    "eigenscore",
    "selfcheck_nli",
    "selfcheck_prompt",
    "selfcheck_ngram",
    "selfcheck_bertscore",
)
# Samples while it is fitted.
TAUGHT = ("semantic_entropy_probe",)


def own_model(name: str) -> dict[str, Any]:
    """A detector of those with a model of their own, with a tiny one."""
    if name == "token_classifier":
        return {name: tiny_encoders.lent("modernbert-tokens", 768)}
    labels = ["contradiction", "entailment"]
    return {
        name: {"source": tiny_encoders.lent("deberta-v3", 512, 2), "labels": labels}
    }


def labelled(count: int = 60) -> list[dict[str, Any]]:
    """Rows of answers, three to a source; made-up ones are longer and have a span."""
    rows = []
    for number in range(count):
        source, made_up = number // 3, number % 3 == 0 or number % 7 == 0
        response = f"It holds pears, {number}."
        labels = []
        if made_up:
            start = len(response) + 1
            response += " And a dragon lives there."
            labels = [{"start": start, "end": len(response), "label": "conflict"}]
        rows.append(
            {
                "id": f"a{number}",
                "context": f"Crate {source} holds {'very ' * (source % 4)}ripe pears.",
                "question": "What is in it?",
                "response": response,
                "labels": labels,
                "source": f"s{source}",
                "split": "train" if source < 14 else "test",
            }
        )
    return rows


def demo() -> dict[str, Any]:
    """Every default and shipped detector, and those above, on the bundled answers."""
    lm = jaxhal.load("smollm2-135m")
    found = _scores(lm, bundled(), None)
    more = _scores(lm, bundled(), DEMO_MORE)
    return {name: found[name] | more[name] for name in found}


def catalogue() -> dict[str, Any]:
    """Every detector that needs no training, on the tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        lm = jaxhal.load(str(write_lm(Path(folder), context=4096)))
        examples = [
            Example(row["response"], context=row["context"], question=row["question"])
            for row in labelled(12)
        ]
        return _scores(lm, examples, untaught())


def untaught() -> list[Any]:
    """Detectors that need no training; few samples, and models of their own tiny."""
    names = [n for n, make in detectors.CATALOGUE.items() if make().fit is None]
    draw = {"draw": {"n": 3, "max_new_tokens": 12}}
    drawn = [detectors.build({name: draw}) for name in SAMPLED]
    models = [detectors.build(own_model(name)) for name in OWN_MODEL]
    return [*drawn, *models, *(n for n in names if n not in (*SAMPLED, *OWN_MODEL))]


def _scores(lm, examples, chosen) -> dict[str, Any]:
    reports = jaxhal.score(lm, examples, chosen, progress=False)
    wrong = [report.error for report in reports if report.error]
    assert not wrong, wrong[0]
    return {
        what: {
            name: [getattr(report, what)[name] for report in reports]
            for name in sorted(getattr(reports[0], what))
        }
        for what in ("scores", "probabilities")
    }


def exploration() -> dict[str, Any]:
    """The queries, chances and points of an exploration of the small world."""
    from test_encoding import write, write_pooling

    from explore_world import explorer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder = write(folder / "encoder")
        write_pooling(encoder, normalize=True, mean=True)
        (folder / "explored").mkdir()
        found = explorer(folder / "explored", encoder).run(progress=False)
    return {
        "queries": [node.query for node in found.nodes],
        "labels": [node.label for node in found.nodes],
        "chances": [list(node.chances) for node in found.nodes],
        "points": sorted(node.query for node in found.nodes if node.label == 1),
    }


def compare(found: Any, known: Any, where: str = "") -> list[str]:
    """What differs: a number by more than 1e-5 of it, anything else at all."""
    if isinstance(known, Mapping):
        lost = [f"{where}: {key} is gone" for key in known if key not in found]
        new = [f"{where}: {key} is new" for key in found if key not in known]
        both = [key for key in known if key in found]
        return [
            *lost,
            *new,
            *(d for k in both for d in compare(found[k], known[k], f"{where}/{k}")),
        ]
    if isinstance(known, list) and known and isinstance(known[0], float | int | None):
        a, b = (np.array(some, float) for some in (found, known))
        if a.shape != b.shape:
            return [f"{where}: {a.shape} for {b.shape}"]
        wrong = ~np.isclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
        if not wrong.any():
            return []
        at = int(np.argmax(wrong))
        return [f"{where}: {int(wrong.sum())} differ, such as {a[at]} for {b[at]}"]
    if isinstance(known, list):
        if len(found) != len(known):
            return [f"{where}: {len(found)} for {len(known)}"]
        return [
            difference
            for at, (a, b) in enumerate(zip(found, known, strict=True))
            for difference in compare(a, b, f"{where}[{at}]")
        ]
    return [] if found == known else [f"{where}: {found!r} for {known!r}"]


RECORDS: dict[str, Callable[[], Any]] = {
    "demo": demo,
    "catalogue": catalogue,
    "exploration": exploration,
}


def known(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=RECORDS, default=list(RECORDS))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().only:
        text = json.dumps(RECORDS[name](), indent=0, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(text + "\n")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
