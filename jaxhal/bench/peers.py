"""What users run today: Hugging Face torch models, with this library's own weights."""

import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxhal.models.encoders.text_encoder import TextEncoder, load_encoder
from jaxhal.models.lm import LM
from jaxhal.models.tokenizer import Tokenizer


def torch_device() -> str:
    """The device of torch that JAX runs on.

    Raises:
      ImportError: without torch, or one that cannot use that device.
    """
    import torch

    device = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())
    if device is None or device == "cuda" and not torch.cuda.is_available():
        raise ImportError(
            f"JAX runs on {jax.default_backend()!r} and this torch does not, which "
            "compares devices; set JAX_PLATFORMS=cpu or install torch for the device"
        )
    return device


class EncoderPeer(NamedTuple):
    """An encoder here, and Hugging Face's model of the same weights on that device."""

    encoder: TextEncoder
    model: Any
    tokenizer: Any
    device: str


def torch_encoder(family: str, kind: str, shape: dict[str, Any]) -> EncoderPeer:
    """A random encoder of a shape with MiniLM's tokenizer.

    ``kind`` is what transformers calls it, such as ``"ModelForTokenClassification"``.

    Raises:
      ImportError: without torch, or one that cannot use JAX's device.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    device = torch_device()
    tokenizer = load_encoder("all-minilm-l6-v2").tokenizer.hf
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer), **shape
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"Auto{kind}").from_config(config).eval()
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(model.state_dict(), f"{folder}/model.safetensors")
        tokenizer.save_pretrained(folder)
        encoder = load_encoder(folder)
    return EncoderPeer(encoder, model.to(device), tokenizer, device)


def torch_llama(lm: LM, attention: str) -> Any:
    """A Hugging Face Llama with the weights of ``lm``, on the device that JAX runs on.

    ``attention`` is ``"sdpa"`` or ``"eager"``.
    """
    import torch
    import transformers

    device = torch_device()
    config = lm.config
    rope = config.ropes[0]
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=config.tie_word_embeddings,
    )
    settings._attn_implementation = attention
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    model = model.to_empty(device=device).float().eval()
    model.load_state_dict(_state(lm), strict=False)
    model.tie_weights()
    # Buffers were emptied together with the weights.
    model.model.rotary_emb = type(model.model.rotary_emb)(settings).to(device)
    return model


def server(model: Any, tokenizer: Tokenizer, folder: str) -> Sequence[str]:
    """The module, and what it is told, that serves a model by Hugging Face.

    The model is put into a folder, to sample from its own distribution.

    Raises:
      ImportError: without what that server needs.
    """
    from transformers.utils import import_utils as has

    if not (has.is_serve_available() and has.is_accelerate_available()):
        raise ImportError("install transformers[serving] for its server")
    model.generation_config.update(
        do_sample=True,
        top_k=0,
        eos_token_id=[*tokenizer.stop_ids],
        pad_token_id=tokenizer.pad_id,
    )
    model.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    entry = "transformers.cli.transformers"
    return entry, "serve", folder, "--device", torch_device()


def _state(lm: LM) -> dict[str, Any]:
    import torch

    from jaxhal.models.families import huggingface_table
    from jaxhal.models.tables import same
    from jaxhal.models.weights import paths

    table = huggingface_table(lm.config)
    state = {}
    for path, leaf in paths(lm.params):
        origin, array = table[path], np.array(leaf, np.float32)
        stacked = enumerate(array) if path.startswith("blocks.") else [(0, array)]
        for layer, part in stacked:
            part = part if origin.turn is same else part.T
            name = origin.name.format(layer)
            state[name] = torch.from_numpy(np.ascontiguousarray(part))
    return state


def forward(model: Any, tokens: np.ndarray) -> None:
    """A plain forward with logits of every position, waited for."""
    import torch

    with torch.no_grad():
        out = model(_on_device(model, tokens), use_cache=False)
        out.logits[0, -1, 0].item()


def _on_device(model: Any, tokens: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(tokens).long().to(model.device)


def toha_and_lookback(
    model: Any, tokens: np.ndarray, context: int, prompt: int
) -> tuple[np.ndarray, np.ndarray]:
    """The common recipe: all attention maps, then SciPy's MST head by head.

    MTop-Div ``[layer, heads]`` and lookback ratios ``[layer, heads, response]``.
    """
    import torch
    from scipy.sparse.csgraph import minimum_spanning_tree

    with torch.no_grad():
        read = _on_device(model, tokens)
        out = model(read, output_attentions=True, use_cache=False)
    maps = np.stack([attention[0].cpu().numpy() for attention in out.attentions])
    layers, heads, size, _ = maps.shape
    divergence = np.zeros((layers, heads), np.float32)
    for layer in range(layers):
        for head in range(heads):
            distance = 1 - np.maximum(maps[layer, head], 0)
            np.fill_diagonal(distance, 0)
            distance = np.minimum(distance, distance.T)
            distance[:prompt, :prompt] = 0
            # SciPy reads a weight of 0 as no edge: shift all weights by one.
            tree = minimum_spanning_tree(distance + 1 - np.eye(size))
            divergence[layer, head] = tree.sum() - (size - 1)
    rows = maps[:, :, prompt - 1 : -1]
    new = np.tril(np.ones((size, size)))[prompt - 1 : -1, context:]
    back = rows[..., :context].mean(-1)
    fresh = (rows[..., context:] * new).sum(-1) / new.sum(-1)
    return divergence, back / (back + fresh)


def relevance_by_token(model: Any, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """A forward and a backward for each response token: input times gradient.

    ``[response, seq]`` of the first row, as the published code builds it.
    """
    read = _on_device(model, tokens)
    table = model.get_input_embeddings()
    out = np.zeros((tokens.shape[1] - prompt, tokens.shape[1]), np.float32)
    for row in range(len(out)):
        x = table(read[:1, : prompt + row]).detach().requires_grad_()
        logits = model(inputs_embeds=x, use_cache=False).logits
        logits[0, -1, read[0, prompt + row]].backward()
        out[row, : prompt + row] = (x * x.grad).sum(-1)[0].detach().cpu().numpy()
    return out


def sampled(model: Any, tokens: np.ndarray, n: int, new: int) -> np.ndarray:
    """Samples of one prompt at temperature 1, all of them ``new`` tokens long."""
    import torch

    with torch.no_grad():
        out = model.generate(
            _on_device(model, tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            num_return_sequences=n,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )
    return out.cpu().numpy()
