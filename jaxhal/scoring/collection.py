"""From labelled answers to detectors that are ready for new ones, in one step."""

import dataclasses
import glob
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import numpy as np

from jaxhal.detectors import CATALOGUE, Detector, build
from jaxhal.evaluation.held_out import Measured
from jaxhal.evaluation.splits import SplitError, grouped_kfold
from jaxhal.io.files import replacing, staged
from jaxhal.io.progress import progress_bar
from jaxhal.io.showing import shown
from jaxhal.models.lm import LM
from jaxhal.models.mesh import check_one_process
from jaxhal.models.registry import private_cache
from jaxhal.reading.keys import fingerprint
from jaxhal.reading.store import Store
from jaxhal.reporting import results
from jaxhal.reporting.markdown import escaped
from jaxhal.reporting.results import Judged
from jaxhal.scoring import encoders
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.folders import check_folder, located, own, saved
from jaxhal.scoring.inputs import (
    about_answers,
    check_marked,
    check_rows,
    collect,
    fit_part,
    frame_of,
    readable,
)
from jaxhal.scoring.saving import FILES, card_of, check_spec, load, save
from jaxhal.scoring.tokens import unseen_highlights
from jaxhal.scoring.verdicts import decider
from jaxhal.types import Example

_FOLDS = 5
# What cards say of all detectors of a folder.
_ABOUT = ("model", "family", "parameters", "depth", "data", "note")


@dataclasses.dataclass(frozen=True)
class FittedDetectors:
    """Detectors fitted to the same answers, as one reader read them.

    :func:`jaxhal.score` takes it as it is.  The controls are among them: they flag
    nothing.

    Attributes:
      about: the reader, the answers and how they were judged, for the cards.
      specs: detector -> how :func:`jaxhal.detectors.build` makes it.
      fitted: detector -> what was fitted to all answers.
      rows: what held-out answers showed, a row per detector, the best first and
        controls last, as :func:`jaxhal.evaluation.compare` has them.
    """

    about: Mapping[str, Any]
    specs: Mapping[str, Any]
    fitted: Mapping[str, Fitted]
    rows: Sequence[Mapping[str, Any]]

    def __getitem__(self, name: str) -> Fitted:
        return self.fitted[name]

    def __iter__(self) -> Iterator[Fitted]:
        return iter(self.fitted.values())

    def __len__(self) -> int:
        return len(self.fitted)

    def __repr__(self) -> str:
        return f"<FittedDetectors for {self.about['model']}: {', '.join(self.fitted)}>"

    def for_reader(self, lm: LM) -> "FittedDetectors":
        """The same, which refuse what a reader of other weights has read.

        And what others say than the encoders that they ask now.
        """
        reader = fingerprint(lm)
        named = {
            name: dataclasses.replace(
                one, reader=reader, encoders=encoders.fingerprints(one.detector)
            )
            for name, one in self.fitted.items()
        }
        return dataclasses.replace(self, fitted=named)

    def save_pretrained(
        self, folder: str | os.PathLike, *, force: bool = False
    ) -> None:
        """Writes ``<detector>/params.safetensors`` and ``card.json``, and a README.

        The folder takes its name when it is whole.

        Args:
          force: replace detectors that were saved there before.

        Raises:
          FileExistsError: when the folder holds something else, or detectors and
            ``force`` is not given.
        """
        check_folder(Path(folder), force)
        with staged(folder, own=own) as place:
            for name, one in self.fitted.items():
                method = one.detector.name
                rows = [row for row in self.rows if row["method"] == method]
                card = {**self.about, "metrics": rows}
                save(place / name, one, self.specs[name], card)
            with replacing(place / "README.md") as file:
                file.write(self.card())

    def push_to_hub(self, repo: str, **options: Any) -> str:
        """Uploads what :meth:`save_pretrained` writes; returns its address.

        Args:
          repo: ``"owner/name"``.
          options: of ``huggingface_hub.create_repo``, such as ``private=True``.
        """
        import tempfile

        from huggingface_hub import create_repo, list_repo_files, upload_folder

        for name, one in self.fitted.items():
            if here := [source for source in one.encoders if Path(source).is_dir()]:
                raise ValueError(
                    f"detector {name!r} asks the classifier in {here[0]}, which nobody "
                    "else has; put that on the hub, and fit with its 'owner/name'"
                )
        create_repo(repo, exist_ok=True, **options)
        token = options.get("token")
        # Of detectors that were there before none decides with these; folders of others
        # further down stay.
        there = (PurePosixPath(name) for name in list_repo_files(repo, token=token))
        old = [one for one in there if len(one.parts) == 2 and one.name in FILES]
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder) / "detectors")
            made = upload_folder(
                repo_id=repo,
                folder_path=Path(folder) / "detectors",
                token=token,
                delete_patterns=[glob.escape(str(one)) for one in old],
            )
        return str(made)

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike, *, endpoints: Iterable[str] = ()
    ) -> "FittedDetectors":
        """Detectors from a folder, or by ``"owner/name"`` from the Hugging Face hub.

        Raises ValueError where there are none, or one is damaged.

        Args:
          name: a folder of a repository has that behind: ``"owner/name/folder"``.
          endpoints: as :func:`jaxhal.scoring.load` takes them.
        """
        folder = located(str(name))
        if not (places := saved(folder)):
            use = "jaxhal.scoring.released_probe"
            raise ValueError(f"{name} holds a released probe; use {use}")
        fitted = {one.name: load(one, endpoints=endpoints) for one in places}
        cards = {one.name: card_of(one) for one in places}
        first = next(iter(cards.values()))
        rows = [row for card in cards.values() for row in card.get("metrics", [])]
        rows.sort(key=lambda row: (row["control"], -row["AUROC"]))
        return cls(
            {key: first[key] for key in _ABOUT if key in first},
            {name: card["detector"] for name, card in cards.items()},
            fitted,
            rows,
        )

    def _reader(self) -> list[str]:
        """What is known of it; earlier versions noted its name alone."""
        about = self.about
        if "family" not in about:
            return []
        shape = f"{about['depth']} layers, {about['parameters']:,} parameters"
        return [f"A model of the family {escaped(about['family'])}: {shape}.", ""]

    def _verdicts(self) -> str:
        """Which of them decides, as :func:`jaxhal.scoring.verdicts.ranked` has it."""
        if (one := decider([*self])) is None:
            return "None of these decides a verdict."
        return (
            f"Verdicts are by {escaped(one.detector.name)}: of what beats it, the "
            "single method of the highest AUROC decides, unless an ensemble's is "
            "higher by more than one standard error."
        )

    def card(self) -> str:
        """What people should know before they rely on these detectors, as Markdown."""
        model, data = self.about["model"], self.about["data"]
        # Cards of runs did not always say how many sources there are.
        to = f" to {data['sources']} sources" if "sources" in data else ""
        several = any(row["AUROC (folds) sd"] for row in self.rows)
        lines = [
            *("---", "library_name: jaxhal", "tags: [hallucination-detection]", "---"),
            f"# Hallucination detectors for what {escaped(model)} reads",
            "",
            *self._reader(),
            f"Fitted to {escaped(data['name'])}: {data['answers']} answers{to}, "
            f"{data['hallucinated']} hallucinated.",
            "",
            self.about.get("note", "The figures are of answers that were held out."),
            "",
            results.markdown(self.rows, several),
            "",
            f"What does not beat the best control flags nothing. {self._verdicts()}",
            "",
            "```python",
            "import jaxhal",
            "",
            f"lm = jaxhal.load({json.dumps(shown(model))})",
            "ready = jaxhal.FittedDetectors.from_pretrained(...)  # where this lies",
            "for report in jaxhal.score(lm, examples, ready):",
            "    print(report.verdict, report.probability, report.spans)",
            "```",
            "",
        ]
        return "\n".join(lines)


def fit(
    lm: LM,
    examples: Iterable[Example],
    detectors: Sequence[str | Mapping[str, Any]],
    *,
    data: str = "labelled",
    folds: int = _FOLDS,
    seed: int = 0,
    batch_size: int = 8,
    store: str | os.PathLike | None = None,
    progress: bool | None = None,
) -> FittedDetectors:
    """Fits detectors to labelled answers, and finds out what they are worth.

    Each is fitted without one fold of the sources after the other and judges that fold;
    so is every control.  What is returned was then fitted to all answers.  Warns about
    a fit that learnt nothing, about detectors that do not clearly beat the best control
    and so flag nothing, and about answers that could not be read.

    Args:
      examples: with ``label`` or ``labels``; ``source`` says which are not independent.
      detectors: names or specs as :func:`jaxhal.detectors.build` takes them.
      data: what the answers are called in the cards.
      folds: of cross-validation.
      store: folder that keeps what was read, by default one in the cache.

    Raises:
      ValueError: on an unknown detector, an answer without a label, too few sources
        of a class for the folds, or a seed that is not 0 to 4294967295.
    """
    if not detectors:
        raise ValueError("detectors is empty; name at least one")
    if isinstance(detectors, str | Mapping):
        raise ValueError(f"detectors is {detectors!r:.80}; give a list of them")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed is {seed}; give 0 to {(1 << 32) - 1}")
    check_one_process(lm.params, "reading into a store")
    if not (examples := list(examples)):
        raise ValueError("examples is empty; give labelled answers")
    specs = beside_controls(detectors, lm)
    chosen = [build(spec) for spec in specs.values()]
    if all(one.label is not None for one in examples):
        _parts(examples, folds, seed)  # what is too little is not read first
    check_rows(lm, chosen)
    check_marked(chosen, examples)
    found = collect(
        lm,
        examples,
        chosen,
        Store(store or private_cache("features")),
        batch_size=batch_size,
        progress=progress,
    )
    found.warn_of_errors()
    judged, apart, key = [], [], jax.random.key(seed)
    parts = _parts(found.examples, folds, seed)
    with progress_bar(len(chosen) * (folds + 1), "fitting", "fit", progress) as bar:
        for fold, (train, test) in enumerate(parts):
            with warnings.catch_warnings():
                # Of each fold; that of all answers, below, is said.
                warnings.filterwarnings("ignore", "detector '.*' ranks answers")
                fitted = fit_part(
                    chosen, found, train, jax.random.fold_in(key, fold), bar=bar
                )
            frame = frame_of(found, test, fitted)
            judged.append(Judged(data, data, fold, fold, 0, frame))
            apart.append((test.tolist(), fitted))
        everything = np.arange(len(found.labels))
        fitted = fit_part(
            chosen, found, everything, jax.random.fold_in(key, folds), bar=bar
        )
    rows = results.table(judged, chosen)
    by_name = {row["method"]: row for row in rows}
    may = [row["method"] for row in rows if row["beats controls"] == "yes"]
    spans = unseen_highlights(found, apart, may)
    ready = {
        name: dataclasses.replace(
            one,
            highlights=spans.get(name),
            beats=by_name[name]["beats controls"],
            measured=Measured.of(data, by_name[name], found.labels),
        )
        for name, one in fitted.items()
    }
    methods = [name for name, one in ready.items() if not one.detector.control]
    if vain := [shown(name) for name in methods if ready[name].beats != "yes"]:
        best = max(
            (row for row in rows if row["control"]), key=lambda row: row["AUROC"]
        )
        warnings.warn(
            "detectors that do not clearly beat the best control, "
            f"{best['method']} with AUROC {best['AUROC']:.3f}, on held-out answers: "
            f"{', '.join(vain)}; they flag nothing and decide no verdict, so give more "
            "labelled answers, or use other detectors",
            stacklevel=2,
        )
    about = about_answers(lm, data, found.examples)
    about["note"] = (
        f"The figures are of {folds} folds that keep sources whole: each answer is "
        "judged by a fit that has not seen its source. What is saved was fitted to all "
        "of them afterwards."
    )
    return FittedDetectors(about, specs, ready, rows).for_reader(lm)


def beside_controls(
    detectors: Sequence[str | Mapping[str, Any]], lm: LM | None = None
) -> dict[str, Any]:
    """Name -> spec of detectors, then of every control, which a reader may lack.

    Raises:
      ValueError: when two have one name or cannot be saved, or
        :func:`jaxhal.detectors.build` does.
    """
    specs: dict[str, Any] = {}
    for spec in detectors:
        name = build(spec).name
        check_spec(spec)
        if name in specs:
            raise ValueError(
                f"two detectors are named {name!r}; give one another 'name'"
            )
        specs[name] = spec
    made = (make() for name, make in CATALOGUE.items() if name not in specs)
    controls = [one for one in made if one.control]
    if lm is not None:
        controls = readable(lm, controls)
    return specs | {one.name: one.name for one in controls}


def _parts(examples: Sequence[Example], folds: int, seed: int) -> list[Any]:
    labels, groups = [one.label for one in examples], [one.group for one in examples]
    if len(set(labels)) < 2:
        raise ValueError(f"all {len(labels)} answers have one label; give some of both")
    try:
        return grouped_kfold(labels, groups, folds, seed)
    except SplitError as error:
        raise ValueError(f"the answers cannot be judged by folds: {error}") from error


#: What detectors are asked for by: a name, a folder, or themselves, fitted or not.
Asked = str | os.PathLike | Detector | Fitted | FittedDetectors
