"""Verdicts of what an engine exported are those of the library's own reading."""

import dataclasses
import json
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_saving import fitted
from typer.testing import CliRunner

import jaxhal
from jaxhal.classifiers.linear import Linear
from jaxhal.classifiers.selection import Chosen
from jaxhal.cli import app as cli
from jaxhal.cli import exported
from jaxhal.datasets import bundled_answers
from jaxhal.datasets.jsonl import read_rows
from jaxhal.datasets.logprobs import logprobs_of
from jaxhal.detectors import build
from jaxhal.evaluation import CalibrationSet, Measured, Platt
from jaxhal.io.files import fcntl
from jaxhal.models.lm import outline
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.weights import paths
from jaxhal.scoring.exported import reader_for
from jaxhal.scoring.fitting import untrained
from jaxhal.scoring.saving import save as save_detector
from jaxhal.types import Example, Logprob
from tiny_lm import answers, tiny_lm, write_lm

DEPTH, WIDTH = 3, 32
UNTRAINED = [
    "predictive_probability",
    "predictive_probability_max",
    "token_entropy",
    "token_entropy_mean",
    "novel_words",
]
EXAMPLES = answers(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_lm(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=DEPTH)


@pytest.fixture(scope="module")
def lm(folder):
    return jaxhal.load(folder)


def linear(seed=1):
    w = jax.random.normal(jax.random.key(seed), (WIDTH,)) / 4
    return Linear(w, jnp.zeros(()), jnp.zeros(WIDTH), jnp.ones(WIDTH))


def deciding(one):
    """A detector whose verdict counts."""
    measured = Measured("crates", 40, 10, 0.9, 0.8, 0.95)
    return dataclasses.replace(one, threshold=0.0, beats="yes", measured=measured)


@pytest.fixture(scope="module")
def probe():
    return deciding(fitted({"token_probe": {"layer": 2}}, linear()))


def whole_probe(name="linear_probe", layer=DEPTH):
    nothing = jnp.zeros(())
    return fitted(name, Chosen(linear(2), jnp.asarray(layer), nothing + 1, nothing))


def encoded(lm, example):
    row = lm.tokenizer.encode_example(example)
    return row, np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)


@pytest.fixture(scope="module")
def by_transformers(folder, lm, tmp_path_factory):
    """States of whole answers in files as vLLM writes them, made by another library."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    last = []
    model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    place = tmp_path_factory.mktemp("states")
    for example in EXAMPLES:
        _, ids = encoded(lm, example)
        with torch.no_grad():
            out = model(torch.tensor(ids[None]), output_hidden_states=True)
        # Theirs went through the norm at the end; vLLM's has not.
        states = torch.stack([*out.hidden_states[:-1], last[-1]], 2)[0].numpy()
        save(place, example, ids, states)
    return place


def save(place, example, ids, states, name=None):
    tensors = {"token_ids": ids, "hidden_states": np.ascontiguousarray(states)}
    save_file(tensors, place / f"{name or example.id}.safetensors")


def only(place, layers, to):
    """The same files with some of the states."""
    for path in place.glob("*.safetensors"):
        held = load_file(path)
        held["hidden_states"] = np.ascontiguousarray(held["hidden_states"][:, layers])
        save_file(held, to / path.name)
    return to


def agree(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.error is other.error is None
        assert (one.id, one.verdict, one.by) == (other.id, other.verdict, other.by)
        assert one.scores == pytest.approx(other.scores, abs=1e-4)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)
        assert [s[:3] for s in one.spans] == [s[:3] for s in other.spans]
        assert len(one.tokens) == len(other.tokens)
        for token, same in zip(one.tokens, other.tokens, strict=True):
            assert token[:3] == same[:3]
            assert token.scores == pytest.approx(same.scores, abs=1e-4)


@pytest.mark.parametrize("loaded", [True, False])
def test_states_of_transformers_make_the_same_verdicts(
    folder, lm, probe, by_transformers, loaded
):
    chosen = [probe, whole_probe(), whole_probe("linear_probe_last", 1), *UNTRAINED]
    wanted = jaxhal.score(lm, EXAMPLES, chosen)
    reader = lm if loaded else folder
    found = jaxhal.score_states(reader, EXAMPLES, by_transformers, chosen)
    agree(found, wanted)
    assert {one.verdict for one in found} == {"hallucinated", "supported"}
    assert any(one.spans for one in found)
    assert len({round(one.scores["token_entropy"], 3) for one in found}) > 1


def test_hand_made_states_make_the_scores_of_a_formula(tmp_path, folder, probe):
    """Random states, looked at in NumPy alone."""
    tokens, w = outline(folder).tokenizer, np.asarray(probe.params.w, float)
    draw, wanted = np.random.default_rng(0), []
    for example in EXAMPLES:
        row = tokens.encode_example(example)
        ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
        states = draw.normal(size=(len(ids), 2, WIDTH)).astype(ml_dtypes.bfloat16)
        save(tmp_path, example, ids, states)
        own = states[len(row.prompt_ids) :, 1].astype(float) @ w
        wanted.append((np.sort(own)[-5:].mean(), 1 / (1 + np.exp(-own))))
    found = jaxhal.score_states(folder, EXAMPLES, tmp_path, [probe], layers=[0, 2])
    for one, (score, each) in zip(found, wanted, strict=True):
        assert one.scores["token_probe"] == pytest.approx(score, abs=1e-4)
        assert one.probability == pytest.approx(1 / (1 + np.exp(-score)), abs=1e-4)
        said = "hallucinated" if score >= 0 else "supported"
        assert one.verdict == said
        values = [token.scores["token_probe"] for token in one.tokens]
        assert values == pytest.approx(each[:-1].tolist(), abs=1e-4)


def test_hand_made_states_of_the_library_itself(tmp_path, lm, probe):
    """What it read of the response, nothing of the prompt."""
    arrays = []
    for example in EXAMPLES:
        row, ids = encoded(lm, example)
        batch = lm.encode([example])
        read = jaxhal.read(lm, batch, {"it": jaxhal.HiddenStates(layers=(1, 2))})["it"]
        own = np.moveaxis(np.asarray(read[:, 0, : len(row.response_ids)]), 0, 1)
        states = np.zeros((len(ids), 2, WIDTH), np.float32)
        states[len(row.prompt_ids) :] = own
        arrays.append({"token_ids": ids, "hidden_states": states})
    found = jaxhal.score_states(lm, EXAMPLES, arrays, [probe], layers=[1, 2])
    agree(found, jaxhal.score(lm, EXAMPLES, [probe]))


def test_what_ships_for_a_reader_by_its_name(smollm2):
    """From a GGUF file, of which the norm and the embeddings alone are read."""
    some = bundled_answers()[:3]
    arrays, states = [], jaxhal.HiddenStates(layers=(20,))
    together = jaxhal.read(smollm2, smollm2.encode(some), {"it": states})["it"][0]
    for example, read in zip(some, np.asarray(together), strict=True):
        row, ids = encoded(smollm2, example)
        whole = np.zeros((len(ids), 1, read.shape[-1]), np.float32)
        whole[len(row.prompt_ids) :, 0] = read[: len(row.response_ids)]
        arrays.append({"token_ids": ids, "hidden_states": whole})
    found = jaxhal.score_states("smollm2-135m", some, arrays, layers=[20])
    names = [*found[0].scores]
    assert "token_probe" in names and "mtop_div" not in names
    agree(found, jaxhal.score(smollm2, some, names))
    assert {one.by for one in found} == {"token_probe"}
    part = outline("smollm2-135m", only=("norm.", "embed_tokens."))
    whole = dict(paths(smollm2.params))
    read = {path: x for path, x in paths(part.params) if isinstance(x, jax.Array)}
    assert {*read} == {"norm.scale", "embed_tokens.embedding"}
    for path, leaf in read.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(whole[path]))


def test_weights_are_read_only_where_they_are_needed(
    tmp_path, folder, probe, by_transformers, monkeypatch
):
    read, get = [], SafetensorsSource.get

    def noted(self, name):
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(SafetensorsSource, "get", noted)

    def needed(detectors, **options):
        read.clear()
        reader_for(folder, by_transformers, detectors, **options)
        return read

    assert needed([probe], layers=[2]) == []
    assert needed([probe, "novel_words"], layers=[2, 3]) == []
    assert needed([whole_probe()]) == ["model.norm.weight"]
    both = ["lm_head.weight", "model.norm.weight"]
    assert sorted(needed(["token_entropy"])) == both
    knowing = dataclasses.replace(probe, reader="another")
    with pytest.raises(ValueError, match="was fitted to a reader of other weights"):
        needed([knowing], layers=[2])
    assert "model.embed_tokens.weight" in read
    with pytest.raises(ValueError, match="weights 'norm.scale' of .* were not loaded"):
        jaxhal.score_states(outline(folder), EXAMPLES, by_transformers, [whole_probe()])


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("token_probe", [0, 1], r"'token_probe' looks at hidden states 2, .* states 0"),
        ("linear_probe", [0, 1, 3], r"'linear_probe' looks at hidden states 2, and"),
        ("mtop_div", None, "'mtop_div' looks at attention, and what was exported is"),
        ("context_gain", None, "looks at the pass over another prompt"),
        ("selfcheck_ngram", None, "looks at more than the answer's own tokens"),
        ("token_probe", [2, 1], r"layers is \(2, 1\); name at least one, ascending"),
        ("token_probe", [9], "layer 9 is outside the 4 hidden states"),
        ("token_probe", [], r"layers is \(\); name at least one"),
    ],
)
def test_what_was_not_exported_is_said_before_anything_is_read(
    tmp_path, folder, probe, name, layers, message
):
    known = {"token_probe": probe, "linear_probe": whole_probe()}
    with pytest.raises(ValueError, match=message):
        jaxhal.score_states(
            folder, EXAMPLES, tmp_path, [known.get(name, name)], layers=layers
        )


def test_by_default_what_is_sure_to_be_found(tmp_path, folder, by_transformers):
    names = ["response_length", "novel_words", "novel_word_share"]
    layers = only(by_transformers, [1], tmp_path)
    (found, *_) = jaxhal.score_states(folder, EXAMPLES, layers, layers=[1])
    assert [*found.scores] == names
    (found, *_) = jaxhal.score_states(folder, EXAMPLES, by_transformers)
    assert {*found.scores} == {*names, *UNTRAINED}
    with pytest.raises(ValueError, match=r"layers \(1,\) are of hidden states"):
        jaxhal.score_states(folder, EXAMPLES, None, layers=[1])


# --- files ----------------------------------------------------------------------------


@pytest.fixture
def one(tmp_path, folder):
    """An example, and how to write its file with changes."""
    tokens, example = outline(folder).tokenizer, EXAMPLES[3]
    row = tokens.encode_example(example)
    ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
    states = np.random.default_rng(1).normal(size=(len(ids), 1, WIDTH))

    def write(change=lambda ids, states: (ids, states), name=None):
        save(tmp_path, example, *change(ids.copy(), states.astype("f")), name=name)
        return tmp_path

    return example, write


def other_token(at):
    def change(ids, states):
        ids[at] = 5
        return ids, states

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_token(2),
            r"has '.*' \(5\) for token 2 of the prompt, where the reader's",
        ),
        (other_token(-3), r"for token \d+ of the response, where"),
        (
            other_token(-1),
            r"for token \d+ of the response, where .* makes '</s>' \(1\)",
        ),
        (lambda i, s: (i[:40], s[:40]), r"holds 40 tokens, .* include_output_tokens"),
        (lambda i, s: (i[:-2], s[:-2]), "not all of the response"),
        (
            lambda i, s: (np.append(i, 7), np.append(s, s[:1], 0)),
            "more than the text of this row",
        ),
        (lambda i, s: (i[1:], s), r"has token_ids \[\d+\] and hidden_states \[\d+, 1,"),
        (lambda i, s: (i, s[..., :8]), "holds 1 states of width 8 a token, and 1 of"),
        (lambda i, s: (i, s.repeat(2, 1)), "holds 2 states of width 32 a token"),
        (lambda i, s: (i, s * np.inf), "every number must be finite"),
    ],
)
def test_a_bad_file_is_an_error_of_its_row(folder, probe, one, change, message):
    example, write = one
    place = write(change)
    write(name="whole")
    rows = [example, dataclasses.replace(example, states="whole.safetensors")]
    bad, good = jaxhal.score_states(folder, rows, place, [probe], layers=[2])
    assert good.error is None and good.verdict is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(bad.error)
    assert bad.verdict is bad.probability is None and not bad.scores


def test_a_file_is_found_by_name_in_its_folder(tmp_path, folder, probe, one):
    example, write = one
    place = write(name="cmpl-1")
    (place / "cut.safetensors").write_bytes(
        (place / "cmpl-1.safetensors").read_bytes()[:99]
    )
    save_file({"token_ids": np.zeros(3)}, place / "poor.safetensors")

    def error(states, folder_of=place):
        row = dataclasses.replace(example, states=states)
        (found,) = jaxhal.score_states(folder, [row], folder_of, [probe], layers=[2])
        return found.error

    assert error("cmpl-1.safetensors") is None
    assert error(str(place / "cmpl-1.safetensors")) is None
    assert "3.safetensors is not there; name the file" in error("")
    assert "is not there; name the file" in error("n" * 300)
    assert "lie outside" in error("../cmpl-1.safetensors")
    assert "lie outside" in error("/etc/passwd")
    assert "is not a whole safetensors file" in error("cut.safetensors")
    assert "has no hidden_states" in error("poor.safetensors")
    for missing in (tmp_path / "nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match="nowhere is no folder"):
            error("", missing)
    held = load_file(place / "cmpl-1.safetensors")
    given = [held, None, {"token_ids": held["token_ids"], "hidden_states": "?"}]
    ours, gone, odd = jaxhal.score_states(
        folder, [example] * 3, given, [probe], layers=[2]
    )
    assert (
        ours.error is None
        and ours.scores
        and "states of answer 1 are not there" in gone.error
    )
    assert "hidden_states" in odd.error
    with pytest.raises(ValueError, match="states of 1 answers, and 2 examples; give"):
        jaxhal.score_states(folder, [example] * 2, [held], [probe], layers=[2])


def test_tensors_of_torch_may_be_bfloat16(folder, probe, one):
    torch = pytest.importorskip("torch")
    example, write = one
    held = load_file(write() / f"{example.id}.safetensors")
    states = torch.tensor(held["hidden_states"])
    given = [
        {"token_ids": torch.tensor(held["token_ids"]), "hidden_states": each}
        for each in (states, states.bfloat16(), states.clone().requires_grad_())
    ]
    whole, short, taught = jaxhal.score_states(
        folder, [example] * 3, given, [probe], layers=[2]
    )
    assert whole.scores == taught.scores != {} and short.error is None
    assert short.scores == pytest.approx(whole.scores, abs=0.05)


@pytest.mark.skipif(fcntl is None, reason="nothing is locked here")
def test_a_file_that_is_being_written_is_waited_for(folder, probe, one):
    example, write = one
    place, found = write(), []
    path = place / f"{example.id}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:99])
    lock = (place / f"{path.name}.lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def read():
        found.extend(jaxhal.score_states(folder, [example], place, [probe], layers=[2]))

    reading = threading.Thread(target=read)
    reading.start()
    reading.join(2)
    assert not found
    path.write_bytes(whole)
    lock.close()
    reading.join()
    assert found[0].error is None


# --- the end of the sequence ----------------------------------------------------------


def without_end(lm, examples, detectors):
    """Scores that are read of encodings without it."""
    from jaxhal.detectors import features_of

    scores = []
    for example in examples:
        batch = lm.encode([example], eos=False)
        features = jaxhal.read(lm, batch, features_of(d.detector for d in detectors))
        valid = batch.response_mask
        features |= {"valid": valid, "text": valid, "marked": jnp.zeros_like(valid)}
        each = {
            d.detector.name: d.detector.score(d.params, features) for d in detectors
        }
        scores.append({name: float(value[0]) for name, value in each.items()})
    return scores


def test_where_it_was_not_exported_answers_are_judged_without(
    tmp_path, folder, lm, probe, by_transformers
):
    """As of a request that asks for the states of the output: the last has none."""
    for path in by_transformers.glob("*.safetensors"):
        held = {name: x[:-1].copy() for name, x in load_file(path).items()}
        save_file(held, tmp_path / path.name)
    chosen = [probe, whole_probe()]
    with pytest.warns(UserWarning, match="nothing of the end of the sequence"):
        found = jaxhal.score_states(folder, EXAMPLES, tmp_path, chosen)
    wanted = without_end(lm, EXAMPLES, chosen)
    for one, scores in zip(found, wanted, strict=True):
        assert one.scores == pytest.approx(scores, abs=1e-4)
    chosen = [whole_probe("linear_probe_last", 1)]
    for one in jaxhal.score_states(folder, EXAMPLES, tmp_path, chosen):
        assert one.error is not None
        assert "end of the sequence, which feature 'hidden_last' looks at" in one.error


# --- log probabilities ----------------------------------------------------------------


def said(lm, example, form, top=0):
    """What a server gives with a choice, by the library's own logits."""
    row, ids = encoded(lm, example)
    logits = lm.forward(ids[None])[0, len(row.prompt_ids) - 1 : -1]
    logp = np.asarray(jax.nn.log_softmax(logits), float)
    content = []
    for at, number in enumerate(row.response_ids.tolist()):
        word = f"token_id:{number}" if form == "ids" else lm.tokenizer.decode([number])
        best = np.argsort(-logp[at])[:top].tolist()
        tops = [{"token": f"token_id:{n}", "logprob": logp[at, n]} for n in best]
        one = {"token": word, "logprob": logp[at, number], "bytes": None}
        content.append(one | {"top_logprobs": tops})
    if form != "completion":
        return {"content": content}
    return {
        "tokens": [one["token"] for one in content],
        "token_logprobs": [one["logprob"] for one in content],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in one["top_logprobs"]}
            for one in content
        ]
        if top
        else None,
        "text_offset": [0] * len(content),
    }


def with_logprobs(lm, form, top=0, examples=EXAMPLES):
    return [
        dataclasses.replace(one, logprobs=logprobs_of(said(lm, one, form, top)))
        for one in examples
    ]


@pytest.mark.parametrize("form", ["chat", "completion", "ids"])
def test_log_probabilities_make_the_same_scores(lm, folder, form):
    names = UNTRAINED[:2]
    rows = with_logprobs(lm, form)
    agree(jaxhal.score_states(folder, rows, None, names), jaxhal.score(lm, rows, names))
    (found, *_) = jaxhal.score_states(folder, rows, None)
    assert {*names} < {*found.scores} and "token_entropy" not in found.scores


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_entropies_are_of_whole_distributions_alone(lm, folder, form):
    names, size = UNTRAINED[:4], lm.config.vocab_size
    rows = with_logprobs(lm, form, size, EXAMPLES[:2])
    agree(jaxhal.score_states(folder, rows, None, names), jaxhal.score(lm, rows, names))
    short = with_logprobs(lm, form, 5, EXAMPLES[:2])
    for one in jaxhal.score_states(folder, short, None, ["token_entropy"]):
        assert one.error is not None and "have 5 of 258 tokens in place of" in one.error
        assert "the entropy of a part is not that of all" in one.error


def test_log_probabilities_beside_states(tmp_path, lm, folder, probe, by_transformers):
    rows = with_logprobs(lm, "chat")
    place = only(by_transformers, [2], tmp_path)
    chosen = [probe, "predictive_probability"]
    found = jaxhal.score_states(folder, rows, place, chosen, layers=[2])
    agree(found, jaxhal.score(lm, EXAMPLES, chosen))
    # OpenAI's servers give nothing of the end.
    cut = [dataclasses.replace(one, logprobs=one.logprobs[:-1]) for one in rows]
    with pytest.warns(UserWarning, match="are judged without it"):
        found = jaxhal.score_states(folder, cut, place, chosen, layers=[2])
    for one, full in zip(found, rows, strict=True):
        mean = -np.mean([each.logprob for each in full.logprobs[:-1]])
        assert one.scores["predictive_probability"] == pytest.approx(mean, abs=1e-4)


def test_other_log_probabilities_are_an_error_of_their_row(lm, folder):
    (row,) = with_logprobs(lm, "chat", examples=EXAMPLES[3:4])

    def error(logprobs):
        changed = dataclasses.replace(row, logprobs=logprobs)
        (found,) = jaxhal.score_states(
            folder, [changed], None, ["predictive_probability"]
        )
        return found.error

    first, second, *rest = row.logprobs
    assert error((first, second, *rest)) is None
    assert error((first._replace(token="�"), second, *rest)) is None
    assert "has no 'logprobs'" in error(None)
    message = error((first, second._replace(token="x"), *rest))
    assert (
        "'logprobs' have 'x' for token 1 of the response, where the reader's" in message
    )
    by_id = error((first, second._replace(token="token_id:9"), *rest))
    assert "'logprobs' have 'token_id:9' for token 1" in by_id
    assert "'logprobs' have 2 tokens, and the response has" in error((first, second))
    assert "tokens, and the response has" in error((*row.logprobs, first))
    end = error((*row.logprobs[:-1], Logprob("<|im_end|>", -1.0)))
    assert "'logprobs' have '<|im_end|>' for token" in end


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "'logprobs' is no choice's logprobs"),
        ({"content": [{"token": "a"}]}, "KeyError: 'logprob'"),
        ({"tokens": ["a", "b"], "token_logprobs": [0.0]}, "is no choice's logprobs"),
        ({"tokens": ["a"], "token_logprobs": [None]}, "token 0 .* None; .*echo=false"),
        ({"content": [{"token": "a", "logprob": 0.5}]}, "log probability 0.5; give a"),
        ({"content": [{"token": 3, "logprob": 0.0}]}, "token 0 of 'logprobs' is 3"),
        (
            {"tokens": ["a"], "token_logprobs": [-(10**400)]},
            "probability -1000.*; give",
        ),
        ({"tokens": ["a"], "token_logprobs": [10**400]}, "probability 1000.*; give a"),
        ({"tokens": ["a"], "token_logprobs": [float("nan")]}, "probability nan; give"),
    ],
)
def test_logprobs_of_another_form_are_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        logprobs_of(given)
    row = {"id": "a", "prompt": "p", "response": "r", "logprobs": given}
    ((_, name, example, error),) = read_rows([json.dumps(row).encode()])
    assert (name, example) == ("a", None) and error.startswith("line 1: ")


# --- the command ----------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, probe):
    """Detectors as `jaxhal fit` leaves them."""
    place = tmp_path_factory.mktemp("fitted") / "mine"
    row = {"method": "token_probe", "AUROC": 0.9, "low": 0.8, "high": 0.95}
    card = {"model": "tiny", "data": {}, "metrics": [row | {"control": False}]}
    known = dataclasses.replace(probe, layers=DEPTH)
    save_detector(place / "token_probe", known, {"token_probe": {"layer": 2}}, card)
    return place


def test_the_command_says_what_detect_says(
    tmp_path, folder, saved, by_transformers, monkeypatch
):
    rows = [
        {"id": e.id, "context": e.context, "question": e.question, "answer": e.response}
        for e in EXAMPLES
    ]
    rows[2] |= {"id": "renamed", "states": f"{EXAMPLES[2].id}.safetensors"}
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = ["-i", source, "-m", folder, "-d", saved]
    wanted = run("detect", *common)
    assert wanted.exit_code == 0, wanted.stderr
    scored = ["score", *common, "--states", by_transformers]
    found = run(*scored)
    assert found.exit_code == 0, found.stderr
    for one, other in zip(lines(found.stdout), lines(wanted.stdout), strict=True):
        assert one.keys() == other.keys()
        assert (one["id"], one["verdict"]) == (other["id"], other["verdict"])
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)
        assert [s["text"] for s in one["spans"]] == [s["text"] for s in other["spans"]]
    assert found.stderr.splitlines()[-2:] == wanted.stderr.splitlines()[-2:]

    # A file and a page, resumed by the same settings alone.
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    assert run(*scored, "-o", out, "--html", page).exit_code == 0
    assert lines(out.read_text()) == lines(found.stdout)
    assert "jaxhal score: in.jsonl" in page.read_text()

    # A bad row is its own error, and what cannot be is one line.
    source.write_text(source.read_text() + json.dumps(rows[0] | {"id": "gone"}) + "\n")
    bad = run(*scored)
    assert bad.exit_code == 1
    assert "line 6: " in lines(bad.stdout)[-1]["error"]
    assert lines(bad.stdout)[:-1] == lines(found.stdout)
    wrong = run(*scored, "-d", "mtop_div")
    assert wrong.exit_code == 2 and "'mtop_div' looks at attention" in wrong.stderr
    wrong = run(*scored, "--layers", "two")
    assert wrong.exit_code == 2 and "--layers 'two' are no numbers" in wrong.stderr
    wrong = run(*scored, "--layers", "1,2")
    assert wrong.exit_code == 1 and "holds 4 states" in lines(wrong.stdout)[0]["error"]
    state = by_transformers / f"{EXAMPLES[0].id}.safetensors"
    wrong = run(*scored, "-o", state)
    assert wrong.exit_code == 2 and "is the file of --states" in wrong.stderr


def test_controls_of_a_folder_may_find_nothing(
    tmp_path, folder, saved, by_transformers
):
    """A fit always has them beside its detectors."""
    place = shutil.copytree(saved, tmp_path / "mine")
    control = dataclasses.replace(
        untrained(build("max_prompt_attention")),
        threshold=0.5,
        calibration=Platt(1.0, 0.0),
    )
    save_detector(place / "control", control, "max_prompt_attention", {"model": "tiny"})
    source = tmp_path / "in.jsonl"
    rows = [
        {"id": e.id, "context": e.context, "question": e.question, "answer": e.response}
        for e in EXAMPLES
    ]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    scored = ["score", "-i", source, "-m", folder, "--states", by_transformers, "-d"]
    found, alone = run(*scored, place), run(*scored, saved)
    assert found.exit_code == 0 and found.stdout == alone.stdout
    assert "max_prompt_attention is left out: it looks at what" in found.stderr
    # What was asked for itself is not.
    with pytest.raises(ValueError, match="'max_prompt_attention' looks at attention"):
        reader_for(folder, by_transformers, [control])
    # Results may stand beside detectors, but not in their place.
    for result, code in (("mine/out.jsonl", 0), ("mine/control/card.json", 2)):
        assert run(*scored, place, "-o", tmp_path / result).exit_code == code
        assert run(*scored, place, "-o", tmp_path / result).exit_code == code


def test_states_that_were_written_again_are_others(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"one")
    before = exported._stamp(tmp_path)
    assert exported._stamp(tmp_path) == before
    os.utime(tmp_path / "a.safetensors", ns=(0, 0))
    assert exported._stamp(tmp_path) != before
    before = exported._stamp(tmp_path)
    (tmp_path / "out.jsonl.partial").write_text("{}")  # of the command itself
    assert exported._stamp(tmp_path) == before
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "1.safetensors").write_bytes(b"1")
    assert exported._stamp(tmp_path) != before


def test_the_base_rate_is_corrected_as_detect_does(
    tmp_path, folder, lm, probe, by_transformers
):
    """Those of the calibration were half of them hallucinated, these seem to be few."""
    many = np.arange(2000)
    half = CalibrationSet(np.zeros(len(many), np.float32), many % 2, many)
    sure = {"calibration": Platt(0.01, -3.0), "calibrated_on": half, "layers": DEPTH}
    one = dataclasses.replace(probe, **sure)
    place = tmp_path / "mine" / "token_probe"
    save_detector(place, one, {"token_probe": {"layer": 2}}, {"model": "tiny"})
    many = [
        dataclasses.replace(e, id=f"{e.id} {n}", source=f"{e.id} {n}")
        for n in range(5)
        for e in EXAMPLES
    ]
    rows = [
        {"id": e.id, "context": e.context, "question": e.question, "answer": e.response}
        | {"states": f"{e.id.rpartition(' ')[0]}.safetensors", "source": e.source}
        for e in many
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = ["-i", source, "-m", folder, "-d", tmp_path / "mine"]
    common += ["--all", "--adapt"]
    found = run("score", *common, "--states", by_transformers)
    assert found.exit_code == 0, found.stderr
    wanted = jaxhal.score(lm, many, [one], adapt=True)
    plain = jaxhal.score(lm, many, [one])
    for row, want, bare in zip(lines(found.stdout), wanted, plain, strict=True):
        known = want.probabilities["token_probe"]
        assert row["probabilities"]["token_probe"] == pytest.approx(known, abs=1e-4)
        assert known < 0.5 * bare.probabilities["token_probe"]
    few = [
        dataclasses.replace(e, states=r["states"])
        for e, r in zip(many, rows, strict=True)
    ]
    again = jaxhal.score_states(folder, few, by_transformers, [one], adapt=True)
    assert [r.probabilities for r in again] == [
        row["probabilities"] for row in lines(found.stdout)
    ]
    with pytest.raises(ValueError, match="19 of them could be read; give 20 or more"):
        jaxhal.score_states(folder, few[:19], by_transformers, [one], adapt=True)


def test_the_command_takes_log_probabilities_alone(tmp_path, folder, lm):
    row = {"id": "a", "prompt": "Why?", "response": "So it is."}
    example = Example("So it is.", prompt="Why?")
    row["logprobs"] = said(lm, example, "chat")
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    found = run("score", "-i", tmp_path / "in.jsonl", "-m", folder, "--all")
    assert found.exit_code == 0, found.stderr
    (made,) = lines(found.stdout)
    (wanted,) = jaxhal.score(lm, [example], ["predictive_probability"])
    one = {name: made["scores"][name] for name in wanted.scores}
    assert one == pytest.approx(wanted.scores, abs=1e-4)


def test_an_outline_has_no_weights_and_the_name_of_its_model(folder, lm):
    found = outline(folder)
    assert (found.config, found.name) == (lm.config, lm.name)
    assert all(
        isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(found.params)
    )
    assert tiny_lm().name in repr(tiny_lm()) and found.name in repr(found)
