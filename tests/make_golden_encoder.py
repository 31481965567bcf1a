"""Writes tests/golden/encoders.{json,npz} with Hugging Face transformers and torch.

    python tests/make_golden_encoder.py

Rerun it when a family is added; the suite compares against torch live where torch is
installed and against these files everywhere.
"""

import json

import numpy as np

import tiny
import tiny_encoders

# Per family: the model inside a classifier, its layers, and what attention and
# perceptron of a layer end with.
_BERT = ("encoder.layer", "attention.output.dense", "output.dense")
_PARTS = {
    "bert": ("bert", *_BERT),
    "roberta": ("roberta", *_BERT),
    "deberta-v2": ("deberta", *_BERT),
    "modernbert": ("model", "layers", "attn", "mlp"),
    "eurobert": ("model", "layers", "self_attn", "mlp"),
    "t5": (
        "transformer",
        "encoder.block",
        "layer.0.SelfAttention",
        "layer.1.DenseReluDense",
    ),
}
_EMBEDDINGS = {"eurobert": "embed_tokens", "t5": "encoder.embed_tokens"}


def build(family: str, kind: str, settings: dict):
    """Hugging Face's model, on whatever device torch is told to use."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"Auto{kind}").from_config(config).eval().float()
    config.architectures = [type(model).__name__]
    return model


def run(case: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Config, shapes, and what each part of Hugging Face's eager model gives."""
    import torch

    family, kind, settings = tiny_encoders.CASES[case]
    model = build(family, kind, settings)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    state = {
        name: torch.from_numpy(tiny.weight(name, tuple(shape)))
        for name, shape in shapes.items()
    }
    if family == "t5":  # one table under two names
        tied = "transformer.encoder.embed_tokens.weight"
        state[tied] = state["transformer.shared.weight"]
        del shapes[tied]
    model.load_state_dict(state)
    outer, layers, attention, perceptron = _PARTS[family]
    classifier = kind != tiny_encoders.PLAIN
    inner = getattr(model, outer) if classifier else model
    seen, layers = {}, inner.get_submodule(layers)

    def keep(name):
        def hook(module, args, output):
            seen[name] = (output[0] if isinstance(output, tuple) else output).numpy()

        return hook

    embeddings = inner.get_submodule(_EMBEDDINGS.get(family, "embeddings"))
    embeddings.register_forward_hook(keep("embeddings"))
    for number, layer in enumerate(layers):
        layer.register_forward_hook(keep(f"layers {number}"))
        layer.get_submodule(attention).register_forward_hook(
            keep(f"attention {number}")
        )
        layer.get_submodule(perceptron).register_forward_hook(keep(f"mlp {number}"))
    if settings.get("conv_kernel_size"):  # comes after the first layer
        inner.encoder.conv.register_forward_hook(keep("layers 0"))
    if classifier:
        final = model.classifier
        final = getattr(final, "out_proj", final)
        final.register_forward_pre_hook(
            lambda module, args: seen.update(pooled=args[0].numpy())
        )
    arguments = {
        "input_ids": torch.from_numpy(
            tiny_encoders.tokens(settings["pad_token_id"])
        ).long(),
        "attention_mask": torch.from_numpy(tiny_encoders.VALID).long(),
    }
    typed = family not in ("modernbert", "eurobert", "t5")
    if typed and settings.get("type_vocab_size", 2) == 2:
        arguments["token_type_ids"] = torch.from_numpy(tiny_encoders.TYPES).long()
    with torch.no_grad():
        out = model(**arguments)
        if classifier:
            seen["logits"] = out.logits.numpy()
        else:
            seen["hidden"] = out.last_hidden_state.numpy()
    for part in ("layers", "attention", "mlp"):
        rows = [seen.pop(f"{part} {number}") for number in range(len(layers))]
        seen[part] = np.stack(rows)
    meta = {
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "shapes": shapes,
    }
    return meta, seen


def main() -> None:
    metas, arrays = {}, {}
    for case in tiny_encoders.CASES:
        metas[case], outputs = run(case)
        arrays |= {f"{case}/{key}": value for key, value in outputs.items()}
    text = json.dumps(metas, sort_keys=True)
    (tiny.GOLDEN / "encoders.json").write_text(text)
    np.savez_compressed(tiny.GOLDEN / "encoders.npz", **arrays)


if __name__ == "__main__":
    main()
