"""Responses in text: prompts of all lengths, stop strings, samples, streaming."""

import jax
import numpy as np
import pytest

import jaxhal
from jaxhal.capture.forward import read_jit
from jaxhal.generation import GREEDY, Sampling, decoding, requests, stops
from jaxhal.lrp.programs import matrix
from jaxhal.models.lm import forward
from jaxhal.types import Example
from tiny_lm import tiny_lm

PROMPTS = ["Which?", "A much longer question, with many words.", "No"]
KEY = jax.random.key(5)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def written(lm):
    return jaxhal.generate(lm, PROMPTS, n=3, max_new_tokens=40, key=KEY)


def same(ours, theirs):
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert (ours.text, ours.stopped) == (theirs.text, theirs.stopped)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_shape_and_text(lm, written):
    assert [len(samples) for samples in written] == [3, 3, 3]
    for sample in sum(written, []):
        assert len(sample.tokens) == len(sample.logprobs) <= 40
        ended = sample.tokens[-1] == lm.tokenizer.eos_id
        assert sample.stopped == ("eos" if ended else "length")
        assert (sample.logprobs < 0).all()
        assert sample.text == lm.tokenizer.decode(sample.tokens, skip_special=True)
    assert len({sample.text for sample in sum(written, [])}) == 9


@pytest.mark.parametrize("batch_size", [1, 7])
def test_samples_do_not_depend_on_their_batch(lm, written, batch_size):
    again = jaxhal.generate(
        lm, PROMPTS, n=3, max_new_tokens=40, key=KEY, batch_size=batch_size
    )
    for ours, theirs in zip(sum(again, []), sum(written, []), strict=True):
        same(ours, theirs)


def test_a_sample_does_not_depend_on_how_many_there_are(lm, written):
    again = jaxhal.generate(lm, PROMPTS, max_new_tokens=40, key=KEY)
    for (ours,), theirs in zip(again, written, strict=True):
        same(ours, theirs[0])


def test_limits_of_their_own(lm, written):
    again = jaxhal.generate(lm, PROMPTS, n=3, max_new_tokens=[5, 40, 1], key=KEY)
    for samples, limit, whole in zip(again, [5, 40, 1], written, strict=True):
        for ours, theirs in zip(samples, whole, strict=True):
            assert ours.tokens.tolist() == theirs.tokens[:limit].tolist()


@pytest.mark.parametrize(
    ("prompts", "options", "rows"),
    [(1, {}, [1]), (1, {"n": 9}, [9]), (3, {"n": 9}, [27]), (5, {"n": 9}, [27] * 2)],
)
def test_few_rows_are_decoded_for_nothing(lm, monkeypatch, prompts, options, rows):
    seen, real = [], decoding.start

    def start(lm, batch, limit, *args, **more):
        seen.append(len(limit))
        return real(lm, batch, limit, *args, **more)

    monkeypatch.setattr(decoding, "start", start)
    jaxhal.generate(lm, ["Hi"] * prompts, max_new_tokens=2, key=KEY, **options)
    assert seen == rows


@pytest.mark.parametrize("limits", [np.int64(7), np.array([7, 3])])
def test_limits_of_arrays(lm, limits):
    want = [7, 7] if limits.ndim == 0 else [7, 3]
    found = jaxhal.generate(lm, ["Hi", "Yes"], max_new_tokens=limits, key=KEY)
    again = jaxhal.generate(lm, ["Hi", "Yes"], max_new_tokens=want, key=KEY)
    for (ours,), (theirs,) in zip(found, again, strict=True):
        same(ours, theirs)


def test_a_limit_is_of_one_prompt_alone():
    """Where rope stretches with the length that is reached as well."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    lm = tiny_lm(rope_scaling=rope, max_position_embeddings=64)
    first, _ = jaxhal.generate(lm, ["Hi", "Yes"], max_new_tokens=[12, 12], key=KEY)
    again, _ = jaxhal.generate(lm, ["Hi", "Yes"], max_new_tokens=[12, 90], key=KEY)
    same(first[0], again[0])


def test_eos_ends_a_row_and_belongs_to_it(lm):
    likely = lm.params
    head = likely["lm_head"]["kernel"].get_value()
    eos = lm.tokenizer.eos_id
    bias = head.at[:, eos].set(head[:, eos] + head.mean(1) * 40)
    likely["lm_head"]["kernel"].set_value(bias)
    try:
        found = sum(jaxhal.generate(lm, PROMPTS, n=8, max_new_tokens=60, key=KEY), [])
    finally:
        likely["lm_head"]["kernel"].set_value(head)
    ended = [one for one in found if one.stopped == "eos"]
    assert ended
    for one in ended:
        assert one.tokens[-1] == eos and eos not in one.tokens[:-1]
    for one in found:
        assert one.stopped == "eos" or len(one.tokens) == 60


def test_a_stop_string_is_the_one_that_is_whole_first():
    """Else what follows would decide, and a stream cannot know it."""
    for stop in (("c", "bcd"), ("bcd", "c")):
        assert stops.first("abcd", stop) == stops.first("abc", stop) == 2
    assert stops.first("abcd", ("cd", "bcd")) == 1  # whole at once: the longer one
    assert stops.first("abcd", ("x",)) is None


def test_stop_strings(lm, written):
    whole = written[1][0].text
    stop = whole[18:20]
    cut = whole.index(stop)
    found = jaxhal.generate(
        lm, PROMPTS, n=3, max_new_tokens=40, key=KEY, stop=[stop, "never in it"]
    )
    ours = found[1][0]
    assert (ours.text, ours.stopped) == (whole[:cut], "stop")
    covered = lm.tokenizer.decode(ours.tokens, skip_special=True)
    assert covered.startswith(whole[:cut])
    assert len(ours.tokens) == len(ours.logprobs)
    shorter = lm.tokenizer.decode(ours.tokens[:-1], skip_special=True)
    assert len(shorter) < cut
    for samples, others in zip(found, written, strict=True):
        for one, other in zip(samples, others, strict=True):
            if stop not in other.text:
                same(one, other)


@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [("Café. Yes", ".", "Café"), ("ok 😀 END now", " END", "ok 😀"), ("ab", "b", "a")],
)
def test_tokens_before_a_stop_string_hold_whole_characters(lm, said, stop, kept):
    ids = np.array(lm.tokenizer.encode(said))
    text, tokens, why = stops.cut(lm.tokenizer, (stop,), ids)
    assert (text, why) == (kept, "stop")
    assert lm.tokenizer.decode(tokens, skip_special=True).startswith(kept)
    shorter = lm.tokenizer.decode(tokens[:-1], skip_special=True)
    assert not shorter.startswith(kept)


def test_rows_of_one_batch_end_each_in_its_own_way(lm, written):
    stop = written[1][0].text[18:20]
    limits = [3, 40, 40]
    eos = lm.tokenizer.eos_id
    head = lm.params["lm_head"]["kernel"]
    before = head.get_value()
    head.set_value(before.at[:, eos].set(before[:, eos] + before.mean(1) * 4))
    try:
        found = jaxhal.generate(
            lm, PROMPTS, n=8, max_new_tokens=limits, key=KEY, stop=[stop]
        )
    finally:
        head.set_value(before)
    for samples, limit in zip(found, limits, strict=True):
        for one in samples:
            assert len(one.tokens) <= limit and stop not in one.text
            assert (one.stopped == "eos") == (one.tokens[-1:].tolist() == [eos])
            assert one.stopped != "length" or len(one.tokens) == limit
    assert {one.stopped for one in sum(found, [])} == {"eos", "length", "stop"}


def test_an_empty_response(lm, written):
    first = written[0][0].text[:1]
    (one,) = jaxhal.generate(lm, PROMPTS[:1], max_new_tokens=40, key=KEY, stop=[first])[
        0
    ]
    assert (one.text, one.stopped, len(one.tokens)) == ("", "stop", 0)


REDUCERS = {"lookback": jaxhal.LookbackRatio(), "entropy": jaxhal.TokenEntropy()}


@pytest.mark.parametrize(
    "reducers",
    [{}, REDUCERS, {"states": jaxhal.HiddenStates(layers=(1,))}],
)
@pytest.mark.parametrize("stop", [(), ("7", "e", "zz")])
def test_streaming_equals_generating(lm, reducers, stop):
    options = dict(max_new_tokens=30, key=KEY, stop=stop, reducers=reducers)
    example = Example("?", context="Much text, and a fact.", question="What fact?")
    ((want,),) = jaxhal.generate(lm, [example], **options)
    tokens = list(jaxhal.stream(lm, example, **options))
    assert "".join(token.text for token in tokens) == want.text
    ids = [token.id for token in tokens]
    assert ids[: len(want.tokens)] == want.tokens.tolist()
    for at, token in enumerate(tokens[: len(want.tokens)]):
        assert token.logprob == pytest.approx(want.logprobs[at], abs=1e-4)
        for name, reducer in reducers.items():
            axis = {"probs": 2, "hidden": 1, "logits": 0}[reducer.reads]
            whole = np.take(want.features[name], at, axis)
            np.testing.assert_allclose(token.features[name], whole, atol=1e-4)


def test_streamed_text_is_never_taken_back(lm):
    text = ""
    for token in jaxhal.stream(lm, "Letters beyond ASCII", max_new_tokens=60, key=KEY):
        text += token.text
    ((want,),) = jaxhal.generate(
        lm, ["Letters beyond ASCII"], max_new_tokens=60, key=KEY
    )
    assert text == want.text and "\N{REPLACEMENT CHARACTER}" in text


def test_greedy_needs_no_key(lm):
    first, again = (
        jaxhal.generate(lm, ["Hi"], max_new_tokens=5, sampling=GREEDY)[0][0]
        for _ in range(2)
    )
    same(first, again)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(prompts=[]), r"prompts is \[\]; give a list with at least one"),
        (dict(prompts="one text"), "prompts is 'one text'; give a list"),
        (dict(prompts=["fine", " "]), "prompt 1 is ' '; it must hold text"),
        (dict(n=0), "n is 0; it must be at least 1"),
        (dict(batch_size=0), "batch_size is 0"),
        (dict(max_new_tokens=0), "max_new_tokens is 0; it must be at least 1"),
        (
            dict(max_new_tokens=np.array([2.5])),
            "is 2.5; it must be at least 1, a",
        ),
        (dict(max_new_tokens=[1, 2]), "holds 2 numbers for 1 prompts"),
        (dict(max_new_tokens=509), "prompt 0 has 5 tokens, and with 509 new ones"),
        (dict(key=None), "sampling needs a key"),
        (dict(stop=["a", ""]), "stop is .*; give a list of strings that hold text"),
        (dict(stop="ab"), "stop is 'ab'; give a list"),
        (dict(stop=["a", "</s>"]), "stop has '</s>', a special token"),
        (dict(reducers={"x": jaxhal.MTopDiv()}), "'x' needs all response rows"),
        (dict(clip=(np.zeros(3), np.ones(3))), r"low \(3,\) and high \(3,\)"),
    ],
)
def test_bad_requests(lm, wrong, message):
    options = dict(prompts=["Hello"], max_new_tokens=4, key=KEY) | wrong
    with pytest.raises(ValueError, match=message):
        jaxhal.generate(lm, options.pop("prompts"), **options)


def test_a_key_of_old():
    with pytest.raises(ValueError, match="key is an array of uint32.*jax.random.key"):
        requests.prompt_keys(Sampling(), jax.random.PRNGKey(0), 2)


def test_a_reducer_that_needs_the_next_token_too_early(lm):
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Ahead(jaxhal.Reducer):
        reads_target = True

        def rows(self, rows, view):
            return rows[:, 0] * view.target

    with pytest.raises(ValueError, match="'x' reads 'probs' and the token that follow"):
        jaxhal.generate(lm, ["Hi"], key=KEY, reducers={"x": Ahead()})


def test_stop_tokens_of_a_checkpoint(lm, tmp_path):
    import json

    from jaxhal.models.tokenizer import Tokenizer

    lm.tokenizer.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).stop_ids == (1,)
    config = tmp_path / "generation_config.json"
    for value, want in ((7, (7,)), ([1, 9], (1, 9)), (None, (1,))):
        config.write_text(json.dumps({"eos_token_id": value}))
        assert Tokenizer.from_folder(tmp_path).stop_ids == want
    config.write_text("[1]")
    with pytest.raises(ValueError, match="give a JSON object"):
        Tokenizer.from_folder(tmp_path)


def test_the_warmest_sampling_still_writes(lm):
    found = jaxhal.generate(
        lm, ["Hi"], n=2, max_new_tokens=9, sampling=Sampling(temperature=50.0), key=KEY
    )
    assert all(np.isfinite(one.logprobs).all() for one in found[0])


def test_models_of_one_shape_share_what_is_compiled():
    """Whatever they are called, each with a tokenizer of its own."""
    found = []
    for seed in range(2):
        lm = tiny_lm(seed)
        batch = lm.encode([Example(prompt="Why?", response="So.")])
        jaxhal.read(lm, batch, {"it": jaxhal.MTopDiv()})
        jaxhal.relevance(lm, batch)
        jaxhal.generate(lm, ["Why?"], max_new_tokens=4, sampling=GREEDY)
        lm.forward(batch.tokens)
        programs = (read_jit, matrix, decoding.start, decoding.go_on, forward)
        found.append([program._cache_size() for program in programs])
    assert found[0] == found[1]
    assert min(found[0]) >= 1
