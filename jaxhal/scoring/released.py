"""Classifiers that the authors of a method released, as fitted detectors."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from jaxhal import evaluation
from jaxhal.classifiers.linear import Linear
from jaxhal.classifiers.selection import published
from jaxhal.detectors import build, lookback_lens
from jaxhal.io import torch_file
from jaxhal.scoring.fitting import Fitted

CONFIG, _HEAD = "probe_config.json", "probe_head"

#: Of a probe, the files that the hub is asked for, and what shows an adapter.
WANTED = (CONFIG, f"{_HEAD}.bin", f"{_HEAD}.safetensors", "adapter_config.json")


def released_lookback(path: str | os.PathLike) -> Fitted:
    """Lookback Lens as its authors fitted it, to judge what a like model reads.

    Their class 1 is faithful text, so the sign turns: the score is the log odds of a
    hallucination, the probability its logistic, ``predict_proba(x)[:, 0]``, and a half
    the threshold.  Any reader of as many heads is judged; only that of the same model
    was what they fitted to, Llama-2-7b-chat with 32 layers of 32 heads.

    Args:
      path: a classifier from beside the code of `Lookback Lens
        <https://arxiv.org/abs/2407.07071>`_ exported to JSON: ``n_layers``,
        ``n_heads``, ``classes`` [0, 1], ``coef`` (layer-major) and ``intercept``.
    """
    try:
        about = json.loads(Path(path).read_text("utf-8"))
        names = ("n_layers", "n_heads", "classes", "coef", "intercept")
        layers, heads, classes, coef, intercept = (about[name] for name in names)
        layers, heads = int(layers), int(heads)
        # As scikit-learn has them, a row of coefficients, or without the row.
        w = -np.atleast_2d(np.array(coef, np.float32))
        b = -np.atleast_1d(np.array(intercept, np.float32))
        if w.ndim != 2 or len(w) != 1 or b.shape != (1,):
            raise ValueError(
                f"coef has shape {w.shape} and intercept {b.shape}; give those of one "
                "binary classifier, [1, width] and [1]"
            )
        w, b = w[0], b[0]
        if not np.isfinite([*w, b]).all():
            raise ValueError("coef or intercept is not finite")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no released classifier ({type(error).__name__}: {error}); "
            "export n_layers, n_heads, classes, coef and intercept"
        ) from error
    if w.shape != (layers * heads,) or classes != [0, 1]:
        raise ValueError(
            f"{path} has {len(w)} coefficients for {layers} layers of {heads} "
            f"heads, and classes {classes}; a released classifier has one a head, and "
            "classes [0, 1]"
        )
    fitted = published(Linear(*map(jnp.asarray, (w, b, 0 * w, 0 * w + 1))))
    needs = {"num_hidden_layers": layers, "num_attention_heads": heads}
    return Fitted(lookback_lens(), fitted, evaluation.Platt(1.0, 0.0), 0.0, needs=needs)


def is_released_probe(folder: Path) -> bool:
    """Whether a folder holds what :func:`released_probe` takes."""
    return (folder / CONFIG).is_file()


def probes(folder: Path) -> list[str]:
    """The folders in it that hold such a probe; a repository may have many."""
    return sorted(one.parent.name for one in folder.glob(f"*/{CONFIG}"))


def released_probe(folder: str | os.PathLike) -> Fitted:
    """A linear probe of tokens that was trained with the code of Obeso et al.

    It looks at what comes out of one layer, for every token; an answer has the highest
    log odds of its tokens, the probability their logistic, and a half is the threshold.
    Of the last layer it would see what the final norm makes of it, as hidden states
    have it.  Nobody measured it beside controls here, so it decides no verdict.

    Args:
      folder: with ``probe_config.json`` (``layer_idx``, ``hidden_size``) and
        ``probe_head.bin`` or ``probe_head.safetensors`` (``weight``, ``bias``).  Only
        tensors are read of it, no code.

    Raises:
      ValueError: on what is no such folder, or a probe with an adapter of the model's
        weights, which reads a model that is not at hand.

    References:
      Obeso et al., `Real-Time Detection of Hallucinated Entities in Long-Form
      Generation <https://arxiv.org/abs/2509.03531>`_, 2025.
    """
    folder = Path(folder)
    if adapters := sorted(one.name for one in folder.glob("adapter_*")):
        raise ValueError(
            f"{folder} holds {adapters[0]}: the probe was trained with an adapter of "
            "the model's weights; give one without, or merge the adapter into the "
            "model, load that one and take the adapter's files away"
        )
    try:
        about = json.loads((folder / CONFIG).read_text("utf-8"))
        layer, width = int(about["layer_idx"]), int(about["hidden_size"])
        tensors = _tensors(folder)
        w, b = (np.asarray(tensors[name], np.float32) for name in ("weight", "bias"))
    except (KeyError, OSError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} is no released probe ({type(error).__name__}: {error}); give a "
            f"folder with {CONFIG} and {_HEAD}.bin or {_HEAD}.safetensors"
        ) from error
    if w.shape != (1, width) or b.shape != (1,) or layer < 0:
        raise ValueError(
            f"{folder} has weights {list(w.shape)} and {list(b.shape)} of hidden size "
            f"{width} and layer {layer}; a released probe has [1, hidden_size] and [1]"
        )
    if not (np.isfinite(w).all() and np.isfinite(b).all()):
        raise ValueError(f"{folder} has weights that are not finite; download it again")
    # Hidden state 0 is what goes into the first layer.
    detector = build({"token_probe": {"layer": layer + 1, "highest": 1}})
    w, b = jnp.asarray(w[0]), jnp.asarray(b[0])
    linear = Linear(w, b, jnp.zeros_like(w), jnp.ones_like(w))
    needs = {"hidden_size": width}
    return Fitted(detector, linear, evaluation.Platt(1.0, 0.0), 0.0, needs=needs)


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    if (safe := folder / f"{_HEAD}.safetensors").is_file():
        from safetensors.numpy import load_file

        return load_file(safe)
    return torch_file.read(folder / f"{_HEAD}.bin")
