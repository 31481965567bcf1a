"""Files of hidden states, as vLLM's ``extract_hidden_states`` writes them.

A ``.safetensors`` file for each request, with ``token_ids`` ``[tokens]`` and
``hidden_states`` ``[tokens layer width]`` in the model's dtype: what enters the layers
that ``eagle_aux_hidden_state_layer_ids`` names, ascending; the number of all layers
stands for what comes out of the last one, before the final norm (vLLM 0.33).
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxhal.io.files import fcntl
from jaxhal.io.showing import quoted, shown
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.types import Example

# A file, or its tensors by name.
Tensors = Path | Mapping[str, Any]
_NAMES = ("token_ids", "hidden_states")


def place_of(folder: str | os.PathLike, example: Example) -> Path:
    """The file of an example's states; ValueError outside the folder, or without one.

    Its name is looked up in the folder; a path that an engine gave may lead there.
    """
    name = example.states or f"{example.id}.safetensors"
    path = Path(folder) / name
    try:
        inside = path.resolve().is_relative_to(Path(folder).resolve())
        there = inside and path.is_file()
    except OSError:  # of a name that no file can have
        inside, there = True, False
    if not inside:
        raise ValueError(
            f"states {quoted(name)} lie outside {shown(str(folder))}; give the folder "
            "that they are in"
        )
    if not there:
        raise ValueError(
            f"{name_of(path)} is not there; name the file of the answer in 'states', "
            "or after its 'id'"
        )
    return path


def check_tensors(tensors: Tensors, layers: int, width: int) -> Int[np.ndarray, " n"]:
    """The tokens of some states; ValueError where the states are not as many, or wide.

    Waits for an engine that is writing them.
    """
    where = name_of(tensors)
    with _opened(tensors) as found:
        if missing := [name for name in _NAMES if name not in found]:
            raise ValueError(
                f"{where} has no {' and no '.join(missing)}; give a file that vLLM's "
                "ExampleHiddenStatesConnector wrote, or one like it"
            )
        tokens, shape = np.asarray(found["token_ids"][:]), _shape(found[_NAMES[1]])
    if tokens.ndim != 1 or len(shape) != 3 or shape[0] != len(tokens):
        raise ValueError(
            f"{where} has token_ids {list(tokens.shape)} and hidden_states "
            f"{list(shape)}; they should be [tokens] and [tokens, layers, width]"
        )
    if shape[1:] != (layers, width):
        raise ValueError(
            f"{where} holds {shape[1]} states of width {shape[2]} a token, and "
            f"{layers} of width {width} are expected of this reader; name the layers "
            "that were exported, and the model that wrote them"
        )
    return tokens


def rows_of(
    tensors: Tensors, first: int, end: int, layers: Sequence[int]
) -> Float[np.ndarray, "tokens layers width"]:
    """States of some tokens and, by their places, layers; no more of a file is read."""
    with _opened(tensors) as found:
        return np.asarray(found["hidden_states"][first:end])[:, list(layers)]


def name_of(tensors: Tensors) -> str:
    """What an error calls some states."""
    return "the states" if isinstance(tensors, Mapping) else shown(tensors.name)


def check_tokens(
    there: Int[np.ndarray, " n"],
    prompt: Int[np.ndarray, " prompt"],
    response: Int[np.ndarray, " response"],
    tokenizer: Tokenizer,
    where: str,
    ends: bool,
) -> None:
    """ValueError that says where, unless the tokens are those of prompt and response.

    Where the response ``ends`` with a token that has no text, that one may be missing.
    """
    here = np.concatenate([prompt, response])
    both = min(len(there), len(here))
    for at in np.flatnonzero(there[:both] != here[:both])[:1].tolist():
        part, number = ("prompt", at)
        if at >= len(prompt):
            part, number = "response", at - len(prompt)
        texts = [quoted(tokenizer.decode([int(ids[at])])) for ids in (there, here)]
        raise ValueError(
            f"{where} has {texts[0]} ({there[at]}) for token {number} of the {part}, "
            f"where the reader's tokenizer makes {texts[1]} ({here[at]}) of the text; "
            "give the model that wrote it, and the prompt as it was"
        )
    if not len(here) - ends <= len(there) <= len(here):
        why = "more than the text of this row"
        if len(there) < len(here):
            why = (
                "not all of the response; vLLM writes the prompt alone unless "
                "kv_transfer_params has include_output_tokens"
            )
        raise ValueError(
            f"{where} holds {len(there)} tokens, and prompt and response have "
            f"{len(here)}: {why}"
        )


def _shape(tensor: Any) -> tuple[int, ...]:
    return tensor.shape if isinstance(tensor, np.ndarray) else tuple(tensor.get_shape())


def _array(name: str, tensor: Any) -> np.ndarray:
    """A tensor of any library; those of torch may have a gradient, and be bfloat16."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if tensor.is_floating_point() else tensor
    try:
        return np.asarray(tensor)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as an array: {error}") from error


@contextlib.contextmanager
def _opened(tensors: Tensors) -> Iterator[Mapping[str, Any]]:
    """The tensors by name, of a file as what reads a part when it is cut."""
    if isinstance(tensors, Mapping):
        yield {name: _array(name, tensor) for name, tensor in tensors.items()}
        return
    from safetensors import SafetensorError, safe_open

    try:
        with _written(tensors), safe_open(tensors, framework="np") as file:
            yield {name: file.get_slice(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{name_of(tensors)} is not a whole safetensors file ({error}); have the "
            "engine write it again"
        ) from error


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """When an engine is done with a file: it locks ``.lock`` beside it meanwhile."""
    lock = path.with_name(f"{path.name}.lock")
    if fcntl is None or not lock.is_file():
        yield
        return
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield
