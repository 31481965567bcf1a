"""What a run shows of the relevance its detectors read, over all of its answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxhal import plotting
from jaxhal.evaluation import auroc, bootstrap, mann_whitney, sampled_mann_whitney
from jaxhal.features.relevance import profile_level, resample
from jaxhal.lrp import PromptRelevance, RelevanceMap, ResponseRelevance
from jaxhal.reporting.results import interval_markdown
from jaxhal.scoring.inputs import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Bins of a profile, and answers of each class in a draw of the U test.
_BINS, _SIZE = 100, 200
_KINDS = (PromptRelevance, ResponseRelevance, RelevanceMap)
_READING = (
    "Of each answer's profile in 100 bins: its mean, and its level, the mean between "
    "its own extremes. Both means are that of R\\* but for the bins. An AUROC below "
    "0.5 means less in hallucinated answers; its interval resamples sources. p is that "
    "of a two-sided Mann-Whitney U test of all answers, and the median of 200 tests of "
    "{size} answers of each class. It takes answers to one source for independent and "
    "falls with their number, so it says little about how far the classes are apart: "
    "read that from the AUROC."
)


class Profiles(NamedTuple):
    """Relevance of all answers of a data set, by ``R_prompt`` and ``R_response``.

    Attributes:
      unit: what was explained, in whose unit relevance is.
      bins: the profile of each answer, resampled.
      levels: of :func:`jaxhal.features.relevance.profile_level`.
      maps: ``R*`` in bins; ``None`` when no detector read it.
    """

    unit: str
    bins: dict[str, Float[np.ndarray, "answers bins"]]
    levels: dict[str, Float[np.ndarray, " answers"]]
    maps: Float[np.ndarray, "answers response prompt"] | None

    @property
    def quantities(self) -> dict[str, Float[np.ndarray, " answers"]]:
        """A number an answer, by what it is."""
        means = {n: values.mean(1) for n, values in self.bins.items()}
        return {
            **{f"mean of {name} ({self.unit})": mean for name, mean in means.items()},
            **{f"level of {name} (0 to 1)": one for name, one in self.levels.items()},
        }


def profiles_of(data: Inputs) -> Profiles | None:
    """What detectors read of relevance, of each kind the first feature."""
    values: dict[type, list[np.ndarray]] = {}
    unit = ""
    for reducer, column in data.source.columns.values():
        if isinstance(reducer, _KINDS) and type(reducer) not in values:
            values[type(reducer)] = [column[part.row] for part in data.source.parts]
            unit = unit or reducer.seed.replace("_", " ")
    if not values:
        return None
    maps = values.get(RelevanceMap)
    bins, levels = {}, {}
    for name, kind in zip(("R_prompt", "R_response"), _KINDS, strict=False):
        if kind in values:
            bins[name], levels[name] = _in_bins(values[kind])
    return Profiles(unit, bins, levels, None if maps is None else np.stack(maps))


def _in_bins(
    profiles: Sequence[Float[np.ndarray, " _"]],
) -> tuple[Float[np.ndarray, "answers bins"], Float[np.ndarray, " answers"]]:
    """Profiles of any lengths in 100 bins, and their levels."""
    lengths = np.array([len(profile) for profile in profiles])
    valid = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(valid.shape, np.float32)
    padded[valid] = np.concatenate(profiles)
    return jax.device_get(_summary(padded, valid))


@jax.jit
def _summary(
    profiles: Float[Any, "answers tokens"], valid: Bool[Any, "answers tokens"]
) -> tuple[Array, Array]:
    def one(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        return resample(pair[0], _BINS, pair[1]), profile_level(*pair)

    return jax.lax.map(one, (profiles, valid), batch_size=32)


def figures(data: Inputs) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure: boxes and lines of the profiles, and the map of ``R*``."""
    profiles = profiles_of(data)
    if profiles is None:
        return
    labels, groups, unit = data.labels, data.groups.tolist(), profiles.unit
    if profiles.bins:
        figure = plotting.relevance_boxes(profiles.quantities, labels)
        yield "relevance_boxes", figure
        figure = plotting.relevance_lines(profiles.bins, labels, groups, unit)
        yield "relevance_lines", figure
    if profiles.maps is not None:
        yield "relevance_map", plotting.relevance_maps(profiles.maps, labels, unit)


def table(data: Mapping[str, Inputs]) -> list[dict[str, Any]]:
    """A row a quantity of each data set: how far apart its classes are."""
    rows = []
    for label, one in data.items():
        profiles, labels, groups = profiles_of(one), one.labels, one.groups.tolist()
        for name, values in profiles.quantities.items() if profiles else ():
            low, high = bootstrap(values, labels, groups)
            rows.append(
                {
                    "data": label,
                    "feature": name,
                    "p": mann_whitney(values, labels),
                    "p of samples": sampled_mann_whitney(values, labels, _SIZE),
                    "sample": int(min(_SIZE, *np.bincount(labels))),
                    "AUROC": auroc(values, labels),
                    "low": low,
                    "high": high,
                }
            )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as people read it, and how."""
    several = len({row["data"] for row in rows}) > 1
    sizes = " or ".join(map(str, dict.fromkeys(row["sample"] for row in rows)))
    shown = [
        ({"data": row["data"]} if several else {})
        | {
            "feature": row["feature"],
            "p": f"{row['p']:.2g}",
            "median p of samples": f"{row['p of samples']:.2g}",
            "AUROC": row["AUROC"],
            "AUROC low": row["low"],
            "AUROC high": row["high"],
        }
        for row in rows
    ]
    return f"{interval_markdown(shown)}\n\n{_READING.format(size=sizes)}"
