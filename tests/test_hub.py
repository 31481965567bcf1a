"""Models of the Hugging Face hub by their names, on a hub that is a stand-in."""

import fnmatch

import gguf
import httpx
import huggingface_hub.errors as errors
import numpy as np
import pytest

from jaxhal.models import hub, registry
from jaxhal.models.gguf import GGUFSource

REPO = "someone/Tiny-GGUF"
FILES = [
    *("README.md", "tiny-q4_k_m.gguf", "tiny.Q8_0.gguf", "mmproj-tiny-Q8_0.gguf"),
    *("BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"),
    *("a/tiny-Q6_K.gguf", "b/tiny-Q6_K.gguf", "tiny-UD-Q4_K_XL.gguf"),
]


@pytest.fixture
def there(monkeypatch, tmp_path):
    """A repository of the files above; notes what was taken of it."""
    monkeypatch.delenv("JAXHAL_OFFLINE", raising=False)
    taken = []

    def download(repo, *, allow_patterns, ignore_patterns, local_files_only):
        assert repo == REPO
        taken.append((allow_patterns, local_files_only))
        for name in FILES:
            if any(name == pattern for pattern in allow_patterns):
                path = tmp_path / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo: FILES)
    return taken


@pytest.mark.parametrize(
    "name, files",
    [
        (f"{REPO}:Q4_K_M", ["tiny-q4_k_m.gguf"]),
        (f"{REPO}:q8_0", ["tiny.Q8_0.gguf"]),
        (f"{REPO}:UD-Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        (f"{REPO}:BF16", FILES[4:6]),
        (f"{REPO}/a/tiny-Q6_K.gguf", ["a/tiny-Q6_K.gguf"]),
        (f"{REPO}/BF16/tiny-BF16-00001-of-00002.gguf", FILES[4:6]),
    ],
)
def test_a_file_by_its_kind_or_its_path(there, tmp_path, name, files):
    assert registry.locate(name) == tmp_path / files[0]
    assert there == [(files, False)]


@pytest.mark.parametrize(
    "name, message",
    [
        (f"{REPO}:Q2_K", "no GGUF file of Q2_K; it has BF16, Q4_K_M, Q6_K, Q8_0, UD-"),
        (f"{REPO}:Q6_K", f"has 2 files of Q6_K; give '{REPO}/a/tiny-Q6_K.gguf', '"),
        (f"{REPO}/tiny-Q5_0.gguf", "has no tiny-Q5_0.gguf on the Hugging Face hub"),
        (f"{REPO}/BF16/tiny-BF16-00002-of-00002.gguf", "is part 2 of 2; give BF16/ti"),
        (REPO, f"has no config.json but GGUF files; give '{REPO}:BF16', '{REPO}:Q4_K"),
    ],
)
def test_what_is_not_there_or_not_one(there, name, message):
    with pytest.raises(ValueError, match=message):
        registry.locate(name)


def test_a_path_that_is_not_there_is_not_sought_on_the_hub(there, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x\.gguf does not exist"):
        registry.locate(tmp_path / "x.gguf")
    assert not there


def test_a_folder_of_the_owners_name_hides_no_model(there, monkeypatch, tmp_path):
    (tmp_path / "here" / "someone").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert registry.locate(f"{REPO}:Q4_K_M") == tmp_path / FILES[1]


def test_what_a_tokenizer_is_made_of_is_asked_for():
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in hub.WANTED)
    assert not any(fnmatch.fnmatch("notes.txt", pattern) for pattern in hub.WANTED)
    for name in ("original/model.safetensors", "consolidated.safetensors"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in hub._UNWANTED)


def test_without_a_connection_its_cache_is_asked(there, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXHAL_OFFLINE", "1")
    (tmp_path / "tiny-q4_k_m.gguf").write_bytes(b"GGUF")
    assert registry.locate(f"{REPO}:Q4_K_M") == tmp_path / "tiny-q4_k_m.gguf"
    assert [offline for _, offline in there] == [True, True]
    with pytest.raises(ValueError, match="no GGUF file of Q8_0; it has Q4_K_M"):
        registry.locate(f"{REPO}:Q8_0")


def _refused(kind):
    asked = httpx.Request("GET", "https://hub.example")
    return kind("refused", response=httpx.Response(401, request=asked))


@pytest.mark.parametrize(
    "error, message",
    [
        (
            _refused(errors.GatedRepoError),
            f"it is gated; accept .*co/{REPO} and log in",
        ),
        (_refused(errors.RepositoryNotFoundError), "there is none of that name, or it"),
        (errors.LocalEntryNotFoundError("nothing"), r"\(nothing\); check the connect"),
        (_refused(errors.HfHubHTTPError), "check the name, log in for gated models"),
        (OSError("no space"), "no space"),
    ],
)
@pytest.mark.parametrize("name", [REPO, f"{REPO}:Q8_0"])
def test_errors_of_the_hub_say_what_to_do(there, monkeypatch, error, message, name):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
    with pytest.raises(ValueError, match=message):
        registry.locate(name)


def _split(folder, tensors, count):
    """A GGUF file in as many parts, as llama.cpp splits one."""
    for at in range(count):
        path = folder / f"t-{at + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name in list(tensors)[at::count]:
            writer.add_tensor(name, tensors[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder / f"t-00001-of-{count:05}.gguf"


def test_a_file_in_parts_is_one_file(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"x{n}": rng.normal(size=(4, 32)).astype(np.float32) for n in range(5)}
    path = _split(tmp_path, tensors, 3)
    source = GGUFSource(path)
    assert source.names() == tensors.keys()
    assert (source.size, source.bytes) == (5 * 128, 5 * 512)
    for name, x in tensors.items():
        np.testing.assert_array_equal(source.get(name), x)
    second = tmp_path / "t-00002-of-00003.gguf"
    with pytest.raises(
        ValueError, match=r"is part 2 of 3; give t-00001-of-00003\.gguf"
    ):
        GGUFSource(second)
    second.write_bytes(second.read_bytes()[:-512])
    with pytest.raises(ValueError, match="00002-of-00003.gguf is (cut short|not a wh)"):
        GGUFSource(path)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="00002-of-00003.gguf does not exist"):
        GGUFSource(path)


def test_what_means_nothing_on_the_hub():
    for name in ("./a/b", "../a/b:Q8_0", "/a/b.gguf", "a", "a/b/c", "a/b:", "a b/c"):
        assert hub.reference(name) is None, name
