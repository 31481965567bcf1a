"""Samples of the reader's own answers, and the detectors that look at them."""

import copy
import dataclasses
import functools
import re
import types

import jax
import numpy as np
import pytest
from test_consistency import SAMPLES, SENTENCES
from test_encoding import write

import jaxhal
import sampling_oracles as oracles
from chat_server import serving
from jaxhal import detectors
from jaxhal.detectors.eigenscore import Embedded
from jaxhal.detectors.selfcheck import SUPPORT, SentenceSupport
from jaxhal.detectors.semantic_entropy import Likelihood, Meanings
from jaxhal.detectors.settings import draw_of
from jaxhal.experiments.answers import reports
from jaxhal.features import consistency, eigenscore
from jaxhal.generation import Sampling
from jaxhal.io.files import lines_of
from jaxhal.llm.endpoint import Endpoint
from jaxhal.llm.entailment import EndpointInference
from jaxhal.models.encoders import encoding
from jaxhal.models.lm import hidden_states
from jaxhal.reading import samples
from jaxhal.reading.bulk import Bulk
from jaxhal.reading.extract import extract
from jaxhal.reading.samples import Draw, Sample, draw
from jaxhal.reading.store import Store
from jaxhal.scoring.fitting import untrained
from jaxhal.scoring.inputs import collect, prepare
from jaxhal.texts import sentences
from jaxhal.types import Example
from tiny_lm import answers, tiny_lm

HOW = Draw(n=3, max_new_tokens=12)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def drawn(lm):
    return draw(lm, answers(6), HOW)


def test_samples_that_end_otherwise_are_others(lm):
    tokens = copy.copy(lm.require_tokenizer())
    tokens.stop_ids = (*tokens.stop_ids, 7)
    other = dataclasses.replace(lm, tokenizer=tokens)
    names = {samples._name(one, HOW, None) for one in (lm, other, lm)}
    assert len(names) == 2


@dataclasses.dataclass(frozen=True)
class FirstLetter:
    """Texts entail each other when their first letters' halves of the table agree."""

    name: str = "first letters"

    def low(self, text):
        # Some presets put the question before the answer.
        return ord(text.removeprefix("What is inside? ")[0]) < 200

    def __call__(self, pairs):
        same = np.array([self.low(a) == self.low(b) for a, b in pairs])
        return np.stack([~same, np.zeros_like(same), same], 1).astype(float)


def test_samples_are_generated_ones(lm, drawn):
    assert [len(some) for some in drawn] == [3] * 6
    # Two answers to one prompt share its samples.
    assert drawn[0] == drawn[1] and drawn[0] != drawn[2]
    for some in drawn:
        for sample in some:
            assert 1 <= sample.tokens <= 12 and sample.logprob < 0


def test_samples_follow_from_the_prompt_alone(lm, drawn):
    backwards = draw(lm, answers(6)[::-1][:3], HOW, batch_size=1)
    for ours, theirs in zip(backwards, drawn[::-1][:3], strict=True):
        assert [one.text for one in ours] == [one.text for one in theirs]
        np.testing.assert_allclose(
            [one.logprob for one in ours], [one.logprob for one in theirs], atol=1e-4
        )
    other = draw(lm, answers(2), dataclasses.replace(HOW, seed=1))
    assert other[0] != drawn[0]


def test_samples_are_kept_and_a_run_goes_on(lm, drawn, tmp_path, monkeypatch):
    half = draw(lm, answers(2), HOW, tmp_path)
    asked = []
    real = samples.generate

    def counting(lm, prompts, **options):
        asked.extend(prompts)
        return real(lm, prompts, **options)

    monkeypatch.setattr(samples, "generate", counting)
    found = draw(lm, answers(6), HOW, tmp_path)
    assert found[:2] == half and len(asked) == 2
    assert [[one.text for one in some] for some in found] == [
        [one.text for one in some] for some in drawn
    ]
    assert draw(lm, answers(6), HOW, tmp_path) == found and len(asked) == 2
    (path,) = (tmp_path / "samples").glob("*.jsonl")
    _, held = lines_of(path)[0]
    assert Sample(*held[0]) in sum(found, [])
    path.write_text("[1\n")
    with pytest.raises(ValueError, match="line 1: not JSON .* delete it"):
        draw(lm, answers(6), HOW, tmp_path)
    path.write_text('["key", 3]\n')
    with pytest.raises(ValueError, match="holds no samples .* delete it to draw"):
        draw(lm, answers(6), HOW, tmp_path)


def test_what_is_prepared_is_neither_drawn_nor_read_again(lm, tmp_path):
    """And to prepare it nobody is asked."""
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Asked(FirstLetter):
        def __call__(self, pairs):
            asked.append(len(pairs))
            return super().__call__(pairs)

    options = {"draw": {"n": 3, "max_new_tokens": 12}}
    chosen = [
        detectors.build({"semantic_entropy": {**options, "entailment": Asked()}}),
        detectors.build({"selfcheck_nli": {**options, "entailment": Asked()}}),
        detectors.build({"eigenscore": options}),
        detectors.build("context_gain"),
    ]
    labelled = [dataclasses.replace(e, label=n % 2) for n, e in enumerate(answers(6))]
    store = Store(tmp_path)
    prepare(lm, labelled, chosen, store)
    assert not asked
    assert store.share.done["prompts sampled"] == 3
    assert store.share.done["answers read"] > 12
    done = store.share.done.copy()
    collect(lm, labelled, chosen, store)
    assert asked and store.share.done == done


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(n=0), "n is 0; give at least 1"),
        (dict(max_new_tokens=0), "max_new_tokens is 0; give at least 1"),
        (dict(sampling=Sampling(temperature=0.0)), "all samples would be equal"),
        (dict(clip=0.5), "clip is 0.5; give a share"),
        (dict(seed=-1), "seed is -1; give at least 0"),
        (dict(seed=2**32), "seed is 4294967296; give a whole number below"),
    ],
)
def test_wrong_draws(wrong, message):
    with pytest.raises(ValueError, match=message):
        Draw(**wrong)


def test_a_draw_counts_in_whole_numbers():
    """Types are checked in tests alone, and before this is."""
    for n in (2.5, "3"):
        given = types.SimpleNamespace(n=n, max_new_tokens=4, seed=0)
        with pytest.raises(ValueError, match=f"n is {n!r}; give a whole number"):
            Draw.__post_init__(given)


def test_clipped_samples(lm, drawn, tmp_path, monkeypatch):
    """Bounds are quantiles of the answers' own states; other answers, other samples."""
    batch = lm.encode(answers(6))
    states = jax.jit(lambda lm, *of: hidden_states(lm, *of)[1])
    hidden = np.asarray(states(lm.bare, batch.tokens, batch.valid))
    own = hidden[:, batch.prompt_length :][np.asarray(batch.response_mask)]
    want = np.quantile(own, [0.2, 0.8], axis=0)
    passed, real = [], samples.generate

    def spying(lm, prompts, **options):
        passed.append(options["clip"])
        return real(lm, prompts, **options)

    monkeypatch.setattr(samples, "generate", spying)
    clipped = dataclasses.replace(HOW, clip=0.2)
    first = draw(lm, answers(6), clipped, tmp_path)
    np.testing.assert_allclose(passed[0], want, atol=1e-4)
    assert first != drawn
    assert draw(lm, answers(6), clipped, tmp_path) == first and len(passed) == 1
    draw(lm, answers(2), clipped, tmp_path)
    assert len(passed) == 2  # other bounds
    assert len(list((tmp_path / "samples").glob("*.jsonl"))) == 2


def test_published_draws():
    """How many samples of how many tokens, at which temperature (top_p, top_k)."""

    def of(make, **options):
        how = make(draw={"published": True}, **options).measures[0].draw
        chance = how.sampling
        more = (chance.top_p, chance.top_k) if chance.top_p else ()
        return how.n, how.max_new_tokens, chance.temperature, *more

    semantic, eigen = detectors.semantic_entropy, detectors.eigenscore
    assert of(semantic, preset="nature") == of(semantic, preset="discrete")
    assert of(semantic, preset="nature")[::2] == (10, 1.0)
    assert of(semantic, preset="iclr")[::2] == (10, 0.5)
    assert of(semantic, preset="toha") == (20, 256, 1.0)
    assert of(eigen) == (10, 256, 0.5, 0.99, 10)
    assert of(eigen, preset="toha")[::2] == (20, 1.0)
    assert of(detectors.selfcheck_ngram)[::2] == (20, 1.0)


def test_settings_of_a_draw():
    published = Draw(n=20, sampling=Sampling(temperature=0.5, top_p=0.9))
    assert draw_of(None, published) == Draw()
    assert str(Draw()) == "10 samples (up to 64 tokens, temperature 1)"
    said = "20 samples (up to 64 tokens, temperature 0.5, top p 0.9)"
    assert str(published) == said
    assert str(Draw(n=2, given=True)) == "2 samples that come with the answer"
    assert draw_of({"published": True}, published) == published
    mixed = draw_of({"published": True, "n": 4, "top_k": 7}, published)
    assert mixed.n == 4
    assert mixed.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=7)
    with pytest.raises(
        ValueError, match="draw has no heat; it knows clip, given, max_new_tokens"
    ):
        draw_of({"heat": 2}, published)


def test_equal_settings_give_one_detector():
    first = detectors.build({"semantic_entropy": {"draw": {"n": 4, "seed": 1}}})
    again = detectors.build({"semantic_entropy": {"draw": {"seed": 1, "n": 4}}})
    assert first is again is not detectors.build("semantic_entropy")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"token_probe": 5}, "detector 'token_probe': options are 5; give {option: "),
        ({"ensemble": ["toha"]}, "detector 'ensemble': options are ['toha']; give {"),
        ({"ensemble": {"members": 5}}, "ensemble: members is 5; give a list"),
        ({"ensemble": {"members": "toha"}}, "ensemble: members is toha; give a list"),
    ],
)
def test_options_that_are_none(spec, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        detectors.build(spec)


def test_meanings_and_entropy(lm, drawn):
    examples = answers(6)
    one = detectors.semantic_entropy("discrete", FirstLetter(), draw=HOW)
    (score,) = scored(lm, examples, [one]).values()
    for some, got in zip(drawn, score, strict=True):
        texts = [sample.text.strip() for sample in some]
        low = [ord(text[0]) < 200 for text in texts if text]
        counts = np.array([sum(low), len(low) - sum(low)])
        share = counts[counts > 0] / counts.sum()
        assert got == pytest.approx(-(share * np.log(share)).sum(), abs=1e-5)


def test_likelihoods(lm, drawn):
    bulk = Bulk(lm, answers(6))
    mean = Likelihood(HOW, per_token=True)(bulk)
    total = Likelihood(HOW, per_token=False)(bulk)
    want = [[s.logprob for s in some] for some in drawn]
    np.testing.assert_allclose(mean, want, atol=1e-4)
    counts = np.array([[s.tokens for s in some] for some in drawn])
    np.testing.assert_allclose(total, mean * counts, rtol=1e-5)
    found = scored(
        lm,
        answers(6),
        [
            detectors.predictive_entropy(draw=HOW),
            detectors.length_normalized_entropy(draw=HOW),
        ],
    )
    np.testing.assert_allclose(found["predictive_entropy"], -total.mean(1), rtol=1e-4)
    np.testing.assert_allclose(
        found["length_normalized_entropy"], -mean.mean(1), rtol=1e-4
    )


def test_what_decided_is_in_the_result(lm, tmp_path):
    one = detectors.semantic_entropy("discrete", FirstLetter(), draw=HOW)
    (found,) = jaxhal.score(lm, answers(1), [one, detectors.token_entropy()])
    assert found.helpers == {"semantic_entropy": "first letters"}
    assert found.to_dict(every=True)["helpers"] == found.helpers
    assert detectors.selfcheck_nli().by == "similarity of embeddings (all-minilm-l6-v2)"
    assert detectors.selfcheck_prompt().by == "the reader asked yes or no"
    assert "(all-minilm-l6-v2)" in detectors.selfcheck_bertscore().by
    there = detectors.detection_prompt(endpoint="http://h/v1", model="m")
    assert there.by == "m at http://h/v1" and not detectors.detection_prompt().by


def test_settings_however_they_are_given():
    one = detectors.semantic_entropy("nature", "similarity", {"n": 3})
    same = detectors.semantic_entropy(draw={"n": 3}, entailment="similarity")
    assert one is same and detectors.eigenscore() is detectors.eigenscore(draw=None)

    @dataclasses.dataclass
    class Unfrozen:
        name: str = "mine"

        def __call__(self, pairs): ...

    with pytest.raises(TypeError, match="has no hash; give a frozen dataclass"):
        detectors.semantic_entropy(entailment=Unfrozen())


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("preset", ["official", "toha"])
def test_eigenscore_reads_the_samples(lm, drawn, preset, stored, tmp_path):
    examples = answers(4)
    store = Store(tmp_path) if stored else None
    tokens = "before_last" if preset == "official" else "last"
    found = Embedded(HOW, tokens)(Bulk(lm, examples, store))
    for row, (example, some) in enumerate(zip(examples, drawn, strict=False)):
        for at, sample in enumerate(some):
            assert found["valid"][row, at] == bool(sample.text.strip())
            if not sample.text.strip():
                continue
            asked = dataclasses.replace(
                example, response=sample.text, label=None, labels=None
            )
            batch = lm.encode([asked])
            states = jaxhal.read(lm, batch, {"x": jaxhal.HiddenStates(layers=(1,))})
            last = int(batch.response_mask.sum()) - (2 if preset == "official" else 1)
            np.testing.assert_allclose(
                found["values"][row, at], states["x"][0, 0, last], atol=1e-4
            )
    one = detectors.eigenscore(preset, draw=HOW)
    (score,) = scored(lm, examples, [one]).values()
    for row, got in enumerate(score):
        want = eigenscore.eigenscore(
            found["values"][row], found["valid"][row], preset=preset
        )
        assert got == pytest.approx(float(want), rel=1e-3)


def test_eigenscore_of_ones_own_form(lm):
    examples = answers(4)
    form = {"alpha": 0.3, "base": 2.0, "per_feature": False, "tokens": "mean"}
    found = Embedded(HOW, "mean")(Bulk(lm, examples))
    one = detectors.eigenscore(draw=HOW, **form)
    (score,) = scored(lm, examples, [one]).values()
    for row, got in enumerate(score):
        texts = found["values"][row][found["valid"][row]]
        want = oracles.eigenscore(texts, 0.3, 2.0, False)
        assert got == pytest.approx(want, rel=1e-3)
    with pytest.raises(ValueError, match="alpha is 0.0; give a positive"):
        detectors.eigenscore(alpha=0.0)


def test_sentences_against_samples(lm, drawn):
    examples = [
        dataclasses.replace(one, response=f"{one.response} Ünique. {one.response}")
        for one in answers(4)
    ]
    backend = FirstLetter()
    found = SentenceSupport(backend, HOW, "published")(Bulk(lm, examples))
    assert found["valid"].sum(1).tolist() == [3, 3, 3, 3]
    for row, some in enumerate(drawn[:4]):
        heard = [s.text.strip() for s in some if s.text.strip()]
        # The middle sentence begins with a letter of the other half.
        low = np.mean([ord(text[0]) < 200 for text in heard])
        np.testing.assert_allclose(
            found["values"][row], [1 - low, low, 1 - low], atol=1e-6
        )
    mean, worst = (
        detectors.selfcheck_nli(backend, draw=HOW, how=how, name=how)
        for how in ("mean", "max")
    )
    score = scored(lm, examples, [mean, worst])
    np.testing.assert_allclose(score["mean"], found["values"].mean(1), atol=1e-5)
    np.testing.assert_allclose(score["max"], found["values"].max(1), atol=1e-5)


def test_a_context_supports_without_samples(lm, monkeypatch):
    def never(*_, **__):
        raise AssertionError("sampled")

    monkeypatch.setattr(samples, "generate", never)
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Seen:
        name: str = "seen"

        def __call__(self, pairs):
            asked.extend(pairs)
            return np.tile([0.02, 0.93, 0.05], (len(pairs), 1))

    example = Example("One. Two.", context="A fact.", question="Which?")
    (found,) = jaxhal.score(
        lm, [example], [untrained(detectors.nli_context(Seen()))], progress=False
    )
    # What the source leaves open counts as not supported.
    assert found.scores["nli_context"] == pytest.approx(0.95)
    assert asked == [("A fact.", "One."), ("A fact.", "Two.")]


def test_words_that_no_sample_says_surprise(lm, drawn):
    found = scored(lm, answers(4), [detectors.selfcheck_ngram(draw=HOW)])
    assert (found["selfcheck_ngram"] > 0).all()


@pytest.mark.parametrize(("over", "want"), [("mean", 3.218679), ("max", 4.025404)])
def test_the_published_example_of_words_that_surprise(lm, over, want):
    example = Example(" ".join(SENTENCES), prompt="Who is he?", samples=tuple(SAMPLES))
    given = {"given": True, "n": 3}
    one = detectors.selfcheck_ngram(over=over, draw=given)
    (found,) = jaxhal.score(lm, [example], [untrained(one)], progress=False)
    assert found.scores["selfcheck_ngram"] == pytest.approx(want, abs=1e-5)


def test_distance_from_the_nearest_sentences(lm, tmp_path, monkeypatch):
    folder = str(write(tmp_path))
    said = [["W1 w2 w3 w4 w5.", "W9 w8 w7 w6."], ["W3 w4 w5."], ["W1."]]
    heard = [
        ["W1 w2 w3 w4. W5 w6 w7.", "W7 w8.", "W9 w9 w1 w2. W3 w4 w8 w5."],
        ["W3 w4.", "W5.", "  "],  # none is longer than three tokens
        ["", " ", "\n"],
    ]
    near = [
        [["W1 w2 w3 w4.", "W5 w6 w7."], ["W9 w9 w1 w2.", "W3 w4 w8 w5."]],
        [["W3 w4."], ["W5."]],
        [],
    ]
    drawn = [[Sample(text, -1.0, 1) for text in some] for some in heard]
    monkeypatch.setattr("jaxhal.reading.bulk.draw", lambda *_, **__: drawn)
    examples = [
        dataclasses.replace(one, response=" ".join(some), label=None)
        for one, some in zip(answers(3), said, strict=True)
    ]
    encoder = encoding.load_encoder(folder)

    def f1(*pair):
        states = encoding.token_states(encoder, list(pair), layer=2)
        return oracles.bertscore(*(each.astype(float) for each in states))[2]

    want = [
        [
            1 - np.mean([max(f1(one, s) for s in each) for each in samples])
            for one in some
        ]
        for some, samples in zip(said[:2], near, strict=False)
    ]
    make = functools.partial(detectors.selfcheck_bertscore, folder, 2, draw=HOW)
    mean, worst = make(), make(how="max", name="worst")
    rescaled = make(baseline=0.75, name="rescaled")
    assert f"layer 2 of {folder}" in mean.summary
    score = scored(lm, examples, [mean, worst, rescaled])
    means, most = ([how(row) for row in want] for how in (np.mean, np.max))
    assert min(means) > 0.01 and np.ptp(want[0]) > 0.01
    np.testing.assert_allclose(score[mean.name], [*means, 0.5], atol=1e-5)
    np.testing.assert_allclose(score["worst"], [*most, 0.5], atol=1e-5)
    want = [*(4 * score for score in means), 0.5]
    np.testing.assert_allclose(score["rescaled"], want, atol=1e-4)


def test_distances_say_what_they_are_by():
    assert "its last layer of all-minilm-l6-v2" in (
        detectors.build("selfcheck_bertscore").summary
    )
    with pytest.raises(ValueError, match="baseline is 1.0; give a number below 1"):
        detectors.selfcheck_bertscore(baseline=1.0)


def test_the_reader_is_asked_about_each_sentence(lm):
    few = Draw(n=2, max_new_tokens=6)
    found = scored(lm, answers(2), [detectors.selfcheck_prompt(draw=few)])
    assert ((found["selfcheck_prompt"] > 0) & (found["selfcheck_prompt"] < 1)).all()


def scored(lm, examples, chosen):
    """Scores by ``jaxhal.score``, made sure to be those of an experiment's inputs."""
    reports = jaxhal.score(
        lm, examples, [untrained(one) for one in chosen], batch_size=4, progress=False
    )
    return {
        one.name: np.array([report.scores[one.name] for report in reports])
        for one in chosen
    }


@pytest.mark.parametrize("how", ["mean", "max"])
def test_an_endpoint_is_asked_about_each_sentence(
    lm, drawn, tmp_path, monkeypatch, how
):
    def reply(question):
        return ("Yes.", "no", "It may be.")[sum(map(ord, question)) % 3]

    examples = [
        dataclasses.replace(one, response=f"{one.response} Ünique.")
        for one in answers(4)
    ]
    with serving(reply, tmp_path, monkeypatch) as server:
        where = {"endpoint": server.url, "model": "m"}
        number = {"n": HOW.n, "max_new_tokens": HOW.max_new_tokens}
        options = {**where, "draw": number, "how": how}
        one = detectors.build({"selfcheck_prompt": options})
        assert f"m at {server.url} asked whether each of 3" in one.summary
        (found,) = scored(lm, examples, [one]).values()
        asked = len(server.asked)
        assert (found == scored(lm, examples, [one])[one.name]).all()
        assert len(server.asked) == asked
    assert len(set(map(reply, server.questions))) == 3
    for example, some, score in zip(examples, drawn[:4], found, strict=True):
        heard = [" ".join(sample.text.split()) for sample in some]
        each = [
            consistency.selfcheck_prompt(
                [
                    reply(SUPPORT.format(premise=text, hypothesis=said))
                    for text in heard
                    if text
                ]
            )
            for said in (example.response.removesuffix(" Ünique."), "Ünique.")
        ]
        assert score == pytest.approx(getattr(np, how)(each), abs=1e-6)


def test_half_an_endpoint():
    with pytest.raises(ValueError, match="model is None; give both, or neither"):
        detectors.selfcheck_prompt("http://h/v1")


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("nli", "{}", "'m' replied '{}', of no use in 3 attempts"),
        ("nli", 503, "gave no answer from 'm' (Error code: 503"),
        ("entropy", "{}", "'m' replied '{}', of no use in 3 attempts"),
        ("prompt", 503, "gave no answer from 'm' (Error code: 503"),
    ],
)
def test_an_endpoint_that_fails_costs_no_other_prompt(
    lm, drawn, tmp_path, monkeypatch, name, bad, error
):
    # A sample of the prompt that answers 2 and 3 share.
    lost = " ".join(drawn[2][0].text.split())

    def reply(question):
        if lost in " ".join(question.split()):
            return bad
        return "Yes" if name == "prompt" else '{"relation": "contradiction"}'

    with serving(reply, tmp_path, monkeypatch) as server:
        judge = EndpointInference(Endpoint(server.url, "m"))
        one = {
            "nli": lambda: detectors.selfcheck_nli(judge, draw=HOW),
            "entropy": lambda: detectors.semantic_entropy("toha", judge, draw=HOW),
            "prompt": lambda: detectors.selfcheck_prompt(server.url, "m", draw=HOW),
        }[name]()
        found = jaxhal.score(lm, answers(6), [untrained(one), "novel_words"])
        for number in (2, 3):
            assert found[number].error.startswith(f"example '{number}': ")
            assert error in found[number].error
            assert found[number].scores == {} and found[number].tokens == []
        others = [report for report in found if report.error is None]
        assert [report.id for report in others] == ["0", "1", "4", "5"]
        want = scored(lm, answers(6)[:2] + answers(6)[4:], [one])[one.name]
        got = [report.scores[one.name] for report in others]
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_tokens_have_the_score_of_their_sentence(lm, tmp_path):
    # Shorter and longer than the bucket of their batch.
    said = ["Hm.", "A b.  Ünd c?\n\nD", "Yes! " * 9 + "No.", "\n\n Ü. E "]
    examples = [
        dataclasses.replace(one, response=text)
        for one, text in zip(answers(4), said, strict=True)
    ]
    chosen = [
        detectors.selfcheck_nli(FirstLetter(), draw=HOW),
        detectors.selfcheck_ngram(draw=HOW),
        detectors.nli_context(FirstLetter()),
    ]
    fitted = {one.name: untrained(one) for one in chosen}
    found = jaxhal.score(lm, examples, list(fitted.values()), batch_size=1)
    bulk = Bulk(lm, examples)
    for one in chosen:
        values = one.measures[0](bulk)["values"]
        for row, report in enumerate(found):
            inside = sentences(report.response)
            want = [
                sum(
                    values[row, number]
                    for number, sentence in enumerate(inside)
                    if sentence.start <= token.start < sentence.end
                )
                for token in report.tokens
            ]
            if one.name == "selfcheck_ngram":
                want = 1 - np.exp(-np.array(want))
                assert any(want)
            got = [token.scores[one.name] for token in report.tokens]
            np.testing.assert_allclose(got, want, atol=1e-6)
    data = collect(lm, examples, chosen, Store(tmp_path), progress=False)
    again = reports(data, fitted, range(4))
    for ours, theirs in zip(again, found, strict=True):
        assert ours.detector == theirs.detector == "selfcheck_nli"
        for one, other in zip(ours.tokens, theirs.tokens, strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-6)


def test_experiments_score_as_reports_do(lm, tmp_path):
    chosen = [
        detectors.semantic_entropy("nature", FirstLetter(), draw=HOW),
        detectors.eigenscore(draw=HOW),
        detectors.selfcheck_nli(FirstLetter(), draw=HOW),
    ]
    examples = answers(6)
    data = collect(lm, examples, chosen, Store(tmp_path), progress=False)
    want = scored(lm, examples, chosen)
    for one in chosen:
        got = untrained(one).score(data.inputs[one.name])
        np.testing.assert_allclose(got, want[one.name], rtol=1e-3, atol=1e-4)


def test_an_ensemble_measures_for_its_members():
    member = detectors.semantic_entropy()
    both = detectors.ensemble([member, *detectors.get(["novel_words"])])
    assert both.measures == member.measures


def test_parts_of_answers_have_no_samples(lm, tmp_path):
    with pytest.raises(ValueError, match="belongs to a whole answer.*semantic_entropy"):
        collect(
            lm,
            [dataclasses.replace(one, label=None, labels=()) for one in answers(2)],
            [detectors.semantic_entropy(), *detectors.get(["predictive_probability"])],
            Store(tmp_path),
            unit="window",
        )


@pytest.mark.parametrize("make", ["semantic_entropy", "eigenscore"])
def test_unknown_presets(make):
    with pytest.raises(ValueError, match="preset is 'odd'; use one of"):
        getattr(detectors, make)("odd")


def test_one_sample_is_no_spread():
    with pytest.raises(ValueError, match="n is 1; samples lie apart from two on"):
        detectors.eigenscore(draw={"n": 1})


def test_samples_without_text(lm, monkeypatch):
    """Missing everywhere, and an error where nothing is left to read."""
    silent = [[Sample("  ", -1.0, 1)] * 3 for _ in range(2)]
    monkeypatch.setattr("jaxhal.reading.bulk.draw", lambda *_, **__: silent)
    bulk = Bulk(lm, answers(2))
    clusters = Meanings(HOW, FirstLetter(), "strict", False, False)(bulk)
    assert (clusters == -1).all()
    assert bulk.errors[1] == "example '1': none of 3 samples holds text"
    support = SentenceSupport(FirstLetter(), HOW, "published")(bulk)
    assert (support["values"][support["valid"]] == 0.5).all()
    assert not Embedded(HOW, "last")(Bulk(lm, answers(2)))["valid"].any()
    one = untrained(detectors.eigenscore(draw=HOW))
    for report in jaxhal.score(lm, answers(2), [one, "novel_words"], progress=False):
        assert "fewer than two of 3 samples hold text" in report.error


def test_a_lone_answer_in_error_is_a_row(lm):
    most = lm.config.context_length
    one = untrained(detectors.eigenscore(draw={"n": 2, "max_new_tokens": most}))
    (report,) = jaxhal.score(lm, answers(1), [one], progress=False)
    assert "lower max_new_tokens" in report.error and report.scores == {}


def test_one_sample_lies_apart_from_nothing(lm, monkeypatch):
    said = [[Sample("a", -1.0, 1)] * 3, [Sample("a", -1.0, 1), *[Sample("", 0, 0)] * 2]]
    monkeypatch.setattr("jaxhal.reading.bulk.draw", lambda *_, **__: said)
    bulk = Bulk(lm, answers(2))
    assert Embedded(HOW, "last")(bulk)["valid"].sum() == 4
    assert [*bulk.errors] == [1]
    assert bulk.errors[1].endswith("fewer than two of 3 samples hold text")


def test_a_prompt_without_room_for_samples_costs_no_other(lm):
    most = lm.config.context_length
    lengths = [len(lm.tokenizer.encode_prompt(e).prompt_ids) for e in answers(4)]
    how = Draw(n=2, max_new_tokens=most - min(lengths))
    bulk = Bulk(lm, answers(4))
    found = bulk.samples(how)
    for number, length in enumerate(lengths):
        assert (number in bulk.errors) == (length > min(lengths))
        assert bool(found[number][0].tokens) == (length == min(lengths))
    assert 0 < len(bulk.errors) < 4
    assert "over the reader's context" in next(iter(bulk.errors.values()))


def test_an_answer_with_too_few_samples_costs_no_other(lm):
    given = [dataclasses.replace(e, samples=("so", "no")) for e in answers(3)]
    given[1] = dataclasses.replace(given[1], samples=())
    ngram = detectors.selfcheck_ngram(draw={"given": True, "n": 2})
    first, second, third = jaxhal.score(lm, given, [ngram], progress=False)
    assert first.error is third.error is None and second.error is not None
    assert "it comes with 0 samples, and 2 are asked for" in second.error


def test_a_text_that_cannot_be_judged_costs_no_other(lm):
    def judge(asked):
        if "b" in asked:
            raise ValueError("b is too long")
        return [text.upper() for text in asked]

    bulk = Bulk(lm, answers(3))
    assert bulk.judged(judge, ["a", "b", "c"]) == ["A", None, "C"]
    assert [*bulk.errors] == [1] and "b is too long" in bulk.errors[1]
    bulk = Bulk(lm, answers(2))
    assert bulk.judged(judge, ["b", "b"]) == [None, None] and len(bulk.errors) == 2


def test_likelihood_of_a_sample():
    one = Sample("a b", -1.0, 4, -0.4)
    assert one.likelihood(True, True) == -1.0 and one.likelihood(False, True) == -4.0
    assert one.likelihood(True, False) == pytest.approx(-1.2)
    assert one.likelihood(False, False) == pytest.approx(-3.6)
    assert Sample("a", -1.0, 4).likelihood(True, False) == -1.0  # cut off
    assert Sample("", -2.0, 1, -2.0).likelihood(True, False) == -2.0  # an end alone
    assert Sample("", 0.0, 0).likelihood(True, False) == 0.0


def test_bounds_of_too_few_tokens(lm):
    clipped = dataclasses.replace(HOW, clip=0.001)
    with pytest.raises(ValueError, match="clip is 0.001, and the responses have"):
        draw(lm, answers(2), clipped)
    # It costs these answers their scores, and no others.
    chosen = ["novel_words", detectors.eigenscore(draw=clipped)]
    for report in jaxhal.score(lm, answers(2), chosen):
        assert "clip is 0.001, and the responses have" in report.error


def test_each_measure_is_computed_once(lm, monkeypatch):
    calls = []
    real = Meanings.__call__

    def counting(self, bulk):
        calls.append(self)
        return real(self, bulk)

    monkeypatch.setattr(Meanings, "__call__", counting)
    two = [
        detectors.semantic_entropy("nature", FirstLetter(), draw=HOW),
        detectors.semantic_entropy("discrete", FirstLetter(), draw=HOW, name="b"),
    ]
    found, failed = extract(lm, answers(2), detectors.features_of(two)).measured
    assert len(calls) == 1 and len(found) == 2 and not failed
    assert jax.tree.leaves(found)
