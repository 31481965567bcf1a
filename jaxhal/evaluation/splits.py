"""Which answers are learnt from and which are judged.

Answers that share a source are not independent: split them by group, or what was learnt
from one is tested on its sibling.  The ungrouped splits are those of published
protocols, kept to compare with their numbers.  Every part is an array of row numbers.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxhal.evaluation.checks import Groups, Mask, Rows, group_codes, mask
from jaxhal.io.checks import at_least

TrainTest = tuple[Int[np.ndarray, " train"], Int[np.ndarray, " test"]]
TrainValidationTest = tuple[
    Int[np.ndarray, " train"], Int[np.ndarray, " validation"], Int[np.ndarray, " test"]
]


class SplitError(ValueError):
    """Answers that no split can keep whole: the problem, then what to do about it."""

    def __str__(self) -> str:
        return "; ".join(self.args)


def kfold(n: int, folds: int = 5) -> list[TrainTest]:
    """Shuffled folds without regard to classes or groups, the protocol of LRP4RAG."""
    from sklearn.model_selection import KFold

    if not 2 <= folds <= n:
        raise ValueError(f"folds is {folds} for {n} answers; give 2 to {n}")
    return list(KFold(folds, shuffle=True, random_state=42).split(np.arange(n)))


def stratified_kfold(labels: Rows, folds: int = 5, seed: int = 0) -> list[TrainTest]:
    """Shuffled folds with the share of the classes even, whatever the groups.

    >>> [test.tolist() for _, test in stratified_kfold([0, 0, 1, 1], folds=2)]
    [[1, 2], [0, 3]]
    """
    from sklearn.model_selection import StratifiedKFold

    positive = mask(labels)
    fewest = int(min(positive.sum(), (~positive).sum()))
    if not 2 <= folds <= fewest:
        raise ValueError(
            f"folds is {folds}; give at least 2, and at most {fewest}, the number of "
            "answers of the rarer class"
        )
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    return list(splitter.split(positive, positive))


def grouped_kfold(
    labels: Rows, groups: Groups, folds: int = 5, seed: int = 0
) -> list[TrainTest]:
    """Shuffled folds that keep groups whole and the share of the classes even.

    Raises SplitError when a fold is left without one of the classes.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    positive = mask(labels)
    group = group_codes(groups, len(positive))
    at_least(2, folds=folds)
    for name, rows in (("hallucinated", positive), ("grounded", ~positive)):
        found = len(set(group[rows]))
        if found < folds:
            raise SplitError(
                f"the {name} answers come from {found} groups, too few for {folds} "
                "folds",
                "give fewer folds or more answers, or sources that are narrower",
            )
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    parts = list(splitter.split(positive, positive, group))
    for _, test in parts:
        _check_classes(positive[test], "a fold")
    return parts


def unseen_kinds(
    kinds: Sequence[Sequence[str]], groups: Groups, folds: int = 5, seed: int = 0
) -> list[TrainTest]:
    """Grouped folds, each judged on kinds of hallucination it was not fitted to.

    The kinds are dealt into as many parts as there are folds.  A fold is judged once a
    part, on its grounded answers and those whose first kind is of that part; what is
    learnt from are the answers of other folds that are of none of its kinds.

    Args:
      kinds: of each answer, none of a grounded one.
    """
    kind = np.array([next(iter(several), "") for several in kinds])
    known = np.unique(kind[kind != ""])
    if len(known) < folds:
        raise SplitError(
            f"the hallucinated answers are of {len(known)} kinds, too few for {folds} "
            "folds",
            "give fewer folds, or labels of more kinds",
        )
    dealt = np.array_split(np.random.default_rng(seed).permutation(known), folds)
    return [
        (
            train[[not {*kinds[row]} & {*part} for row in train]],
            test[np.isin(kind[test], ["", *part])],
        )
        for train, test in grouped_kfold(kind != "", groups, folds, seed)
        for part in dealt
    ]


def holdout(labels: Rows, groups: Groups, share: float, seed: int = 0) -> TrainTest:
    """One part held out, groups whole, with ``share`` of each class as near as can be.

    Groups are gone through in random order; one changes sides when that brings the
    numbers of hallucinated and of grounded answers in the part nearer to ``share`` of
    all, until no group does.  Gives the rows that stay and those held out, ascending;
    raises SplitError when a side is left without one of the classes.

    >>> rest, part = holdout([0, 1, 0, 1, 0, 1], "aabbcc", share=0.3)
    >>> rest.tolist(), part.tolist()
    ([0, 1, 2, 3], [4, 5])
    """
    positive = mask(labels)
    group = group_codes(groups, len(positive))
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; give a number between 0 and 1")
    sizes = np.zeros((len(set(group)), 2))
    np.add.at(sizes, (group, positive.astype(int)), 1)
    lacking = share * sizes.sum(0)
    taken = np.zeros(len(sizes), bool)
    order, moved = np.random.default_rng(seed).permutation(len(sizes)), True
    while moved:
        moved = False
        for at in order:
            after = lacking + sizes[at] if taken[at] else lacking - sizes[at]
            if np.abs(after).sum() < np.abs(lacking).sum():
                lacking, taken[at], moved = after, not taken[at], True
    rest, part = np.flatnonzero(~taken[group]), np.flatnonzero(taken[group])
    _check_classes(positive[rest], "what stays")
    _check_classes(positive[part], "what is held out")
    return rest, part


def toha_splits(n: int) -> list[TrainValidationTest]:
    """The five random splits in which TOHA's published code averages its scores.

    Seeds 42 to 46; a quarter is tested, rounded up, and 15 % of the remainder, rounded
    down, is for the threshold.  Neither classes nor groups are regarded (Bazarova et
    al., 2025).
    """
    if n < 10:
        raise ValueError(f"n is {n}; give at least 10 answers for three parts")
    parts = []
    for seed in range(42, 47):
        rest, test = _random_split(n, 0.25, seed)
        cut = len(rest) - int(0.15 * len(rest))
        parts.append((rest[:cut], rest[cut:], test))
    return parts


def leaky_halves(n: int) -> list[TrainTest]:
    """Two random halves and the same swapped, the protocol of Lookback Lens.

    Rows there are spans or windows, so one response has rows on both sides and the
    scores come out too high: ``grouped_kfold(labels, responses, folds=2)`` has no such
    leak (Chuang et al., Lookback Lens, 2024).
    """
    at_least(2, n=n)
    train, test = _random_split(n, 0.5, 42)
    return [(train, test), (test, train)]


def _random_split(n: int, share: float, seed: int) -> TrainTest:
    from sklearn.model_selection import train_test_split

    parts = train_test_split(np.arange(n), test_size=share, random_state=seed)
    return np.asarray(parts[0]), np.asarray(parts[1])


def _check_classes(positive: Mask, where: str) -> None:
    if positive.all() or not positive.any():
        missing = "grounded" if positive.any() else "hallucinated"
        raise SplitError(
            f"{where} has no {missing} answer",
            "give another seed, larger parts or smaller groups",
        )
