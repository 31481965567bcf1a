"""Writes tests/golden/{parity,greedy}.* with Hugging Face transformers and torch.

    python tests/make_golden.py

Rerun it when a family is added; the suite compares against torch live where torch is
installed and against these files everywhere.
"""

import json

import numpy as np

import tiny


def model_of(case: str):
    """A tiny model of Hugging Face, its config and the tensors it was given."""
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
    return model, config, state


def run(case: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Config, shapes, and the hidden states and logits of Hugging Face eager."""
    import torch

    model, config, state = model_of(case)
    with torch.no_grad():
        out = model(torch.from_numpy(tiny.TOKENS).long(), output_hidden_states=True)
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    meta = {
        "config": json.loads(config.to_json_string(use_diff=False)),
        "shapes": shapes,
    }
    hidden = torch.stack(out.hidden_states).numpy()
    return meta, {"hidden": hidden, "logits": out.logits.numpy()}


def attention(case: str) -> np.ndarray:
    """Hugging Face eager's ``[layer, batch, heads, query, key]``."""
    import torch

    model, *_ = model_of(case)
    with torch.no_grad():
        out = model(torch.from_numpy(tiny.TOKENS).long(), output_attentions=True)
    return torch.stack(out.attentions).numpy()


def greedy(case: str) -> list[list[int]]:
    """What Hugging Face writes greedily after each of the prompts, one at a time."""
    import torch

    model, *_ = model_of(case)
    options = dict(do_sample=False, max_new_tokens=tiny.NEW, eos_token_id=None)
    return [
        model.generate(torch.tensor([prompt]), pad_token_id=0, **options)[0].tolist()[
            len(prompt) :
        ]
        for prompt in tiny.PROMPTS
    ]


def main() -> None:
    metas, arrays = {}, {}
    for case in tiny.CASES:
        metas[case], outputs = run(case)
        arrays |= {f"{case}/{key}": value for key, value in outputs.items()}
    (tiny.GOLDEN / "parity.json").write_text(json.dumps(metas, sort_keys=True))
    np.savez_compressed(tiny.GOLDEN / "parity.npz", **arrays)
    written = {case: greedy(case) for case in tiny.CASES}
    (tiny.GOLDEN / "greedy.json").write_text(json.dumps(written, sort_keys=True))


if __name__ == "__main__":
    main()
