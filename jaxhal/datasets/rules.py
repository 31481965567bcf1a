"""Kinds of change that make a grounded English text say something else.

A rule finds the places of a text that it can change, and what may stand there instead.
Whether that would be true is for :mod:`jaxhal.datasets.alterations` to see.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple


class Edit(NamedTuple):
    """Characters ``[start, end)`` and the text that takes their place."""

    start: int
    end: int
    text: str


# Edits that belong together, in the order of the text.
Change = tuple[Edit, ...]


class Kind(NamedTuple):
    """A way to change a text.

    Attributes:
      find: ``(answer, context) -> changes``.
      foreign: where the new words must not stand: anywhere in the ``"source"``, in a
        ``"sentence"`` of it that is about the same, or in the same ``"place"``,
        between the same two words.
    """

    find: Callable[[str, str], Iterable[Change]]
    foreign: Literal["source", "sentence", "place"]


def _alternatives(groups: str) -> dict[str, tuple[str, ...]]:
    """Word -> the others of its group; commas part groups, ``_`` joins words."""
    found: dict[str, tuple[str, ...]] = {}
    for group in groups.split(","):
        words = [word.replace("_", " ") for word in group.split()]
        for word in words:
            others = [other for other in words if other != word]
            found[word] = (*found.get(word, ()), *others)
    return found


_MONTHS = (
    "January February March April May June July August September October November "
    "December"
)
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_MONTH = "|".join(_MONTHS.split())
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth"
_WORDS = (
    "two three four five six seven eight nine ten eleven twelve, twenty thirty forty "
    "fifty sixty seventy eighty ninety"
)
_UNITS = (
    "inch foot yard mile, inches feet yards miles, millimeter centimeter meter "
    "kilometer, millimeters centimeters meters kilometers, mm cm m km, mg g kg, "
    "milligrams grams kilograms, ounce pound ton, ounces pounds tons, oz lb lbs, ml "
    "mL L, second minute hour day week month year decade century, seconds minutes "
    "hours days weeks months years decades centuries, teaspoon tablespoon cup pint "
    "quart gallon, teaspoons tablespoons cups pints quarts gallons, tsp tbsp, "
    "Fahrenheit Celsius Kelvin, F C, dollars euros pounds yen, volts watts amps ohms, "
    "calories kilojoules, mph km/h"
)
_PLACES = (
    "America Canada Mexico Brazil Argentina Chile Peru Colombia Cuba Britain England "
    "Scotland Wales Ireland France Germany Italy Spain Portugal Netherlands Belgium "
    "Switzerland Austria Poland Sweden Norway Denmark Finland Russia Ukraine Greece "
    "Turkey Egypt Kenya Nigeria Morocco Ethiopia India Pakistan China Japan Korea "
    "Vietnam Thailand Indonesia Malaysia Philippines Australia Iran Iraq Israel, "
    "Alabama Alaska Arizona Arkansas California Colorado Connecticut Delaware Florida "
    "Georgia Hawaii Idaho Illinois Indiana Iowa Kansas Kentucky Louisiana Maine "
    "Maryland Massachusetts Michigan Minnesota Mississippi Missouri Montana Nebraska "
    "Nevada Ohio Oklahoma Oregon Pennsylvania Tennessee Texas Utah Vermont Virginia "
    "Wisconsin Wyoming New_York New_Jersey New_Mexico North_Carolina South_Carolina, "
    "London Paris Berlin Rome Madrid Lisbon Vienna Prague Warsaw Moscow Athens Dublin "
    "Tokyo Beijing Shanghai Delhi Mumbai Sydney Melbourne Toronto Montreal Chicago "
    "Boston Philadelphia Houston Dallas Atlanta Miami Seattle Denver Detroit Phoenix "
    "Los_Angeles San_Francisco San_Diego New_Orleans Las_Vegas, American Canadian "
    "Mexican Brazilian British English Scottish Irish French German Italian Spanish "
    "Portuguese Dutch Swiss Polish Swedish Norwegian Danish Russian Greek Turkish "
    "Egyptian Indian Chinese Japanese Korean Australian Roman, Africa Asia Europe "
    "Antarctica Oceania"
)
_COMPARED = (
    "more less, higher lower, larger smaller, bigger smaller, longer shorter, taller "
    "shorter, older younger, faster slower, better worse, stronger weaker, warmer "
    "colder, hotter cooler, heavier lighter, wider narrower, thicker thinner, deeper "
    "shallower, harder softer, earlier later, richer poorer, cheaper dearer, most "
    "least, highest lowest, largest smallest, longest shortest, oldest youngest, "
    "fastest slowest, best worst"
)
_ANTONYMS = (
    "increase decrease, increases decreases, increased decreased, increasing "
    "decreasing, before after, above below, over under, high low, hot cold, warm "
    "cool, hard soft, internal external, positive negative, maximum minimum, inside "
    "outside, safe dangerous, possible impossible, open closed, left right, top "
    "bottom, upper lower, front back, north south, northern southern, east west, "
    "eastern western, male female, men women, boys girls, early late, same different, "
    "similar different, common rare, thick thin, dry wet, light heavy, includes "
    "excludes, including excluding, add remove, large small, old young, long short, "
    "strong weak, fast slow, mild severe, acute chronic, legal illegal, public "
    "private, federal local, full empty, cause prevent, causes prevents, caused "
    "prevented, help harm, allow forbid, allows forbids, required optional, born "
    "killed, won lost, began ended, begins ends, joined left, accepted rejected, buy "
    "sell, summer winter, spring autumn, morning evening, parents children, father "
    "mother, son daughter, brother sister, husband wife, ancient modern, simple "
    "complex, active passive, dark bright, sweet sour, raw cooked, fresh stale, "
    "natural artificial, rural urban, permanent temporary, direct indirect, visible "
    "invisible, healthy unhealthy, likely unlikely, able unable, necessary "
    "unnecessary, solid liquid, vertical horizontal"
)
_FREQUENCIES = (
    "always never, often rarely, usually seldom, frequently rarely, typically rarely, "
    "generally seldom, commonly rarely, daily weekly monthly yearly, annually monthly "
    "weekly, once_a twice_a"
)
_AMOUNTS = {
    "all": ("no", "few"),
    "all of": ("none of", "few of"),
    "all the": ("none of the", "few of the"),
    "all these": ("none of these", "few of these"),
    "all your": ("none of your", "few of your"),
    "all their": ("none of their", "few of their"),
    "every": ("no",),
    "each": ("no",),
    "each of": ("none of",),
    "some": ("all", "no"),
    "some of": ("all of", "none of"),
    "most": ("few",),
    "most of": ("few of",),
    "many": ("few", "no"),
    "many of": ("few of", "none of"),
    "few": ("many", "all"),
    "few of": ("many of", "all of"),
    "several": ("no",),
    "several of": ("none of",),
    "various": ("no",),
    "any": ("no",),
    "any of": ("none of",),
    "no": ("all", "some"),
    "none of": ("all of", "some of"),
}
_SCALES = "hundred thousand million billion trillion"
_NUMBER = r"(?<![\w.,/-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w/]|[.,:-]\d)"
_YEAR = r"(?<![\w.,/$£€-])(?:1[0-9]|20)\d\d(?![\w/%]|[.,]\d)"
_DAY_OF = rf"\b(\d{{1,2}})(?=(?:st|nd|rd|th)?(?: of)? (?:{_MONTH})\b)"
_OF_DAY = rf"\b(?:{_MONTH}) (\d{{1,2}})(?!\d)"
_CLOCK = r"\b(\d{1,2})(?=:\d\d\b| ?[apAP]\.?[mM]\b)"
_HALF = r"(?<=\d) ?([apAP])(?=\.?[mM]\b)"
_NAME = r"(?<=[a-z,] )(?!I['’])[A-Z][\w'’-]+(?: (?:of |the )*[A-Z][\w'’-]*\w)*"
_AUXILIARY = r"(?:is|are|was|were|can|will|should|must|could|would|do|does|did|has|had)"
_NEGATED = rf"\b({_AUXILIARY}) not\b|\b(can)not\b|\b({_AUXILIARY})n['’]t\b"
# What two names or numbers have between them where their order says nothing.
_JOINED = re.compile(
    r"\W*(?:(?:and|or|to|through|until|as well as|vs\.?)\W*)?", re.IGNORECASE
)


def _like(old: str, new: str) -> str:
    return new[0].upper() + new[1:] if old[0].isupper() else new


def _words(
    table: Mapping[str, Sequence[str]], before: str = r"\b", after: str = r"\b"
) -> Callable[[str, str], Iterator[Change]]:
    """Words of a table, each with what it may become; lower case, or as spelt there."""
    either = {*table, *(word[0].upper() + word[1:] for word in table)}
    longest = sorted(either, key=len, reverse=True)  # or "all" hides "all of"
    pattern = re.compile(f"(?:{before})({'|'.join(map(re.escape, longest))}){after}")

    def find(answer: str, context: str) -> Iterator[Change]:
        del context
        for found in pattern.finditer(answer):
            old = found[1]
            known = old if old in table else old[0].lower() + old[1:]
            for new in table[known]:
                yield (Edit(*found.span(1), _like(old, new)),)

    return find


def _numbers(answer: str, context: str) -> Iterator[Change]:
    """Numbers that are no year, date, time, item of a list, or name of a passage."""
    del context
    others = (_YEAR, _DAY_OF, _OF_DAY, _CLOCK, r"(?m)^\W*\d+[.)]", r"(?i)passages? \d+")
    taken = [one.span() for other in others for one in re.finditer(other, answer)]
    for found in re.finditer(_NUMBER, answer):
        if any(start <= found.start() < end for start, end in taken):
            continue
        for new in _near(found[0]):
            yield (Edit(*found.span(), new),)


def _near(number: str) -> Iterator[str]:
    """Numbers that are written alike, with as many digits, most with another first."""
    first, rest = number[0], number[1:]
    for digit in "123456789":
        if digit != first:
            yield digit + rest
    places = [at for at, one in enumerate(rest) if one.isdigit()][-1:]
    for at, digit in itertools.product(places, "123456789"):
        if rest[at] != digit:
            yield first + rest[:at] + digit + rest[at + 1 :]


def _years(answer: str, context: str) -> Iterator[Change]:
    del context
    for found in re.finditer(_YEAR, answer):
        for shift in (-20, -11, -10, -5, -3, -2, -1, 1, 2, 3, 5, 10, 11, 20):
            yield (Edit(*found.span(), str(int(found[0]) + shift)),)


def _days(answer: str, context: str) -> Iterator[Change]:
    del context
    for found in itertools.chain(*(re.finditer(p, answer) for p in (_DAY_OF, _OF_DAY))):
        for day in range(1, 29):
            alike = _ending(day) == _ending(int(found[1]))  # 4th and 11th, not 1st
            if day != int(found[1]) and alike:
                yield (Edit(*found.span(1), str(day)),)


def _ending(day: int) -> str:
    return (
        "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "")
    )


def _times(answer: str, context: str) -> Iterator[Change]:
    del context
    for found in re.finditer(_CLOCK, answer):
        for hour in range(1, 13):
            if hour != int(found[1]):
                yield (Edit(*found.span(1), f"{hour:0{len(found[1])}}"),)
    for found in re.finditer(_HALF, answer):
        yield (Edit(*found.span(1), dict(zip("apAP", "paPA", strict=True))[found[1]]),)


def names(text: str) -> list[re.Match]:
    """Capitalised words inside sentences, several in a row as one."""
    calendar = {*_MONTHS.split(), *_DAYS.split(), "Passage", "Passages"}
    return [m for m in re.finditer(_NAME, text) if calendar.isdisjoint(m[0].split())]


def _renamed(answer: str, context: str) -> Iterator[Change]:
    """Names of the context, each in the place of another."""
    known = dict.fromkeys(found[0] for found in names(context))
    for found in names(answer):
        if found[0] not in known:
            continue
        for other in known:
            if not {*other.split()} & {*found[0].split()}:
                yield (Edit(*found.span(), other),)


def _exchanged(answer: str, found: Sequence[re.Match]) -> Iterator[Change]:
    """Two of one sentence in each other's place, not those of one list or range."""
    for one, other in itertools.combinations(found, 2):
        between = answer[one.end() : other.start()]
        if re.search(r"[.!?:;]\s|\n", between) or _JOINED.fullmatch(between):
            continue
        if one[0] != other[0]:
            yield Edit(*one.span(), other[0]), Edit(*other.span(), one[0])


def _swapped_names(answer: str, context: str) -> Iterator[Change]:
    known = {found[0] for found in names(context)}
    yield from _exchanged(answer, [m for m in names(answer) if m[0] in known])


def _swapped_numbers(answer: str, context: str) -> Iterator[Change]:
    places = {edit.start for (edit,) in _numbers(answer, context)}
    found = [m for m in re.finditer(_NUMBER, answer) if m.start() in places]
    yield from _exchanged(answer, found)


def _negated(answer: str, context: str) -> Iterator[Change]:
    """``not`` after a verb that takes one."""
    del context
    verbs = rf"\b{_AUXILIARY}\b(?!n['’]t| not\b|\?)(?= [a-z])"
    for found in re.finditer(verbs, answer):
        # "has not water" is no English, nor is "do not the dishes".
        participle = re.match(r" [a-z]+ed\b", answer[found.end() :])
        if found[0] in ("has", "had") and participle is None:
            continue
        if found[0] not in ("do", "does", "did"):
            yield (Edit(found.end(), found.end(), " not"),)


def _affirmed(answer: str, context: str) -> Iterator[Change]:
    """Verbs without the ``not`` that they had; the verb is what changed."""
    del context
    for found in re.finditer(_NEGATED, answer):
        yield (Edit(*found.span(), next(filter(None, found.groups()))),)


#: By name, those that fit fewer answers first.
KINDS: dict[str, Kind] = {
    "day": Kind(_days, "source"),
    "month": Kind(_words(_alternatives(_MONTHS), r"(?<=\w )", r"\b"), "source"),
    "weekday": Kind(_words(_alternatives(_DAYS)), "source"),
    "year": Kind(_years, "source"),
    "time": Kind(_times, "place"),
    "magnitude": Kind(_words(_alternatives(_SCALES)), "sentence"),
    "place": Kind(_words(_alternatives(_PLACES)), "source"),
    "swapped_numbers": Kind(_swapped_numbers, "place"),
    "negation_removed": Kind(_affirmed, "place"),
    "swapped_names": Kind(_swapped_names, "place"),
    "ordinal": Kind(_words(_alternatives(_ORDINALS), r"(?<=[a-z] )"), "sentence"),
    "number_word": Kind(_words(_alternatives(_WORDS)), "sentence"),
    "frequency": Kind(_words(_alternatives(_FREQUENCIES)), "sentence"),
    "unit": Kind(_words(_alternatives(_UNITS), r"(?<=\d )|(?<=\d[-°])"), "sentence"),
    "comparative": Kind(_words(_alternatives(_COMPARED)), "sentence"),
    "name": Kind(_renamed, "sentence"),
    "number": Kind(_numbers, "source"),
    "quantity": Kind(_words(_AMOUNTS), "sentence"),
    "negation_added": Kind(_negated, "sentence"),
    "antonym": Kind(_words(_alternatives(_ANTONYMS)), "sentence"),
}
