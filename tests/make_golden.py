"""Writes tests/golden/parity.{json,npz} with Hugging Face transformers and torch.

    python tests/make_golden.py

Rerun it when a family is added; the suite compares against torch live where torch is
installed and against these files everywhere.
"""

import json

import numpy as np

import tiny


def run(case: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Config, shapes, and the hidden states and logits of Hugging Face eager."""
    import torch
    import transformers

    family, settings = tiny.CASES[case]
    config = transformers.AutoConfig.for_model(family, **settings)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    state = {
        name: torch.from_numpy(tiny.weight(name, tuple(tensor.shape)))
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    with torch.no_grad():
        out = model(torch.from_numpy(tiny.TOKENS).long(), output_hidden_states=True)
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    meta = {
        "config": json.loads(config.to_json_string(use_diff=False)),
        "shapes": shapes,
    }
    hidden = torch.stack(out.hidden_states).numpy()
    return meta, {"hidden": hidden, "logits": out.logits.numpy()}


def main() -> None:
    metas, arrays = {}, {}
    for case in tiny.CASES:
        metas[case], outputs = run(case)
        arrays |= {f"{case}/{key}": value for key, value in outputs.items()}
    (tiny.GOLDEN / "parity.json").write_text(json.dumps(metas, sort_keys=True))
    np.savez_compressed(tiny.GOLDEN / "parity.npz", **arrays)


if __name__ == "__main__":
    main()
