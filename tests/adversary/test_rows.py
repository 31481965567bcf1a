"""Whatever a row holds: one result for it, in its place, and none for another."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detect_bench import Bench
from hostile_rows import Line, huge, line

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """It reads no answer with the model, so nothing is compiled."""
    return Bench(tmp_path_factory.mktemp("bench"), ["novel_words"])


@settings(max_examples=10, deadline=None)
@given(seeds=st.lists(SEEDS, max_size=60), page=st.booleans(), piped=st.booleans())
def test_one_result_a_row_whatever_the_rows(bench, seeds, page, piped):
    lines = [line(random.Random(seed)) for seed in seeds]
    bench.check(lines, page, piped)


def test_hostile_rows_are_read_as_they_are_alone(tmp_path):
    bench, lines = Bench(tmp_path), [line(random.Random(at)) for at in range(80)]
    counts, output = bench.check(lines, page=True)
    assert counts["scored"] > 20 and counts["refused"] > 20
    bench.check_alone(lines, output, output.split(b"\n").index(scored(output)))


def scored(output: bytes) -> bytes:
    return next(row for row in output.split(b"\n") if b'"error": null' in row)


def test_an_error_is_short_however_long_the_row(bench):
    rng = random.Random(1)
    counts, _ = bench.check([huge(rng) for _ in range(16)])
    assert min(counts["scored"], counts["refused"]) > 4


def test_lines_end_at_newlines_alone(bench):
    """Not at what else Unicode ends lines with; a mark may stand before the first."""
    row = '{"prompt": "a", "response": "b\u2028c\x85d", "id": "\u2029"}'.encode()
    lines = [Line(b"\xef\xbb\xbf" + row, True), Line(b" \x0b", None), Line(row, True)]
    assert bench.check(lines)[0] == {"scored": 2}
    assert bench.check(lines[1:2])[0] == {}
