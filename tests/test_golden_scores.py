"""Scores and an exploration are, number by number, those that were recorded."""

import pytest
import thorough

import golden_scores


@thorough.mark
@pytest.mark.parametrize("name", ["catalogue", "exploration"])
def test_what_was_recorded(name):
    found = golden_scores.compare(
        golden_scores.RECORDS[name](), golden_scores.known(name)
    )
    assert not found
