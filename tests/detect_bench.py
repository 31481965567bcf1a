"""``jaxhal detect`` on a tiny model, and what has to come out of it for any input."""

import collections
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

import jaxhal
from hostile_rows import Line, answer_of
from jaxhal.cli import app as cli
from jaxhal.datasets.jsonl import read_rows
from tiny_lm import write_lm

READS = {"lookback_ratio", "predictive_probability"}
DETECTORS = (*sorted(READS), "novel_words")
ROW = {"id", "verdict", "probability", "by", "spans", "error"}
MORE = {"basis", "promise", "undecided", "detector", "helpers"}
MORE |= {"scores", "probabilities", "flagged"}
CONTEXT, LONGEST_ERROR = 256, 1000
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "<s>assistant\n"
)


class Bench:
    """A tiny model, loaded once, its detectors, and a place for files."""

    def __init__(self, folder: Path, detectors: Sequence[str] = DETECTORS):
        self.folder, self.detectors = folder, detectors
        self.model = write_lm(folder / "model", context=CONTEXT)
        settings = self.model / "tokenizer_config.json"
        with_chat = json.loads(settings.read_text()) | {"chat_template": TEMPLATE}
        settings.write_text(json.dumps(with_chat))
        self.lm = jaxhal.load(str(self.model))

    def check(
        self, lines: Sequence[Line], page: bool = False, piped: bool = False
    ) -> tuple[collections.Counter[str], bytes]:
        """What came out, every row of it as it should be, and how often what did.

        Raises:
          AssertionError: naming the line that came out wrong.
        """
        output, code = self._run(lines, page, piped)
        there = [(n, one) for n, one in enumerate(lines, 1) if one.raw.strip()]
        assert output.endswith(b"\n") or not there, "the last row is torn"
        rows = [json.loads(row) for row in output.split(b"\n")[:-1]]
        assert len(rows) == len(there), f"{len(rows)} rows for {len(there)} lines"
        counts: collections.Counter[str] = collections.Counter()
        for (number, given), row in zip(there, rows, strict=True):
            try:
                _check(number, given, row, self.detectors)
            except AssertionError as error:
                shown = f"{given.raw[:300]!r} ({len(given.raw)} bytes)"
                raise AssertionError(
                    f"line {number}: {error}: {shown} gave {str(row)[:900]}"
                ) from error
            counts["scored" if row["error"] is None else "refused"] += 1
        assert code == int(counts["refused"] > 0), f"exit code {code} of {counts}"
        return counts, output

    def check_alone(self, lines: Sequence[Line], output: bytes, at: int) -> None:
        """Makes sure that a row, no blank one, was scored as without its neighbours."""
        raw = [one.raw for one in lines if one.raw.strip()][at]
        row = json.loads(output.split(b"\n")[at])
        (alone,) = read_rows([raw])
        assert alone.example is not None
        (report,) = jaxhal.score(
            self.lm, [alone.example], self.detectors, progress=False
        )
        for name, score in report.scores.items():
            near = np.isclose(row["scores"][name], score, rtol=1e-4, atol=1e-4)
            assert near, f"row {at}: {name} is {row['scores'][name]}, alone {score}"

    def _run(self, lines: Sequence[Line], page: bool, piped: bool) -> tuple[bytes, int]:
        """The output of ``jaxhal detect`` and its exit code, the page checked."""
        source, output = self.folder / "in.jsonl", self.folder / "out.jsonl"
        source.write_bytes(b"\n".join(one.raw for one in lines))
        names = [part for name in self.detectors for part in ("-d", name)]
        command = ["detect", "--all", "-m", str(self.model), "-i", str(source), *names]
        if page:
            command += ["--html", str(self.folder / "page.html")]
        command += ["-o", "-" if piped else str(output)]
        load, jaxhal.load = jaxhal.load, lambda *given, **named: self.lm
        try:
            found = CliRunner().invoke(cli.app, command)
        finally:
            jaxhal.load = load
        if not isinstance(found.exception, SystemExit | None):
            raise AssertionError("it crashed") from found.exception
        assert found.exit_code in (0, 1), found.stderr
        assert not list(self.folder.glob("*.partial"))
        made = found.stdout_bytes if piped else output.read_bytes()
        if page:
            _check_page(self.folder / "page.html", made.count(b"\n"))
        return made, found.exit_code


def _check(
    number: int, given: Line, row: dict[str, Any], detectors: Collection[str]
) -> None:
    assert set(row) == ROW | MORE
    good = True if given.over and not READS & {*detectors} else given.good
    assert good in (None, row["error"] is None), "good is bad, or bad good"
    assert not row["flagged"] and not row["probabilities"] and row["verdict"] is None
    if row["error"] is not None:
        assert row["error"].startswith(f"line {number}: ")
        assert len(row["error"].splitlines()) == 1, "more than a line"
        assert len(row["error"]) <= LONGEST_ERROR, f"{len(row['error'])} characters"
        assert not row["scores"] and not row["spans"]
        return
    asked = json.loads(given.raw.removeprefix(b"\xef\xbb\xbf"))
    name = asked.get("id")
    assert row["id"] == (f"line {number}" if name in (None, "") else str(name))
    assert set(row["scores"]) == set(detectors)
    assert all(math.isfinite(score) for score in row["scores"].values())
    end, answer = 0, answer_of(asked)
    for span in row["spans"]:
        assert end <= span["start"] < span["end"] <= len(answer)
        end = span["end"]
        assert span["text"] == answer[span["start"] : end]
        assert 0 <= span["confidence"] <= 1


def _check_page(path: Path, rows: int) -> None:
    page = path.read_text("utf-8")
    data = page.split('id="data">')[1].split("</script>")[0]
    answers = json.loads(data)["answers"]
    assert len(answers) == rows and page.count("</script>") == page.count("<script")
    assert "<b onclick=x>" not in page
