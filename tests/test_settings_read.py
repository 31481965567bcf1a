"""What the published code of a family computes text by, its configuration is asked."""

import importlib
import inspect
import re

import pytest
import transformers

import tiny
from jaxhal.models.families import FAMILIES, from_huggingface
from jaxhal.models.settings import Settings

# Of training, of other tasks than writing, and of how it is run.
_ELSEWHERE = """
_attn_implementation attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout
classifier_dropout initializer_range pad_token_id use_cache return_dict dtype
output_attentions output_hidden_states output_router_logits router_aux_loss_coef
router_jitter_noise get_text_config text_config vision_config audio_config
image_token_id video_token_id audio_token_id mm_tokens_per_image
""".split()
# What follows from another setting, which is read, or is of images and sounds; and what
# would bring tensors that are not known.
_BY_ANOTHER = {
    "qwen3": {"layer_types"},  # windows, with use_sliding_window
    "qwen3_moe": {"sliding_window"},
    "gemma4_text": {"kv_sharing_modes", "use_clipped_linears", "standardize"},
    "gpt2": {"add_cross_attention"},
    "granitemoehybrid": {"num_experts_per_tok", "layers_block_type"},
}
_OTHERS = re.compile(
    "Vision|Audio|Multimodal|Classification|Answering|DoubleHeads|Summary|Mamba"
)


@pytest.fixture
def read(monkeypatch):
    """Keys that someone asked for, under the names that the file has."""
    found, within = set(), []

    def told(name):
        real = getattr(Settings, name)

        def asked(self, key, *rest):
            if isinstance(key, str) and not within:
                found.update({key, self.spelled.get(key, key)})
            return real(self, key, *rest)

        monkeypatch.setattr(Settings, name, asked)

    def copied(name):
        real = getattr(Settings, name)

        def made(self, *given, **named):
            within.append(name)
            try:
                return real(self, *given, **named)
            finally:
                within.pop()

        monkeypatch.setattr(Settings, name, made)

    for name in ("get", "__getitem__", "__contains__"):
        told(name)
    for name in ("__init__", "named", "over", "filled"):
        copied(name)
    return found


def published(family):
    """Settings that the classes of transformers which compute text look at."""
    pytest.importorskip("torch")
    name = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    sources = [
        inspect.getsource(one)
        for kind, one in inspect.getmembers(module, inspect.isclass)
        if one.__module__ == module.__name__ and not _OTHERS.search(kind)
    ]
    looked = r"\bconfig\.(\w+)|getattr\((?:self\.)?config, \"(\w+)\""
    return {a or b for text in sources for a, b in re.findall(looked, text)}


# What every file holds, and families whose files must hold more, or by other names.
_ALWAYS = dict(
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=512,
)
_LONGER = {"gpt2", "granitemoehybrid", "ministral3"}
_QWEN = "qwen2", "qwen3"


@pytest.mark.parametrize(
    "family, more",
    [(family, {}) for family in sorted(FAMILIES.keys() - _LONGER)]
    + [(name, {"use_sliding_window": True, "max_window_layers": 2}) for name in _QWEN],
)
def test_what_a_file_leaves_out_is_as_published(family, more):
    """A few settings mean what all of the published class do."""
    few = {"model_type": family, **_ALWAYS, **more}
    whole = transformers.AutoConfig.for_model(**few).to_dict()
    assert from_huggingface(few) == from_huggingface(whole)


def test_published_files_of_images_and_text_are_short():
    """As those of Gemma 3 with 4 billion parameters."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    found = from_huggingface({"model_type": "gemma3", "text_config": text})
    assert (found.num_attention_heads, found.num_key_value_heads) == (8, 4)
    assert found.vocab_size == 262208 and found.windows[:6] == (1024,) * 5 + (0,)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_switch_is_overlooked(family, read):
    cases = [case for case, (name, _) in tiny.CASES.items() if name == family]
    for case in cases:
        from_huggingface(tiny.golden(case)["config"])
    asked = published(family)
    assert cases and len(asked & read) > 5
    assert asked - read - {*_ELSEWHERE} - _BY_ANOTHER.get(family, set()) == set()
