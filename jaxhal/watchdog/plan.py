"""How an exploration goes on, and the queries that it is made of."""

import dataclasses
import math
from collections.abc import Sequence

from jaxhal.io.checks import at_least, one_of

#: The fractal transformations, in the order of their probabilities.
TRANSFORMATIONS = ("deduction", "analogy", "induction")
#: How rewards become probabilities.
SHARES = ("softmax", "shares")
#: Of a plan, what a later run of the same exploration may change.
OPEN = ("gamma", "least", "budget", "width")


@dataclasses.dataclass(frozen=True)
class Training:
    """How a policy is trained with Adam; by default as in the paper."""

    learning_rate: float = 1e-4
    batch_size: int = 64
    epochs: int = 300
    hidden: int = 128

    def __post_init__(self):
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; give one above 0")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an exploration goes on, and when it ends.

    Args:
      gamma: it ends once this share of the judged answers is hallucinated.
      least: but not before this many queries.
      budget: it ends after this many in any case.
      starts: queries it begins with.
      width: queries in a round, answered and judged at the same time.
      branch: queries made of one that the agent hallucinated at, by a policy.
      samples: answers to a query that its entropy is of, at least 2.
      temperature: at which those are drawn, above 0.
      answer_temperature: at which the answer that is judged is drawn.
      ways: that a query is changed in after a hallucination.
      how: ways are ``"reinforced"`` or taken at ``"random"``.
      shares: how rewards become probabilities: ``"softmax"`` or ``"shares"``.
      steps: queries changed in all ``ways`` before a policy is trained on them.
    """

    gamma: float = 0.6
    least: int = 50
    budget: int = 500
    starts: int = 10
    width: int = 8
    branch: int = 1
    samples: int = 10
    temperature: float = 1.0
    answer_temperature: float = 0.1
    ways: list[str] = dataclasses.field(default_factory=lambda: [*TRANSFORMATIONS])
    how: str = "reinforced"
    shares: str = "softmax"
    steps: int = 8
    seed: int = 0

    def __post_init__(self):
        counts = ("least", "budget", "starts", "width", "branch", "samples", "steps")
        at_least(1, **{name: getattr(self, name) for name in counts})
        if self.samples < 2:
            raise ValueError("samples is 1, which has no entropy; give at least 2")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}, and answers drawn at 0 are all "
                "equal; give one above 0"
            )
        if not 0 <= self.answer_temperature < math.inf:
            raise ValueError(
                f"answer_temperature is {self.answer_temperature}; give 0 or more"
            )
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; give a share in (0, 1]")
        one_of(("reinforced", "random"), how=self.how)
        one_of(SHARES, shares=self.shares)
        if not self.ways or set(self.ways) - set(TRANSFORMATIONS):
            raise ValueError(
                f"ways are {', '.join(self.ways)}; use some of "
                f"{', '.join(TRANSFORMATIONS)}"
            )
        if self.branch > len(self.ways):
            raise ValueError(
                f"branch is {self.branch}, and there are {len(self.ways)} ways"
            )


@dataclasses.dataclass
class Node:
    """A query of an exploration.

    ``parent`` is the query that it was made of, in a ``way``, ``"seed"`` where it is
    given; ``first`` the one that its path began with.  ``label`` is 1 hallucinated, 0
    not, ``None`` unknown; ``clean`` says that none of its answers is known to be
    hallucinated.  ``entropy`` of its answers is in nats, not a number where there are
    none; ``reward`` that of equation (2), of a seed the entropy that it found, up to 1;
    ``chances`` are those that each way had when it was changed; rounds count from 1.
    """

    query: str
    way: str
    depth: int
    parent: str
    first: str
    answer: str = ""
    context: str = ""
    label: int | None = None
    why: str = ""
    confidence: float = 0.0
    clean: bool = False
    entropy: float = math.nan
    reward: float = math.nan
    chances: Sequence[float] = ()
    time: str = ""
    round: int = 0
