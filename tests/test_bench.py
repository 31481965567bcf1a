"""What surrounds the measurements: rows that survive, and peers on one device."""

import json
import sys
import types
from pathlib import Path

import jax
import pytest

from jaxhal import bench
from jaxhal.bench import peers
from tiny_lm import tiny_lm


def test_rows_survive_a_later_error(tmp_path, monkeypatch, capsys):
    def rows():
        yield bench.row("read", "S=512", "seconds", 1.23456)
        raise RuntimeError("out of memory")

    module = types.SimpleNamespace(rows=rows)
    monkeypatch.setitem(sys.modules, "jaxhal.bench.read", module)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.run(["read"], tmp_path / "rows.json")
    (row,) = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert row["value"] == 1.2346
    assert row["device"] == jax.devices()[0].device_kind
    assert "1.2346" in capsys.readouterr().err
    module.rows = lambda: [bench.row("read", "S=512", "seconds", 2.0)]
    monkeypatch.chdir(tmp_path)
    for place in ("-", Path("-")):  # the command gives a path
        assert bench.run(["read"], place) == json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_peers_run_where_jax_does_or_not_at_all(backend, monkeypatch):
    cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    lm = tiny_lm()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with pytest.raises(ImportError, match=f"JAX runs on '{backend}' and this torch"):
        peers.torch_llama(lm, "eager")


def test_extracting_is_also_measured_in_answers_per_second(monkeypatch):
    from jaxhal.bench import extract

    def without_torch(*_):
        raise ImportError("no torch")

    config = types.SimpleNamespace(vocab_size=99)
    lm = types.SimpleNamespace(config=config)
    monkeypatch.setattr(extract.jaxhal, "load", lambda name: lm)
    monkeypatch.setattr(peers, "torch_llama", without_torch)
    times = {"shared": [2.0, 4.0, 8.0], "alone": [4.0, 8.0, 16.0]}
    monkeypatch.setattr(extract, "interleave", lambda *_: times)
    rows = {row["metric"]: row for row in extract.rows()}
    row = rows["answers per second, all reducers, prompts shared"]
    assert row["value"] == extract.ANSWERS / 4 and row["target"] is None
    assert row["spread"] == [1.3333, 2.6667]
