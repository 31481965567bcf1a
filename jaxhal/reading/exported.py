"""Features of what an engine exported of its answers, in place of a second reading."""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.capture.states import looked_at, read_states
from jaxhal.capture.taps import layer_indices
from jaxhal.features.base import Feature, OfRewrite, OfText, Reducer
from jaxhal.features.hidden import state_number
from jaxhal.io.checks import at_least
from jaxhal.models.batching import Encoded, Planned, collate
from jaxhal.models.config import Config
from jaxhal.models.lm import LM
from jaxhal.reading import states as files
from jaxhal.reading.extract import Extraction, kinds
from jaxhal.reading.logprobs import OF_LOGPROBS, check_logprobs, has_end
from jaxhal.types import Example

# A folder of files, or the tensors of each answer; None where only log probabilities
# were exported.
States = str | os.PathLike | Sequence[Mapping[str, Any] | None] | None

# What a reducer of another kind looks at, which no engine exports.
_INSIDE = {
    "probs": "attention",
    "lens": "what is inside of each layer",
    "relevance": "relevance, a pass back through the model",
}


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was exported of answers: which hidden states, and where they are.

    Attributes:
      states: a folder in which each example's file lies by ``states`` or ``id``, or the
        ``token_ids`` and ``hidden_states`` of each example; ``None`` for none.
      numbers: of the hidden states that these hold, ascending.
    """

    states: States
    numbers: tuple[int, ...]

    @classmethod
    def of(
        cls, states: States, layers: Sequence[int] | None, config: Config
    ) -> "Exported":
        """With layers as an engine was told, by default all of the reader's.

        ValueError on layers that the reader does not have, or not in ascending order.
        """
        depth = config.num_hidden_layers
        if states is None:
            if layers is not None:
                raise ValueError(
                    f"layers {tuple(layers)} are of hidden states, and there are none; "
                    "give states too"
                )
            return cls(None, ())
        wanted = range(depth + 1) if layers is None else layers
        numbers = tuple(state_number(layer, depth) for layer in wanted)
        if not numbers or [*numbers] != sorted(set(numbers)):
            raise ValueError(
                f"layers is {tuple(wanted)}; name at least one, ascending, as the "
                "files have them whatever order an engine was told"
            )
        if isinstance(states, str | os.PathLike) and not os.path.isdir(states):
            raise ValueError(f"{states} is no folder; give that of the hidden states")
        return cls(states, numbers)

    def lacks(self, feature: Feature, config: Config) -> str | None:
        """What a feature is made of that was not exported, in words, if anything."""
        match feature:
            case OfText():
                return None
            case OfRewrite():
                return "the pass over another prompt"
            case Reducer(reads="hidden"):
                wanted = set(layer_indices(feature, config)) - {*self.numbers}
                return f"hidden states {_listed(wanted)}" if wanted else None
            case Reducer(reads="logits"):
                if self.has_logits(config) or feature in OF_LOGPROBS:
                    return None
                return f"logits, which hidden state {config.num_hidden_layers} makes"
            case Reducer():
                return _INSIDE[feature.reads]
        return "more than the answer's own tokens"

    def has_logits(self, config: Config) -> bool:
        """Whether logits can be made of the last hidden state."""
        return config.num_hidden_layers in self.numbers

    def of_states(
        self, reducers: Mapping[str, Reducer], config: Config
    ) -> dict[str, Reducer]:
        """Those that hidden states make; log probabilities make the others."""
        logits = self.has_logits(config)
        return {
            name: one
            for name, one in reducers.items()
            if one.reads == "hidden" or logits
        }

    def __str__(self) -> str:
        return f"hidden states {_listed(self.numbers)}" if self.numbers else "no state"


def _listed(numbers: Any) -> str:
    """Numbers in words, runs of them short.

    >>> _listed([4, 0, 1, 2, 7])
    '0-2, 4, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )


def extract_exported(
    lm: LM,
    examples: Sequence[Example],
    features: Mapping[str, Feature],
    exported: Exported,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
) -> "FromEngine":
    """What :func:`~jaxhal.reading.extract.extract` gives, of what was exported.

    The tokens are those that the reader's tokenizer makes of an example, and an example
    of which an engine's differ is an error.  Where it gave nothing of the last token,
    the end of the sequence, the answer is without that token; features that look for it
    are an error.

    Args:
      features: of those that :meth:`Exported.lacks` nothing of.
    """
    at_least(1, batch_size=batch_size)
    given = exported.states
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(examples):
            raise ValueError(
                f"there are states of {len(given)} answers, and {len(examples)} "
                "examples; give those of each, in their order"
            )
    found = FromEngine(
        lm, kinds(features), None, batch_size, progress, exported=exported
    )
    found.enter(examples)
    if found.endless:
        warnings.warn(
            "an engine gave nothing of the end of the sequence of some answers, which "
            "are judged without it",
            stacklevel=2,
        )
    return found


@dataclasses.dataclass
class FromEngine(Extraction):
    """Answers of which an engine exported what features are made of."""

    exported: Exported = dataclasses.field(kw_only=True)
    endless: bool = False
    # Of the kept examples.
    sources: dict[int, files.Tensors] = dataclasses.field(default_factory=dict)
    given: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        own, config = self.kinds.own, self.lm.config
        self._of_states = self.exported.of_states(own, config)
        self._of_logprobs = {n: r for n, r in own.items() if n not in self._of_states}
        # Which of the states are looked at, by their places in what is exported.
        wanted = looked_at(self._of_states.values(), config)
        numbers = enumerate(self.exported.numbers)
        self._places = [at for at, number in numbers if number in wanted]

    def encode(self, number: int, example: Example) -> Encoded:
        """The tokens, less the last where that is the end and was not exported."""
        row = super().encode(number, example)
        tokenizer = self.lm.require_tokenizer()
        count = len(row.response_ids)
        if self._of_states:
            tensors = self._tensors(number, example)
            layers, width = len(self.exported.numbers), self.lm.config.hidden_size
            there = files.check_tensors(tensors, layers, width)
            texts = row.prompt_ids, row.response_ids
            where = files.name_of(tensors)
            files.check_tokens(there, *texts, tokenizer, where, has_end(row))
            self.sources[number] = tensors
            count = len(there) - len(row.prompt_ids)
        if self._of_logprobs:
            if example.logprobs is None:
                raise ValueError(
                    "the answer has no 'logprobs'; have the engine write them, or "
                    f"hidden state {self.lm.config.num_hidden_layers}"
                )
            check_logprobs(example.logprobs, row, tokenizer, example.response)
            count = min(count, len(example.logprobs))
            size, some = self.lm.config.vocab_size, example.logprobs[:count]
            self.given[number] = {
                name: OF_LOGPROBS[reducer](some, size)
                for name, reducer in self._of_logprobs.items()
            }
        if count == len(row.response_ids):
            return row
        for name, reducer in self.kinds.own.items():
            # A mean is one of all tokens; others that see all at once look for the end.
            if not reducer.rowwise and getattr(reducer, "tokens", None) != "mean":
                raise ValueError(
                    "the engine gave nothing of the end of the sequence, which "
                    f"feature {name!r} looks at; have it read the answer and its end "
                    "as part of a prompt, or leave detectors of that feature out"
                )
        self.endless = True
        return dataclasses.replace(
            row, response_ids=row.response_ids[:count], offsets=row.offsets[:count]
        )

    def _tensors(self, number: int, example: Example) -> files.Tensors:
        states = self.exported.states
        if isinstance(states, Sequence) and not isinstance(states, str):
            if not isinstance(given := states[number], Mapping):
                raise ValueError(
                    f"states of answer {number} are not there; give token_ids and "
                    "hidden_states by name"
                )
            return given
        assert states is not None
        return files.place_of(states, example)

    def _read_group(self, group: Planned) -> dict[str, Any]:
        features: dict[str, Any] = {}
        columns = group.prompt_length, group.response_length
        if self._of_states:
            rows = [self.rows[at] for at in group.rows]
            pad_id = self.lm.require_tokenizer().pad_id
            batch = collate(rows, pad_id, *columns, group.size)
            numbers = tuple(self.exported.numbers[at] for at in self._places)
            states = self._states(group)
            reducers = self._of_states
            features |= read_states(self.lm, batch, reducers, numbers, states)
        for name in self._of_logprobs:
            values = np.zeros((group.size, group.response_length), np.float32)
            for at, place in enumerate(group.rows):
                own = self.given[self.kept[place]][name]
                values[at, : len(own)] = own
            features[name] = values
        return features

    def _states(self, group: Planned) -> np.ndarray:
        """``[batch explicit layer width]`` of some rows, zero on padding."""
        explicit, width = group.response_length + 1, self.lm.config.hidden_size
        out = np.zeros((group.size, explicit, len(self._places), width), np.float32)
        for at, place in enumerate(group.rows):
            row, tensors = self.rows[place], self.sources[self.kept[place]]
            first = len(row.prompt_ids) - 1
            end = first + 1 + len(row.response_ids)
            out[at, : end - first] = files.rows_of(tensors, first, end, self._places)
        return out
