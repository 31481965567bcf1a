"""Probes of tokens as their authors released them, without torch."""

import json
import pickle
import shutil
import zipfile

import numpy as np
import pytest
from make_golden_probe import GOLDEN, weights
from safetensors.numpy import save_file

import jaxhal
from jaxhal.io import torch_file
from jaxhal.models.lm import LM
from jaxhal.scoring import released_probe, saving
from jaxhal.scoring.detection import placed, resolve
from tiny_lm import answers, tiny_lm

W, B = weights()


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny_lm()


def copied(folder):
    for one in ("probe_config.json", "probe_head.bin"):
        shutil.copy(GOLDEN / one, folder)
    return folder


@pytest.mark.parametrize("name", ["probe_head", "probe_float32"])
def test_tensors_are_those_that_torch_saved(name):
    found = torch_file.read(GOLDEN / f"{name}.bin")
    assert set(found) == {"weight", "bias"}
    for one, other in zip((found["weight"], found["bias"]), (W, B), strict=True):
        np.testing.assert_array_equal(one.astype(np.float32), other)


def test_scores_are_the_probe_of_what_the_layer_gives(lm):
    """The output of the first layer is hidden state 1."""
    asked = {"context": "A bridge of 72 metres.", "question": "How long?"}
    example = jaxhal.Example("It has 72 metres.", **asked)
    batch = lm.encode([example])
    state = jaxhal.HiddenStates((1,))
    hidden = np.asarray(jaxhal.read(lm, batch, {"x": state})["x"][0, 0], float)
    logits = hidden @ W[0] + B[0]
    report = jaxhal.detect(
        lm, response=example.response, **asked, detectors=[released_probe(GOLDEN)]
    )
    assert report.scores["token_probe"] == pytest.approx(logits.max(), abs=1e-4)
    probability = 1 / (1 + np.exp(-logits.max()))
    assert report.probabilities["token_probe"] == pytest.approx(probability, abs=1e-4)
    tokens = [token.scores["token_probe"] for token in report.tokens]
    count = len(tokens)  # the end of the sequence has none
    np.testing.assert_allclose(tokens, 1 / (1 + np.exp(-logits[:count])), atol=1e-4)
    # Nobody has measured it, so it decides nothing.
    assert report.verdict is None and report.flagged == ["token_probe"]
    assert "nobody measured it" in report.undecided


def test_a_reader_of_another_width_is_refused(tmp_path):
    wide = tiny_lm(hidden_size=64)
    fitted = released_probe(GOLDEN)
    said = "fitted to a reader of hidden_size 32, and '.*' has 64; read with the model"
    with pytest.raises(ValueError, match=said):
        jaxhal.score(wide, answers(1), [fitted])
    saving.save(tmp_path, fitted, {"token_probe": {"layer": 1, "highest": 1}})
    assert saving.load(tmp_path).needs == {"hidden_size": 32}


def test_a_folder_is_named_like_other_fitted_detectors(tmp_path):
    (one,) = placed("tiny", [str(copied(tmp_path))])
    assert one.detector.name == "token_probe" and one.threshold == 0.0
    assert "mean of the 1 highest" in one.detector.unit
    assert resolve("tiny", [str(tmp_path)])[0].detector == one.detector


def test_safetensors_are_read_first(tmp_path):
    copied(tmp_path)
    save_file({"weight": 2 * W, "bias": B}, tmp_path / "probe_head.safetensors")
    np.testing.assert_array_equal(released_probe(tmp_path).params.w, 2 * W[0])


class _Code:
    """What a pickle may hold, and must not be called."""

    def __reduce__(self):
        return print, ("this must not run",)


def broken(folder, how):
    """A folder that is wrong in one way."""
    config = json.loads((folder / "probe_config.json").read_text())
    head = folder / "probe_head.bin"
    match how:
        case "adapter":
            (folder / "adapter_config.json").write_text("{}")
        case "no config":
            (folder / "probe_config.json").unlink()
        case "no layer":
            del config["layer_idx"]
        case "width":
            config["hidden_size"] = 31
        case "no head":
            head.unlink()
        case "no archive":
            head.write_bytes(b"GGUF" * 9)
        case "pointer":  # what git leaves of a large file
            safe = folder / "probe_head.safetensors"
            safe.write_text("version https://git-lfs.github.com/spec/v1\n", "utf-8")
        case "method" | "version" | "encrypted" | "compressed":
            data = bytearray(head.read_bytes())
            at = data.index(b"PK\1\2")  # in the list of what the archive holds
            offset, value = {
                **{"method": (10, 99), "version": (6, 255)},
                **{"encrypted": (8, 1), "compressed": (10, 8)},
            }[how]
            data[at + offset] = value
            head.write_bytes(data)
        case "code" | "a list" | "no tuple" | "strides" | "too large":
            with zipfile.ZipFile(head, "w", zipfile.ZIP_DEFLATED) as archive:
                content = _Code() if how == "code" else [1]
                data = pickle.dumps(content)
                if how == "no tuple":  # a storage whose name is a number
                    data = b"K\x07Q."
                if how == "strides":
                    with zipfile.ZipFile(GOLDEN / "probe_float32.bin") as known:
                        for name in known.namelist():
                            data = known.read(name)
                            if name.endswith("data.pkl"):
                                # The strides of the weight, (32, 1), turned.
                                data = data.replace(b"K K\x01\x86", b"K\x01K \x86")
                            archive.writestr(name, data)
                else:
                    large = bytes((1 << 26) + 1)
                    archive.writestr(
                        "x/data.pkl", large if how == "too large" else data
                    )
        case "not finite":
            save_file(
                {"weight": W * np.float32(np.nan), "bias": B},
                folder / "probe_head.safetensors",
            )
    if how in ("no layer", "width"):
        (folder / "probe_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("adapter", "holds adapter_config.json: the probe was trained with an adapter"),
        ("no config", "is no released probe .*probe_config.json"),
        ("no layer", "is no released probe .*layer_idx"),
        ("width", r"weights \[1, 32\] and \[1\] of hidden size 31"),
        ("no head", "is no released probe .*probe_head.bin"),
        ("no archive", "no state dict that torch wrote"),
        ("pointer", "is no released probe .*SafetensorError"),
        ("method", "no state dict that torch wrote: That compression method"),
        ("version", "no state dict that torch wrote: zip file version 25.5"),
        ("encrypted", "no state dict that torch wrote: .* is encrypted"),
        ("compressed", "no state dict that torch wrote: Error -3"),
        ("code", "builtins.print, which is no tensor"),
        ("a list", "something else than tensors"),
        ("no tuple", "no state dict that torch wrote"),
        ("strides", r"a tensor of \[1, 32\] has strides"),
        ("too large", "has 67108865 bytes"),
        ("not finite", "not finite"),
    ],
)
def test_wrong_folders_say_what_is_wrong(tmp_path, capsys, how, message):
    broken(copied(tmp_path), how)
    with pytest.raises(ValueError, match=message):
        released_probe(tmp_path)
    assert "must not run" not in capsys.readouterr().out


def test_another_width_is_refused(lm, tmp_path):
    wide = np.zeros((1, 40), np.float32)
    about = {"layer_idx": 0, "hidden_size": 40}
    (tmp_path / "probe_config.json").write_text(json.dumps(about))
    save_file({"weight": wide, "bias": B}, tmp_path / "probe_head.safetensors")
    with pytest.raises(ValueError, match="40"):
        jaxhal.detect(
            lm, prompt="a", response="b", detectors=[released_probe(tmp_path)]
        )
