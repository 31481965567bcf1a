"""Nothing damaged is used silently: a flipped bit is an error, or changes nothing."""

import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import jaxhal
from jaxhal import tuning
from jaxhal.classifiers.linear import Linear
from jaxhal.detectors import build
from jaxhal.evaluation.calibration import Platt
from jaxhal.reading import parts
from jaxhal.scoring import shipped
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.saving import load, save
from jaxhal.tuning.checkpoints import opened
from jaxhal.tuning.classifier import Head, Learned
from tiny_lm import answers, read_into, tiny_lm

# Of each kind of file; FLIPS=2000 makes it a long fuzz.
FLIPS = int(os.environ.get("FLIPS", "40"))
READ = {"mean": jaxhal.HiddenStates(tokens="mean"), "logprob": jaxhal.TokenLogprob()}


def flips(path, seed=0):
    """The file with one bit after the other turned, then as it was."""
    whole = path.read_bytes()
    draw = random.Random(seed)
    for _ in range(FLIPS):
        bit = draw.randrange(8 * len(whole))
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        yield bit
    path.write_bytes(whole)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def noticed(use, path, whole, message):
    """Every flip is an error that matches, or changes nothing; how many were errors."""
    errors = 0
    for bit in flips(path):
        try:
            assert bits(use()) == whole, f"bit {bit} was not noticed"
        except ValueError as error:
            assert message in str(error) and "\n" not in str(error), error
            errors += 1
    return errors


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture
def store(lm, tmp_path):
    def use():
        parts._prove.cache_clear()  # as another process would begin
        found = read_into(tmp_path, lm, answers(2), READ).features
        return [np.asarray(value) for column in found.values() for value in column]

    return use


def test_flips_in_a_part(store, tmp_path):
    whole = bits(store())
    (part,) = tmp_path.glob("*/parts/*.parquet")
    message = f"part {part} of the feature store is damaged; delete it and run"
    assert noticed(store, part, whole, message) == FLIPS
    assert bits(store()) == whole


def test_flips_in_what_a_store_says_of_itself(store, tmp_path):
    whole = bits(store())
    (path,) = tmp_path.glob("*/model.json")
    message = f"{path} of the feature store is damaged; delete it and run the same"
    assert noticed(store, path, whole, message) > FLIPS // 2


def test_parts_of_earlier_versions(store, tmp_path):
    whole = bits(store())
    (part,) = tmp_path.glob("*/parts/*.parquet")
    part.rename(part.with_name(part.name.partition("-")[0] + ".parquet"))
    with pytest.raises(ValueError, match="no checksum in its name.*delete .* run the"):
        store()
    shutil.rmtree(part.parent.parent)
    assert bits(store()) == whole


def test_flips_behind_a_proved_part(lm, tmp_path):
    """What goes bad after it was proved, within one process, is noticed as well."""
    column = read_into(tmp_path, lm, answers(2), READ).features["mean"]
    path = column.places[0].path
    data = bytearray(path.read_bytes())
    rows = pq.ParquetFile(path).metadata.row_group(0)
    (chunk,) = (
        rows.column(n)
        for n in range(rows.num_columns)
        if rows.column(n).path_in_schema.startswith(column.name)
    )
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start + chunk.total_compressed_size - 2] ^= 1
    about = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # as a bad disk would
    again = parts.Column(column.name, column.places, parts.ColumnCache())
    with pytest.raises(ValueError, match="damaged; delete it"):
        again[0]


def test_flips_in_a_saved_detector(tmp_path):
    draw = np.random.default_rng(0)
    vector = jnp.asarray(draw.normal(size=9), jnp.float32)
    probe = Linear(vector, jnp.float32(0.5), vector, vector)
    calibration = Platt(1.25, -0.5)
    none = np.zeros(0, np.float32)
    detector = build("token_probe")
    save(
        tmp_path / "one", Fitted(detector, probe, calibration, 0.5, none), "token_probe"
    )

    def use():
        found = load(tmp_path / "one")
        assert found.detector[:4] == detector[:4]
        return found.params, found.threshold, vars(found.calibration)

    whole = bits(use())
    message = f"{tmp_path / 'one'} holds no whole detector; copy it again"
    params = tmp_path / "one" / "params.safetensors"
    assert noticed(use, params, whole, message) == FLIPS
    card = tmp_path / "one" / "card.json"
    assert noticed(use, card, whole, message) > FLIPS // 2


def test_flips_in_a_shipped_detector(tmp_path):
    source = shipped._ROOT / "smollm2-135m" / "linear_probe"
    folder = shutil.copytree(source, tmp_path / "linear_probe")
    whole = bits(load(folder).params)
    assert sorted(os.listdir(folder)) == ["card.json", "params.safetensors"]

    def use():
        return load(folder).params

    message = f"{folder} holds no whole detector"
    assert noticed(use, folder / "params.safetensors", whole, message) == FLIPS
    assert noticed(use, folder / "card.json", whole, message) > FLIPS // 2


@pytest.fixture
def tuned():
    none = np.zeros(0, np.float32)
    head = Head(jnp.arange(4.0), jnp.float32(1))
    learned = Learned(head, {"layer": jnp.arange(6.0).reshape(2, 3)})
    losses = np.float32([0.7, 0.5])
    return tuning.Tuned(
        tuning.Tuning(), "tiny", learned, losses, none, np.zeros(0, np.int64), none
    )


def test_flips_in_a_saved_tuning(tuned, tmp_path):
    tuned.save(tmp_path / "one")

    def use():
        found = tuning.load(tmp_path / "one")
        assert (found.tuning, found.model) == (tuned.tuning, tuned.model)
        return found.learned, found.losses

    whole = bits(use())
    message = f"{tmp_path / 'one'} holds no whole fine-tuning; copy it again"
    for name in ("tuned.safetensors", "tuned.json"):
        assert noticed(use, tmp_path / "one" / name, whole, message) > FLIPS // 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_is_not_what_was_saved(tmp_path, monkeypatch):
    state = {"w": jnp.arange(64.0), "step": np.int32(3)}
    with opened(tmp_path, {"model": "tiny"}) as checkpoints:
        checkpoints.save(3, state)
        assert bits(checkpoints.restored(state)) == bits(state)
    manager = type(checkpoints._manager)
    real = manager.restore

    def flipped(self, *arguments, **named):
        found = real(self, *arguments, **named)
        return {**found, "leaf1": found["leaf1"].at[5].multiply(-1)}

    monkeypatch.setattr(manager, "restore", flipped)
    with opened(tmp_path, {"model": "tiny"}) as checkpoints:
        with pytest.raises(ValueError, match="checkpoint 3 in .* is damaged.*delete"):
            checkpoints.restored(state)
    card = tmp_path / "tuning.json"
    card.write_bytes(card.read_bytes().replace(b"tiny", b"tinx"))
    with pytest.raises(ValueError, match="no whole checkpoint .*delete it or give"):
        with opened(tmp_path, {"model": "tiny"}):
            pass
