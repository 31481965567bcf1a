"""What the Hugging Face hub offers that loads here, and how it fits into memory."""

import collections
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxhal.models import blocks, hub
from jaxhal.models.families import MODEL_TYPES
from jaxhal.models.gguf_families import ARCHITECTURES

# Bytes of a weight in a folder, by what it is loaded with.
_LOADED = {
    "": 4.0,
    "dtype=bfloat16": 2.0,
    "weights=int8": blocks.width("Q8_0"),
    "weights=int4": blocks.width("Q4_0"),
}
_KINDS = re.compile(f"(?:{'|'.join(blocks.FORMATS)})(?:_[SML])?|B?F16|F32")
# An architecture whose files hold experts in blocks that become numbers.
_AS_NUMBERS = "gpt-oss"
_ASKED = 100
_FIELDS: Any = ("config", "downloads", "gated", "gguf", "safetensors")


class Form(NamedTuple):
    """One of the ways to load a model."""

    name: str  # what `jaxhal.load` takes
    options: str  # and with what
    size: float  # bytes of its weights


class Offer(NamedTuple):
    """A model, in the largest form that there is room for, or else in the smallest."""

    form: Form
    fits: bool
    family: str
    parameters: int
    gated: bool
    downloads: int  # of the last month


def search(
    words: str, room: float, limit: int = 20
) -> tuple[list[Offer], dict[str, int]]:
    """Models of the hub that are called like that, the most downloaded first.

    Args:
      words: what to search for.
      room: bytes that weights may take: :func:`jaxhal.models.placement.room`.
      limit: of offers.

    Returns:
      Offers, and how many of the models that were looked at do not load, by
      architecture, which is ``""`` where the hub does not know it.

    Raises:
      ValueError: where the hub cannot be asked.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    begin = f"could not search the Hugging Face hub for {words!r}"
    if hub.offline():
        raise ValueError(f"{begin}: unset JAXHAL_OFFLINE and HF_HUB_OFFLINE")
    api, offers = HfApi(), []
    others: collections.Counter[str] = collections.Counter()
    try:
        for model in api.list_models(
            search=words, sort="downloads", limit=_ASKED, expand=[*_FIELDS]
        ):
            family, parameters = _about(model)
            forms = []
            if parameters:
                try:
                    forms = [*_forms(api, model, parameters)]
                except HfHubHTTPError as error:
                    # Closed, or gone meanwhile: the others are not.
                    if error.response.status_code not in (401, 403, 404):
                        raise
                    family = f"{family} whose files are not listed"
            if forms:
                form = next((one for one in forms if one.size <= room), forms[-1])
                about = family, parameters, bool(model.gated), model.downloads or 0
                offers.append(Offer(form, form.size <= room, *about))
            else:
                others[family] += 1
            if len(offers) == limit:
                break
    except hub.failures() as error:
        raise ValueError(f"{begin} ({error}); check the connection") from error
    return offers, dict(others)


def _about(model: Any) -> tuple[str, int]:
    """Its architecture, and how many weights it has; 0 where it does not load."""
    if model.gguf:
        family, count = model.gguf.get("architecture", ""), model.gguf.get("total")
        return family, count if count and family in ARCHITECTURES else 0
    config = model.config or {}
    family = config.get("model_type", "")
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method and (family, method) != ("gpt_oss", "mxfp4"):
        return f"{family} in {method}", 0
    known = family in MODEL_TYPES and model.safetensors
    return family, model.safetensors.total if known else 0


def _forms(api: Any, model: Any, parameters: int) -> Iterator[Form]:
    """The largest first."""
    if not model.gguf:
        for options, width in _LOADED.items():
            yield Form(model.id, options, width * parameters)
        return
    numbers = model.gguf["architecture"] == _AS_NUMBERS
    about = api.model_info(model.id, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    forms = []
    for kind, files in hub.by_kind(sizes).items():
        if not (_KINDS.fullmatch(kind) or (numbers and kind == "MXFP4")):
            continue
        for file in files:
            name = f"{model.id}:{kind}" if len(files) == 1 else f"{model.id}/{file}"
            if numbers:
                for options in ("", "dtype=bfloat16"):
                    forms.append(Form(name, options, _LOADED[options] * parameters))
            else:
                size = sum(sizes.get(part, 0) for part in hub.parts(file))
                forms.append(Form(name, "", size))
    yield from sorted(forms, key=lambda form: -form.size)
