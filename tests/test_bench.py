"""What surrounds the measurements: rows that survive, and peers on one device."""

import contextlib
import json
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import httpx2
import jax
import numpy as np
import pytest
import test_quantized
import thorough
from serve_world import reader, renamed, served
from test_extras import CARD

import jaxhal
from jaxhal import bench
from jaxhal.bench import encoders, nli, peers
from jaxhal.models.devices import device_name
from jaxhal.serve.app import Server
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
    assert row["device"] == device_name()
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
    monkeypatch.setattr(extract.jaxhal, "load", lambda name, mesh: lm)
    monkeypatch.setattr(peers, "torch_llama", without_torch)
    seconds = {"shared": [2.0, 4.0, 8.0], "alone": [4.0, 8.0, 16.0]}
    times = bench.Timed("extract", "case", seconds)
    monkeypatch.setattr(extract, "interleave", lambda *_: times)
    rows = {row["metric"]: row for row in extract.rows()}
    row = rows["answers per second, all reducers, prompts shared"]
    assert row["value"] == extract.ANSWERS / 4 and row["target"] is None
    assert row["spread"] == [1.3333, 2.6667]


def test_the_quickstart_says_what_was_measured():
    """What the quickstart says of its commands is of so many rows, and of these."""
    from jaxhal.bench import fit

    page = Path(__file__).parent.parent / "notebooks" / "quickstart.md"
    text = page.read_text("utf-8")
    command = next(line for line in text.splitlines() if "labelled.jsonl --m" in line)
    assert re.findall(r"-d (\w+)", command) == [*fit.DETECTORS]
    known = json.loads((page.parents[1] / "configs/results/bench.json").read_text())
    ratio = next(r["value"] for r in known if r["metric"].startswith("jaxhal.fit /"))
    said = " ".join(text.split())
    assert f"On {fit.ROWS} rows the first command takes [{ratio:.1f} times]" in said


@thorough.mark
def test_fitting_is_measured_beside_reading(monkeypatch):
    from jaxhal.bench import fit

    short = dict(ROWS=20, DETECTORS=fit.DETECTORS[::2], bundled_answers=fit.bundled)
    for name, value in short.items():
        monkeypatch.setattr(fit, name, value)
    monkeypatch.setattr(fit, "_ROUNDS", 1)
    monkeypatch.setattr(fit.jaxhal, "load", lambda name, mesh: tiny_lm(context=2048))
    fitted, judged = fit.rows()
    assert fitted["case"] == judged["case"] == "20 rows, 2 detectors"
    assert fitted["value"] > 1 and judged["value"] > 0  # it reads them as well


@pytest.mark.parametrize("distinct", [2, 10])
def test_pairs_of_ten_samples(distinct):
    pairs = nli.pairs_of(distinct, 4)
    assert len(pairs) == 90 and pairs == nli.pairs_of(distinct, 4)
    assert len({text for pair in pairs for text in pair}) == distinct
    assert sorted(pairs) == sorted((b, a) for a, b in pairs)


@thorough.mark
def test_pairs_are_classified_as_hugging_face_does(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    small = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
    monkeypatch.setattr(nli, "_SHAPE", nli._SHAPE | small | {"num_hidden_layers": 2})
    for name, value in dict(SAMPLES=3, CASES=((3, 4), (2, 1)), _ROUNDS=1).items():
        monkeypatch.setattr(nli, name, value)
    try:
        rows = {(row["case"], row["metric"]): row for row in nli.rows()}
    except RuntimeError as error:
        if os.environ.get("JAXHAL_OFFLINE"):
            pytest.skip(str(error))
        raise
    wrong = [row for (_, metric), row in rows.items() if "difference" in metric]
    assert len(wrong) == 2
    assert all(row["value"] < row["target"] for row in wrong)
    assert (
        "1-4 sentences, 3 of 3 differ",
        "pairs per second, 6 of 6 different",
    ) in rows
    ratios = [row for row in rows.values() if row["target"] == 5.0]
    assert len(ratios) == 2 and all(row["value"] > 0 for row in ratios)


def test_tokens_and_pairs_are_classified_as_hugging_face_does(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    small = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
    shapes = {name: shape | small for name, shape in encoders.SHAPES.items()}
    for name, value in dict(SHAPES=shapes, LAYERS=2, ANSWERS=3, _ROUNDS=1).items():
        monkeypatch.setattr(encoders, name, value)
    try:
        rows = list(encoders.rows())
    except RuntimeError as error:
        if os.environ.get("JAXHAL_OFFLINE"):
            pytest.skip(str(error))
        raise
    wrong = [row for row in rows if "difference" in row["metric"]]
    assert len(wrong) == len(shapes) + 1 and len(rows) == 3 * len(wrong)
    assert all(row["value"] < row["target"] for row in wrong)
    assert rows[-1]["case"].startswith("deberta-v2 grader, ")
    assert rows[-1]["metric"] == "Hugging Face in a batch / classify"
    assert encoders.answers()[0][0].middle.count("\n\n") == encoders.CONTEXTS - 1


@pytest.mark.parametrize("module", [nli, encoders])
def test_without_a_peer_nothing_is_timed(monkeypatch, capsys, module):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not list(module.rows())
    assert "no peers are measured: import of torch" in capsys.readouterr().err


def test_the_watchdog_is_measured(monkeypatch):
    from jaxhal.bench import watchdog

    for name, value in dict(
        SIZES=(40, 60), LARGEST=100, QUERIES=5, _ROUNDS=1, _BATCH=4, _BLOCK=50, WIDTH=8
    ).items():
        monkeypatch.setattr(watchdog, name, value)
    monkeypatch.setattr(watchdog, "_checks", lambda: iter(()))
    index, parts = (
        watchdog._filled(70),
        [watchdog._vectors(50), watchdog._vectors(20, 1)],
    )
    assert len(index) == 70
    np.testing.assert_allclose(
        index[np.arange(70)] @ parts[1][3] / np.linalg.norm(parts[1][3]),
        np.concatenate([p / np.linalg.norm(p, axis=1, keepdims=True) for p in parts])
        @ parts[1][3]
        / np.linalg.norm(parts[1][3]),
        atol=1e-5,
    )
    rows = list(watchdog.rows())
    kinds = {(row["case"], row["metric"]): row for row in rows}
    assert kinds["60 points", "lookup / one read of the matrix"]["target"] == 1.5
    assert kinds["40 points", "lookup / one read of the matrix"]["target"] is None
    for row in rows:
        assert row["value"] > 0
    assert ("100 points", "exact: queries per second, 4 at a time") in kinds


def test_checks_are_measured_beside_answers(monkeypatch):
    import asyncio

    from jaxhal.bench import watchdog
    from jaxhal.watchdog import CallableAgent, Watchdog

    class Dog(Watchdog):
        def __init__(self):
            self.agent = CallableAgent(lambda query: time.sleep(0.02) or "answer")

        async def check(self, query) -> Any:
            return await asyncio.sleep(0.004)

    monkeypatch.setattr(watchdog, "QUERIES", 5)
    ratio, low, high = watchdog._beside_answers(Dog(), ["a", "b"], "7 points")
    assert 0.1 < ratio["value"] < 0.6 and ratio["case"] == "7 points"
    assert 4 <= low["value"] <= high["value"]


@thorough.mark
def test_a_server_is_soaked(monkeypatch):
    """What the fuzzer asks is counted by the server; without one nothing is made up."""
    from jaxhal.bench import server, soak

    with served(Server({"tiny": reader(renamed(tiny_lm(), "tiny"))})) as url:

        @contextlib.contextmanager
        def started(*command):
            yield server.Started(url, os.getpid(), 0.0)

        def asks(command, stdout):
            assert command[:2] == ["/bin/schemathesis", "run"]
            assert command[-1] == f"{url}/openapi.json"
            for path in ("health", "nowhere"):
                httpx2.get(f"{url}/{path}")

        monkeypatch.setattr(soak, "started", started)
        monkeypatch.setattr(soak, "REQUESTS", 3)
        monkeypatch.setattr(soak, "FIRST", 3)
        monkeypatch.setattr(soak.shutil, "which", lambda name: None)
        ratio, size = soak.rows()
        assert ratio["target"] == 1.05 and 0.5 < ratio["value"] < 2
        assert size["value"] > 50
        monkeypatch.setattr(soak.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(soak.subprocess, "run", asks)
        *_, made_up = soak.rows()
    assert made_up["case"] == "4 made up" and made_up["value"] == made_up["target"] == 0


def test_what_a_core_installation_takes():
    """The card's packages and what `jaxhal detect` imports, none of the extras."""
    from jaxhal.bench import start

    names = start.installed("jaxhal")
    assert set(CARD.split()) <= names
    for extra in ("matplotlib", "omegaconf", "pysbd", "fastapi", "pymilvus", "torch"):
        assert extra not in names
    assert start.installed("jaxhal[serve]") >= names | {"fastapi", "uvicorn"}
    assert start._bytes("jaxtyping") > 10_000


def test_the_accelerator_bench_names_a_device_it_does_not_know():
    from jaxhal.bench import accelerator

    with pytest.raises(ValueError, match="'cpu' is not known.*NVIDIA H100"):
        list(accelerator.rows())


def test_the_accelerator_bench_on_a_small_model(monkeypatch):
    from jaxhal.bench import accelerator, topologies
    from jaxhal.models import devices

    small = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    monkeypatch.setattr(accelerator, "LLAMA_8B", accelerator.LLAMA_8B | small)
    monkeypatch.setattr(accelerator, "SHAPES", (accelerator.Shape(2, 64, 16),))
    monkeypatch.setattr(accelerator, "WRITTEN", 4)
    monkeypatch.setattr(accelerator, "_ceilings", lambda peak: iter(()))
    monkeypatch.setitem(devices.PEAKS, "cpu", devices.Peak(1e12, 1e11, 1e10, 1e10))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    # A device that says how much was taken, in the place of one that is described.
    monkeypatch.setattr(accelerator, "_in_use", lambda: 1 << 20)
    monkeypatch.setattr(topologies, "of_one", lambda device: "-")
    monkeypatch.setattr(topologies, "described", lambda topology: jax.devices()[:1])
    rows = {row["metric"]: row["value"] for row in accelerator.rows()}
    for metric in (
        "GiB beside the weights, relevance means",
        "share of the peak, forward",
        "all reducers / forward",
        "relevance means / forward",
        "decoding with token scores / without",
        "share of the memory's peak, decoding by weights and cache",
        "seconds",
    ):
        assert rows[metric] > 0, metric
    # What is planned is what is compiled, which is in use.
    of_programs, of_plan = (
        rows[f"memory in use at most so far / {beside}"]
        for beside in ("predicted of these programs", "as jaxhal plan has it")
    )
    assert of_plan == pytest.approx(of_programs, rel=0.1)
    # 2 x 64 tokens by 2 layers: products with their weights, half of the attention.
    config = accelerator.from_huggingface(accelerator.LLAMA_8B)
    count = accelerator.flops(config, accelerator.SHAPES[0])
    weights = 64 * (2 * 64 + 2 * 32 + 3 * 96)
    assert count == 2 * 2 * 64 * (2 * weights + 2 * 64 * 64)


@thorough.mark
def test_a_file_beside_its_numbers(tmp_path, monkeypatch, capsys):
    from jaxhal.bench import stored
    from jaxhal.models import registry

    file = tmp_path / "tiny.gguf"
    source = test_quantized.write(file)

    def locate(name):
        if name == "gone":
            raise ValueError("the hub is far")
        return file

    def load(path, weights, mesh):
        return test_quantized.read_in(source, weights == "stored")

    monkeypatch.setattr(jaxhal, "load", load)
    monkeypatch.setattr(stored, "MODELS", ("gone", "tiny"))
    monkeypatch.setattr(registry, "locate", locate)
    monkeypatch.setattr(stored, "_resident", lambda path: 3 * path.stat().st_size)
    monkeypatch.setattr(stored, "SEQ", 48)
    monkeypatch.setattr(stored, "RESPONSE", 16)
    monkeypatch.setattr(stored, "TOKENS", 32)
    small = {"width": 256, "inner": 512, "layers": 2, "heads": 4, "tokens": 512}
    monkeypatch.setattr(stored, "LLAMA", small)
    held, process, logit, same, ratio, times, large = stored.rows()
    assert capsys.readouterr().err == "gone is left out: the hub is far\n"
    assert 0.3 < held["value"] < 1.25 and process["value"] == 3
    assert logit["value"] <= logit["target"] == 1e-3 and same["value"] == 1
    assert ratio["target"] == 1.3 and ratio["value"] > 0
    assert times["value"] > 1 and 0 < large["value"] < large["target"] == 24


# What the workers of two versions ask for; it writes down what it was asked.
_STUB = """
from pathlib import Path

def load(source, mesh, **how):
    return Model()

class Model:
    class config:
        vocab_size = 7

def note(*what):
    with open(Path(__file__).parents[1] / "asked", "a") as file:
        print(*what, file=file)

def read(lm, batch, reducers):
    note("read", *batch, *reducers)

def generate(lm, prompts, sampling, max_new_tokens, progress):
    note("generate", len(prompts), sampling, max_new_tokens)
"""


def _a_version(folder: Path) -> Path:
    (folder / "jaxhal" / "bench").mkdir(parents=True)
    (folder / "jaxhal" / "__init__.py").write_text(_STUB, "utf-8")
    (folder / "jaxhal" / "generation.py").write_text("GREEDY = 'greedily'\n", "utf-8")
    said = "REDUCERS = ['all']\ndef random_batch(*shape):\n    return shape\n"
    (folder / "jaxhal" / "bench" / "read.py").write_text(said, "utf-8")
    return folder


def test_two_versions_take_turns(tmp_path, monkeypatch):
    from jaxhal.bench import versions

    old, new = (_a_version(tmp_path / name) for name in ("old", "new"))
    # It knows of no meshes.
    earlier = _STUB.replace("source, mesh, **how", "source")
    (old / "jaxhal" / "__init__.py").write_text(earlier, "utf-8")
    monkeypatch.setattr(jaxhal, "__file__", str(new / "jaxhal" / "__init__.py"))
    saved = lambda family, shape, folder: tmp_path / family  # noqa: E731
    monkeypatch.setattr(versions, "_saved", saved)
    rows = list(versions.rows(old))
    assert [row["case"] for row in rows[3:]] == list(versions.FAMILIES)
    assert all(row["metric"].endswith("now / old") for row in rows)
    assert all(row["value"] > 0 and row["target"] in (1.03, 1.05) for row in rows)
    asked = (old / "asked").read_text("utf-8")
    assert asked == (new / "asked").read_text("utf-8")
    # A warm-up of each, and the rounds.
    assert (
        asked.count("read 7 512 96 all") == asked.count("generate 1 greedily 64") == 10
    )
    assert asked.count("read 7 128 32 all") == 16 * len(versions.FAMILIES)


def test_the_families_of_old_are_read_by_their_own_names(tmp_path):
    pytest.importorskip("torch")
    from jaxhal.bench import versions

    for family, shape in versions.FAMILIES.items():
        lm = jaxhal.load(versions._saved(family, shape, tmp_path / family))
        assert lm.config.family == family and lm.config.num_hidden_layers == 4


@thorough.mark
def test_a_version_that_is_not_the_one_asked_for(tmp_path):
    from jaxhal.bench import versions

    for arguments, message in (
        ((["versions"], None, None), "names=.'versions'. and against=None"),
        ((["read"], None, tmp_path), "give both, not names=.'read'."),
    ):
        with pytest.raises(ValueError, match=message):
            bench.run(*arguments)
    with pytest.raises(FileNotFoundError, match="has no folder jaxhal; give a check"):
        bench.run(["versions"], None, tmp_path)
    folder = _a_version(tmp_path / "other")
    with versions.version(folder) as version:
        with pytest.raises(RuntimeError, match=r"ended in read\('gone'\)"):
            version("read('gone')")
    moved = folder / "jaxhal" / "__init__.py"
    moved.write_text("__file__ = 'elsewhere'\n" + moved.read_text("utf-8"), "utf-8")
    with pytest.raises(RuntimeError, match="was asked for and 'elsewhere' imported"):
        with versions.version(folder):
            pass


def test_experts_by_blocks_and_by_ragged_dot(monkeypatch):
    from jaxhal.bench import mixture

    monkeypatch.setattr(mixture, "HERE", mixture.Size(6, 2, 16, 8, 40))

    def none(topology):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(mixture.topologies, "described", none)
    ratio, blocks, ragged = mixture.rows()
    assert ratio["value"] > 0
    # 80 rows in blocks of 6: six begun, and as many as the other 74 may fill.
    assert blocks["value"] == (6 + 74 // 6) * 6 / 80
    assert ragged["value"] >= 1
