"""Models that a hub, which is a stand-in, has for words."""

import json

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import ModelInfo
from typer.testing import CliRunner

from jaxhal.cli.app import app
from jaxhal.models import hub, offers, placement, registry

# As the hub's interface gives them.
FOUND = [
    {
        "id": "some/Big-8B",
        "downloads": 900,
        "gated": "manual",
        "config": {"model_type": "llama"},
        "safetensors": {"parameters": {"BF16": 8_000}, "total": 8_000},
    },
    {
        "id": "some/Big-8B-GGUF",
        "downloads": 700,
        "gated": False,
        "gguf": {"total": 8_000, "architecture": "llama", "context_length": 4096},
    },
    {"id": "some/Image", "downloads": 5, "config": {"model_type": "vit"}},
    {"id": "some/Old", "downloads": 4, "config": {"model_type": "llama"}},
    {"id": "some/Rest", "downloads": 3, "gguf": {"architecture": "bloom", "total": 9}},
    {"id": "some/Bare", "downloads": 2},
    {
        "id": "some/Seen",
        "downloads": 1,
        "config": {"model_type": "gemma3"},
        "safetensors": {"parameters": {"BF16": 100}, "total": 100},
    },
]
FILES = {
    "README.md": 1,
    "big-Q2_K.gguf": 3_000,  # of blocks that are not read
    "big-Q4_K_M.gguf": 5_000,
    "big-q8_0-00001-of-00002.gguf": 4_500,
    "big-q8_0-00002-of-00002.gguf": 4_000,
    "mmproj-big-F16.gguf": 700,
}


@pytest.fixture
def asked(monkeypatch):
    """A hub of the above; notes what it is asked."""
    monkeypatch.delenv("JAXHAL_OFFLINE", raising=False)
    asked = []

    class Hub:
        def list_models(self, **wishes):
            asked.append(wishes)
            return (ModelInfo(**model) for model in FOUND)

        def model_info(self, repo, files_metadata):
            assert repo == "some/Big-8B-GGUF" and files_metadata
            files = [{"rfilename": name, "size": n} for name, n in FILES.items()]
            return ModelInfo(id=repo, siblings=files)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return asked


@pytest.mark.parametrize(
    "room, folder, file",
    [
        (32_000, ("", 32_000), ("Q8_0", 8_500)),
        (31_999, ("dtype=bfloat16", 16_000), ("Q8_0", 8_500)),
        (8_500, ("weights=int8", 8_500), ("Q8_0", 8_500)),
        (5_000, ("weights=int4", 4_500), ("Q4_K_M", 5_000)),
        (4_499, ("weights=int4", 4_500), ("Q4_K_M", 5_000)),
    ],
)
def test_the_largest_form_that_fits(asked, room, folder, file):
    (one, two, seen), others = offers.search("big", float(room))
    assert one.form == ("some/Big-8B", *folder)
    assert two.form == (f"some/Big-8B-GGUF:{file[0]}", "", file[1])
    assert hub.reference(two.form.name).kind == file[0]
    assert [each.fits for each in (one, two)] == [x[1] <= room for x in (folder, file)]
    assert (one.gated, two.gated, one.downloads) == (True, False, 900)
    assert (one.family, one.parameters, seen.family) == ("llama", 8_000, "gemma3")
    assert others == {"vit": 1, "llama": 1, "bloom": 1, "": 1}
    assert asked[0]["search"] == "big" and asked[0]["sort"] == "downloads"
    assert [*offers.search("big", float(room), limit=1)[0]] == [one]


def test_quantised_folders_do_not_load_but_those_of_gpt_oss(asked, monkeypatch):
    def folder(name: str, family: str, method: str) -> dict:
        about = {"model_type": family, "quantization_config": {"quant_method": method}}
        return FOUND[0] | {"id": f"some/{name}", "config": about}

    several = folder("A", "llama", "awq"), folder("B", "gpt_oss", "mxfp4")
    monkeypatch.setitem(globals(), "FOUND", several)
    (one,), others = offers.search("any", 32_000.0)
    assert one.form == ("some/B", "", 32_000) and others == {"llama in awq": 1}


def test_files_of_gpt_oss_are_as_large_as_their_numbers(asked, monkeypatch):
    about = {"total": 8_000, "architecture": "gpt-oss"}
    monkeypatch.setitem(globals(), "FOUND", [FOUND[1] | {"gguf": about}])
    monkeypatch.setitem(globals(), "FILES", {"oss-mxfp4.gguf": 4_500})
    for room, options, size in (
        (32_000, "", 32_000),
        (31_999, "dtype=bfloat16", 16_000),
        (4_500, "dtype=bfloat16", 16_000),
    ):
        ((one,), _) = offers.search("oss", float(room))
        assert one.form == ("some/Big-8B-GGUF:MXFP4", options, size)
        assert one.fits == (size <= room)


def test_files_of_one_kind_are_offered_each(asked, monkeypatch):
    """The name of their kind would mean both."""
    monkeypatch.setitem(globals(), "FOUND", [FOUND[1]])
    files = {"one/big-Q8_0.gguf": 5_000, "two/big-Q8_0.gguf": 4_000}
    monkeypatch.setitem(globals(), "FILES", files)
    for room, name, size in ((5_000, "one", 5_000), (4_999, "two", 4_000)):
        ((one,), _) = offers.search("big", float(room))
        assert one.form == (f"some/Big-8B-GGUF/{name}/big-Q8_0.gguf", "", size)
        assert hub.reference(one.form.name).file == f"{name}/big-Q8_0.gguf"


def test_a_model_whose_files_are_closed_leaves_the_others(asked, monkeypatch):
    def closed(*_, **__):
        response = httpx2.Response(401, request=httpx2.Request("GET", "https://hub"))
        raise HfHubHTTPError("closed", response=response)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", closed)
    found, others = offers.search("big", 32_000.0)
    assert [one.form.name for one in found] == ["some/Big-8B", "some/Seen"]
    assert others["llama whose files are not listed"] == 1


def test_a_rate_limit_is_no_closed_model(asked, monkeypatch):
    def busy(*_, **__):
        response = httpx2.Response(429, request=httpx2.Request("GET", "https://hub"))
        raise HfHubHTTPError("too many", response=response)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", busy)
    with pytest.raises(ValueError, match="could not search .*too many"):
        offers.search("big", 32_000.0)


def test_the_command(asked, monkeypatch):
    monkeypatch.setattr(placement, "room", lambda: 2.0**33)
    found = CliRunner().invoke(app, ["list", "models", "--search", "big", "--json"])
    first, *_ = map(json.loads, found.stdout.splitlines())
    assert first["name"] == "some/Big-8B" and first["fits"] and first["gated"]
    assert "weights may take 8.0 GiB here" in found.stderr
    assert "do not load: bloom (1), llama (1), unknown (1), vit (1)" in found.stderr
    monkeypatch.setattr(offers, "search", lambda *_, **__: ([], {}))
    none = CliRunner().invoke(app, ["list", "models", "--search", "nothing"])
    assert none.exit_code == 0 and "is called 'nothing'; try fewer" in none.stdout
    wrong = CliRunner().invoke(app, ["list", "detectors", "--search", "big"])
    assert wrong.exit_code == 2 and "--search finds models, not det" in wrong.stderr


@pytest.mark.parametrize(
    "error", [httpx2.ConnectError("no route"), OSError("no route")]
)
def test_a_hub_that_does_not_answer(asked, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.list_models", fails)
    with pytest.raises(ValueError, match="'big' .no route.; check the connection"):
        offers.search("big", 1.0)
    monkeypatch.setattr("huggingface_hub.list_repo_files", fails)
    with pytest.raises(ValueError, match="could not get 'some/Big' .*no route"):
        registry.locate("some/Big:Q8_0")
    monkeypatch.setenv("JAXHAL_OFFLINE", "1")
    with pytest.raises(ValueError, match="'big': unset JAXHAL_OFFLINE and HF_HUB_OFF"):
        offers.search("big", 1.0)


def test_weights_may_take_half_of_what_there_is(monkeypatch):
    monkeypatch.setattr(placement.devices, "memory", lambda device=None: 1000)
    assert placement.room() == 500.0
