"""Writes tests/golden/probe with torch, as the code of Obeso et al. saves a probe.

python tests/make_golden_probe.py
"""

import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "probe"
LAYER, WIDTH = 0, 32


def weights() -> tuple[np.ndarray, np.ndarray]:
    """What is saved: rounded, so that it is the same in any type."""
    rng = np.random.default_rng(0)
    return rng.integers(-8, 9, (1, WIDTH)) / np.float32(8), np.float32([0.25])


def main() -> None:
    import torch

    GOLDEN.mkdir(exist_ok=True)
    for name, kind in (("head", torch.bfloat16), ("float32", torch.float32)):
        head = torch.nn.Linear(WIDTH, 1, dtype=kind)
        with torch.no_grad():
            for own, value in zip(head.parameters(), weights(), strict=True):
                own.copy_(torch.from_numpy(value))
        torch.save(head.state_dict(), GOLDEN / f"probe_{name}.bin")
    config = {
        "target_layer_name": "LlamaDecoderLayer",
        "layer_idx": LAYER,
        "hidden_size": WIDTH,
    }
    text = json.dumps(config, indent=4) + "\n"
    (GOLDEN / "probe_config.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
