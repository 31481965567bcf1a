"""Fine-tuning the reader: gradients, accumulation, resumption and what is learned."""

import _thread
import dataclasses
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
import thorough
from flax import nnx
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import tiny
from jaxhal import experiments, plotting, tuning
from jaxhal.cli import app as cli
from jaxhal.experiments import running
from jaxhal.experiments.config import load_config
from jaxhal.models import decoder, families, weights
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import LM
from jaxhal.models.ops import STANDARD
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.weights import paths
from jaxhal.tuning import Tuning, adapters, checkpoints, classifier, training
from jaxhal.tuning.adapters import Pair
from jaxhal.tuning.classifier import Head, Learned, TokenRows
from jaxhal.tuning.training import Task, prepare
from jaxhal.types import Example
from tiny_lm import tiny_lm

LORA = Tuning(
    rank=3,
    targets=("q_proj", "v_proj", "up_proj", "down_proj"),
    learning_rate=2e-2,
    epochs=4,
    batch_size=8,
    micro_batch=4,
    validation_share=0.25,
)
FULL = dataclasses.replace(LORA, method="full", learning_rate=1e-2)


def toy(count: int, start: int = 0) -> list[Example]:
    """One answer to a source; made-up ones speak of dragons."""
    rng = np.random.default_rng(start)
    return [
        Example(
            f"{'dragons' if number % 2 else 'pears'} {rng.integers(100)}",
            prompt="What" + " is" * int(rng.integers(1, 5)),
            id=f"a{number}",
            label=number % 2,
            source=str(number),
        )
        for number in range(start, start + count)
    ]


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny_lm()


@pytest.fixture(scope="module")
def learned(lm) -> Learned:
    """Pairs whose second half is not zero, as after some steps."""
    return moved(classifier.start(lm, LORA, jax.random.key(1)))


def moved(learned: Learned) -> Learned:
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            np.asarray(leaf) + 0.1 * rng.normal(size=leaf.shape), leaf.dtype
        ),
        learned,
    )


def rows_of(lm: LM, examples: list[Example]) -> TokenRows:
    sequences = classifier.encode(lm, examples)
    everyone = range(len(sequences))
    [(_, rows)] = classifier.batches(sequences, everyone, len(sequences), 0)
    return rows


def assert_close(one, other, tolerance: float):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        one,
        other,
    )


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


# Adapters


def test_a_low_rank_gradient_is_that_of_the_merged_weights(lm, learned):
    labels, weight = jnp.array([0.0, 1.0, 1.0]), jnp.full(3, 1 / 3)
    rows = rows_of(lm, toy(3))
    scale = LORA.alpha / LORA.rank
    with jax.enable_x64(True):
        double = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float64))
        base, wide = dataclasses.replace(lm, params=double(lm.params)), double(learned)
        kernels = dict(paths(base.params))

        def merged(pieces: Learned):
            whole = {
                name: kernels[name] + scale * pair.down @ pair.up
                for name, pair in pieces.weights.items()
            }
            one = Learned(pieces.head, whole)
            return classifier.log_loss(one, base, rows, labels, weight, 1.0)

        def split(pieces: Learned):
            return classifier.log_loss(pieces, base, rows, labels, weight, scale)

        ours, theirs = (jax.jit(jax.value_and_grad(f))(wide) for f in (split, merged))
    assert_close(ours, theirs, 1e-9)
    sizes = [np.abs(np.asarray(leaf)).max() for leaf in jax.tree.leaves(ours[1])]
    assert min(sizes) > 1e-7


def test_zero_pairs_change_nothing(lm):
    begin = classifier.start(lm, LORA, jax.random.key(0))
    rows = rows_of(lm, toy(4))

    @functools.partial(jax.jit, static_argnums=1)
    def hidden(params, ops):
        model = nnx.merge(lm.graphdef, params)
        x, geo = decoder.begin(model, rows.tokens, rows.valid)
        return decoder.run(model, x, geo, ops=ops)[0]

    adapted = adapters.insert(lm.params, begin.weights, 7.0)
    assert len(jax.tree.leaves(adapted)) == len(jax.tree.leaves(lm.params)) + 8
    base = hidden(lm.params, STANDARD)
    assert_same(hidden(adapted, adapters.OPS), base)
    want = base[:, -1] @ begin.head.w + begin.head.b
    odds = jax.jit(classifier.log_odds)(begin, lm, rows, LORA.scale)
    assert_close(odds, want, 1e-6)


def shapes_made(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of everything that a program computes, inner programs included."""
    made = set()
    for equation in jaxpr.eqns:
        made |= {out.aval.shape for out in equation.outvars}
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                made |= shapes_made(inner)
    return made


def test_no_gradient_of_the_size_of_a_frozen_kernel_is_computed(lm):
    rows, labels = rows_of(lm, toy(3)), jnp.ones(3)

    def shapes(settings: Tuning):
        begin = classifier.start(lm, settings, jax.random.key(0))
        gradient = jax.grad(
            lambda one: classifier.log_loss(one, lm, rows, labels, labels, 2.0, True)
        )
        return shapes_made(jax.make_jaxpr(gradient)(begin).jaxpr)

    stacked = dict(paths(lm.params))["blocks.mlp.up_proj.kernel"].shape
    assert stacked == (2, 32, 64)
    assert stacked in shapes(FULL)
    assert stacked not in shapes(LORA)
    assert (2, 32, 3) in shapes(LORA)  # that of a first half


def test_the_base_is_left_as_it_was(lm):
    before = jax.tree.map(np.array, lm.params)
    whole = {name: np.asarray(leaf) for name, leaf in paths(lm.params)}
    for settings in (LORA, FULL):
        settings = dataclasses.replace(settings, epochs=1)
        tuned = tuning.fit(lm, toy(16), settings)
        assert_same(lm.params, before)
        for name, value in tuned.learned.weights.items():
            if isinstance(value, Pair):
                assert np.asarray(value.up).any()
            else:
                assert (np.asarray(value) != whole[name]).any()


# Training


@pytest.fixture(scope="module")
def task(lm) -> Task:
    return prepare(lm, toy(6), dataclasses.replace(LORA, validation_share=0.0))


def gradient(task: Task, learned: Learned, numbers=range(6), **changes):
    settings = dataclasses.replace(task.tuning, **changes)
    with training.Bar(disable=True) as bar:
        one = dataclasses.replace(task, tuning=settings)
        return training._gradient(one, learned, list(numbers), bar)


def test_micro_batches_add_up(task, learned):
    whole = gradient(task, learned, micro_batch=6)
    # The second one has two dummies.
    assert_close(gradient(task, learned, micro_batch=4), whole, 1e-5)
    assert np.abs(gradient(task, learned, [0, 1], micro_batch=6)[0] - whole[0]) > 1e-4


def test_computing_again_changes_nothing(task, learned):
    kept = gradient(task, learned, remat=False)
    assert_close(gradient(task, learned), kept, 1e-5)


def test_padding_changes_nothing(task, learned):
    longer = [
        dataclasses.replace(one, response=one.response + " and more" * (2 * number))
        for number, one in enumerate(toy(6))
    ]
    sequences = classifier.encode(task.lm, longer)
    lengths = [len(sequence) for sequence in sequences]
    assert max(lengths) > 96 and min(lengths) < 64

    def score(size: int):
        settings = dataclasses.replace(LORA, micro_batch=size)
        return training.scores(task.lm, settings, learned, sequences)

    assert_close(score(6), score(1), 1e-4)
    odds = functools.partial(jax.jit(classifier.log_odds), learned, task.lm, scale=2.0)
    _, rows = next(classifier.batches(sequences, range(6), 6, 0))
    other = TokenRows(jnp.where(rows.valid, rows.tokens, 9), rows.valid)
    assert (other.tokens != rows.tokens).any()
    assert_same(odds(other), odds(rows))
    # The score is that of the last real token, whatever the token is.
    changed = TokenRows(rows.tokens.at[:, -1].set(9), rows.valid)
    assert (np.abs(odds(changed) - odds(rows)) > 1e-4).all()


def test_every_epoch_goes_through_all_answers_in_its_own_order(task):
    settings = dataclasses.replace(LORA, batch_size=4)
    task = dataclasses.replace(task, tuning=settings)
    assert (task.steps_per_epoch, task.steps) == (2, 8)
    epochs = [task.batch(step) + task.batch(step + 1) for step in range(0, 8, 2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 4
    assert len(set(map(tuple, epochs))) > 1
    other = dataclasses.replace(task, tuning=dataclasses.replace(settings, seed=1))
    assert [other.batch(n) for n in range(8)] != [task.batch(n) for n in range(8)]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_learning_rate_rises_and_falls(schedule):
    settings = dataclasses.replace(
        LORA, schedule=schedule, warmup=0.2, learning_rate=1.0
    )
    rates = [float(training.learning_rate(settings, 20)(n)) for n in range(20)]
    after = np.arange(16)
    falling = (1 + np.cos(np.pi * after / 16)) / 2 if schedule == "cosine" else after**0
    want = [0.2, 0.4, 0.6, 0.8, *falling]
    np.testing.assert_allclose(rates, want, atol=1e-6)
    assert float(training.learning_rate(tuning.PUBLISHED, 9)(0)) == pytest.approx(2e-5)


@pytest.fixture(scope="module")
def undisturbed(lm):
    return tuning.fit(lm, toy(32), dataclasses.replace(LORA, save_every=2))


@pytest.mark.parametrize("kill", [3, 8])
def test_a_killed_run_ends_as_if_it_had_not_been(
    lm, undisturbed, kill, tmp_path, monkeypatch
):
    settings = dataclasses.replace(LORA, save_every=2)
    steps, update = [], training._updated

    def counted(*arguments):
        steps.append(len(steps))
        if len(steps) == kill:
            raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(training, "_updated", counted)
    with pytest.raises(KeyboardInterrupt):
        tuning.fit(lm, toy(32), settings, tmp_path / "here")
    tuned = tuning.fit(lm, toy(32), settings, tmp_path / "here")
    total = 12  # of 24 answers, four times
    # What was done after the last checkpoint is done again.
    assert len(steps) == kill + total - (kill - 1) // 2 * 2
    for field in ("learned", "losses", "validation_losses", "unseen", "validation"):
        assert_same(getattr(tuned, field), getattr(undisturbed, field))
    tuning.fit(lm, toy(32), settings, tmp_path / "here")  # all is done
    assert len(steps) == kill + total - (kill - 1) // 2 * 2


@pytest.mark.parametrize("settings", [LORA, FULL], ids=["lora", "full"])
def test_what_can_be_learned_is(lm, settings):
    examples = toy(32)
    tuned = tuning.fit(lm, examples, settings)
    other = toy(40, start=100)
    labels = [one.label for one in other]
    assert roc_auc_score(labels, tuned.score(lm, other)) > 0.95
    assert tuned.losses[-1] < tuned.losses[0] / 2
    # The scores of the validation part are of the epoch that is kept.
    kept = [examples[number] for number in tuned.validation]
    assert_close(tuned.unseen, tuned.score(lm, kept), 1e-5)
    sign = np.array([2 * one.label - 1 for one in kept])
    loss = np.logaddexp(0, -sign * tuned.unseen).mean()
    assert loss == pytest.approx(tuned.validation_losses.min(), rel=1e-4)


def test_training_stops_when_validation_does_not_get_better(lm):
    # Labels without a pattern: what is learned does not hold elsewhere.
    rng = np.random.default_rng(0)
    noise = [
        dataclasses.replace(one, label=int(label))
        for one, label in zip(toy(32), rng.permutation(32) % 2, strict=True)
    ]
    settings = dataclasses.replace(LORA, epochs=30, patience=2)
    tuned = tuning.fit(lm, noise, settings)
    best = int(np.argmin(tuned.validation_losses))
    assert len(tuned.validation_losses) == best + 3 < 30
    assert len(tuned.losses) == 3 * len(tuned.validation_losses)
    # Sources stay whole, and none is on both sides.
    paired = [
        dataclasses.replace(one, source=str(n // 4)) for n, one in enumerate(noise)
    ]
    task = prepare(lm, paired, settings)
    assert not {n // 4 for n in task.train} & {n // 4 for n in task.validation}
    assert sorted([*task.train, *task.validation]) == list(range(32))


def test_without_a_validation_part_all_is_learned_from(lm):
    settings = dataclasses.replace(LORA, epochs=1, validation_share=0.0)
    tuned = tuning.fit(lm, toy(16), settings)
    assert len(tuned.losses) == 2
    assert not len(tuned.validation_losses) and not len(tuned.unseen)


def test_bfloat16_weights_are_learned_in_float32(lm):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), lm.params)
    small = dataclasses.replace(lm, params=half)
    for settings in (LORA, FULL):
        begin = classifier.start(small, settings, jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(begin)} == {jnp.dtype("float32")}
    back = adapters.insert(half, begin.weights, 1.0)
    assert jax.tree.leaves(back)[0].dtype == jnp.bfloat16
    assert_same(back, half)
    rows = rows_of(lm, toy(4))
    assert jax.eval_shape(
        lambda: classifier.log_odds(begin, small, rows, 1.0)
    ).dtype == jnp.dtype("float32")


def test_one_step_is_that_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape, name = tiny.CASES["llama-mqa"][1], "model.safetensors"
    config = transformers.LlamaConfig(**shape, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    theirs = transformers.LlamaForSequenceClassification(config).double().train()

    def ours() -> LM:
        from safetensors.torch import save_file

        state = {k: v for k, v in theirs.state_dict().items() if "score" not in k}
        save_file({k: v.clone() for k, v in state.items()}, tmp_path / name)
        mine = from_huggingface({**config.to_dict(), "model_type": "llama"})
        source = SafetensorsSource(tmp_path, "model.")
        table = families.huggingface_table(mine)
        graphdef, params = weights.fill(mine, source, table, jnp.float32)
        return LM(params, graphdef, mine)

    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 61, size) for size in (9, 30, 17)]
    labels = np.array([1.0, 0.0, 1.0])
    before, head = ours(), theirs.score.weight.detach().numpy()[0].copy()

    tokens = np.zeros((3, 30), int)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    step = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1)
    logits = theirs(torch.tensor(tokens), torch.tensor(tokens != 0).long()).logits
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits[:, 0], torch.tensor(labels)
    )
    loss.backward()
    step.step()
    after = ours()

    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), before.params)
        lm = dataclasses.replace(before, params=params)
        begin = classifier.start(lm, FULL, jax.random.key(0))
        begin = begin._replace(head=Head(jnp.asarray(head), jnp.zeros(())))
        order, rows = next(classifier.batches(sequences, range(3), 3, 0))
        value, slope = jax.jit(jax.value_and_grad(classifier.log_loss))(
            begin, lm, rows, jnp.asarray(labels[order]), jnp.full(3, 1 / 3), 1.0
        )
        inner = optax.adamw(0.0).init(begin)
        found, _ = training._updated(begin, inner, slope, 1e-3, 0.1)
    assert float(value) == pytest.approx(loss.item(), rel=1e-6)
    assert_close(found.head.w, theirs.score.weight.detach().numpy()[0], 1e-6)
    for path, leaf in paths(after.params):
        assert np.abs(found.weights[path] - begin.weights[path]).max() > 5e-4
        np.testing.assert_allclose(found.weights[path], leaf, atol=1e-5, err_msg=path)


# What is wrong with the input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "prefix"}, "method is 'prefix'; use one of lora, full"),
        ({"schedule": "linear"}, "schedule is 'linear'; use one of cosine"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; give a number above 0"),
        ({"rank": 0}, "rank is 0; give at least 1"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"targets": ()}, "targets is .*at least one projection"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"patience": 0}, "patience is 0"),
        ({"save_every": 0}, "save_every is 0"),
        ({"warmup": 1.0}, "warmup is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"validation_share": 1.0}, "validation_share is 1.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        Tuning(**changes)


def test_bad_examples(lm):
    good = toy(16)
    unlabelled = [*good, dataclasses.replace(good[0], label=None)]
    long = dataclasses.replace(good[0], response="x" * 600)
    one_source = [dataclasses.replace(one, source="same") for one in good]
    no_tokenizer = dataclasses.replace(lm, tokenizer=None)
    elsewhere = dataclasses.replace(LORA, targets=("q_proj", "c_attn"))
    cases = [
        (lm, [], LORA, "no examples"),
        (lm, unlabelled, LORA, "example 'a0' has no label"),
        (lm, good[::2], LORA, "all 8 answers are grounded"),
        (lm, good[1::2], LORA, "all 8 answers are hallucinated"),
        (lm, [*good, long], LORA, "example 'a0': .* over the model's context of 512"),
        (lm, one_source, LORA, "no validation part .* give more labelled sources"),
        (lm, good, elsewhere, "targets c_attn are no projections .* down_proj"),
        (no_tokenizer, good, LORA, "no tokenizer"),
    ]
    for model, examples, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            tuning.fit(model, examples, settings)


def test_a_loss_that_is_no_number(lm):
    wild = dataclasses.replace(FULL, learning_rate=1e30, warmup=0.0)
    with pytest.raises(ValueError, match="loss .* became (nan|inf); .* than 1e\\+30"):
        tuning.fit(lm, toy(32), wild)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_last_step_that_diverges(lm, share):
    """No step comes after it whose loss would show that."""
    wild = dataclasses.replace(LORA, learning_rate=1e30, warmup=0.0, epochs=1)
    wild = dataclasses.replace(wild, batch_size=32, validation_share=share)
    with pytest.raises(ValueError, match="became (nan|inf); .* than 1e\\+30"):
        tuning.fit(lm, toy(16), wild)


def test_a_folder_of_something_else(lm, tmp_path):
    short = dataclasses.replace(LORA, epochs=1)
    tuning.fit(lm, toy(16), short, tmp_path / "one")
    other = dataclasses.replace(short, rank=4)
    with pytest.raises(ValueError, match="rank is 4 here and 3 there; delete it"):
        tuning.fit(lm, toy(16), other, tmp_path / "one")
    with pytest.raises(ValueError, match="data is .* here and .* there"):
        tuning.fit(lm, toy(16, start=2), short, tmp_path / "one")
    with pytest.raises(ValueError, match="model is 'tiny 1' here and 'tiny 0' there"):
        tuning.fit(tiny_lm(1), toy(16), short, tmp_path / "one")
    moved = dataclasses.replace(
        lm, params=jax.tree.map(lambda leaf: leaf + 0.01, lm.params)
    )
    with pytest.raises(ValueError, match="weights is .* here and .* there"):
        tuning.fit(moved, toy(16), short, tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no checkpoint folder"):
        tuning.fit(lm, toy(16), short, tmp_path / "two")


# On disk


def test_half_a_checkpoint_is_left_by_no_stop(tmp_path):
    half = tmp_path / "steps" / "4.orbax-checkpoint-tmp"
    with pytest.raises(KeyboardInterrupt), checkpoints.opened(tmp_path, {}):
        half.mkdir()
        raise KeyboardInterrupt
    assert not half.exists()
    half.mkdir()  # as a kill leaves it
    with checkpoints.opened(tmp_path, {}):
        assert not half.exists()


def test_one_process_at_a_time_has_a_folder(tmp_path):
    half = tmp_path / "steps" / "4.orbax-checkpoint-tmp"
    with checkpoints.opened(tmp_path, {}):
        half.mkdir()
        with pytest.raises(RuntimeError, match="another process writes to"):
            with checkpoints.opened(tmp_path, {}):
                pass
        assert half.exists()


def test_ctrl_c_waits_for_what_is_being_written(tmp_path, monkeypatch):
    """Orbax's threads wrote on in a folder that was being deleted."""
    ended = []

    def save(step, args):
        half = tmp_path / "steps" / f"{step}.orbax-checkpoint-tmp"
        half.mkdir()
        _thread.interrupt_main()
        time.sleep(0.2)
        (half / "array").write_text("1")
        ended.append(step)

    with pytest.raises(KeyboardInterrupt), checkpoints.opened(tmp_path, {}) as opened:
        monkeypatch.setattr(opened._manager, "save", save)
        opened.save(3, {})
    assert ended == [3]
    assert list((tmp_path / "steps").iterdir()) == []


def test_a_saved_tuning_scores_the_same(lm, undisturbed, tmp_path):
    undisturbed.save(tmp_path / "lora")
    again = tuning.load(tmp_path / "lora")
    assert again.tuning == undisturbed.tuning and again.model == "tiny 0"
    assert_same(again.learned, undisturbed.learned)
    for field in ("losses", "validation_losses", "unseen", "validation"):
        assert_same(getattr(again, field), getattr(undisturbed, field))
    assert_same(again.score(lm, toy(4)), undisturbed.score(lm, toy(4)))

    full = tuning.fit(lm, toy(16), dataclasses.replace(FULL, epochs=1))
    full.save(tmp_path / "full")
    assert_same(tuning.load(tmp_path / "full").learned, full.learned)

    with pytest.raises(FileExistsError, match="is not empty"):
        undisturbed.save(tmp_path / "lora")
    with pytest.raises(FileNotFoundError, match="has no tuned.json"):
        tuning.load(tmp_path)
    (tmp_path / "lora" / "tuned.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(ValueError, match="holds no whole fine-tuning"):
        tuning.load(tmp_path / "lora")
    with pytest.raises(ValueError, match="no examples"):
        full.score(lm, [])


def test_weights_of_another_model(lm, undisturbed):
    def widened(leaf):
        return jnp.concatenate([leaf, leaf], axis=-1)

    wider = dataclasses.replace(lm, params=jax.tree.map(widened, lm.params), name="big")
    with pytest.raises(ValueError, match="64\\] in model 'big' and .* 'tiny 0', which"):
        undisturbed.score(wider, toy(2))
    other = dataclasses.replace(
        lm, params=jax.tree.map(lambda leaf: leaf + 1e-3, lm.params), name="alike"
    )
    with pytest.raises(ValueError, match="'alike' has other weights than 'tiny 0'"):
        undisturbed.score(other, toy(2))


# As a method of an experiment


@pytest.fixture
def here(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(running, "load_dataset", lambda name, **options: toy(48))
    return {
        "name": "tiny",
        "data": [{"name": "fruit"}],
        "detectors": [],
        "protocol": "grouped",
        "folds": 2,
        "store": str(tmp_path / "store"),
        "out": str(tmp_path / "runs"),
    }


SETTINGS = [
    "tuning.rank=3",
    "tuning.targets=[q_proj, v_proj, up_proj, down_proj]",
    "tuning.learning_rate=2e-2",
    "tuning.micro_batch=4",
    "tuning.validation_share=0.25",
    "tuning.save_every=1",
]


@thorough.mark
def test_an_experiment_with_a_tuned_reader(here, lm, tmp_path, monkeypatch):
    steps, update = [], training._updated

    def counted(*arguments):
        steps.append(len(steps))
        if len(steps) == 12:  # the third of the second fold
            raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(training, "_updated", counted)
    with pytest.raises(KeyboardInterrupt):
        experiments.run(here, SETTINGS)
    folder = tmp_path / "runs" / "tiny"
    assert (folder / "checkpoints" / "fruit" / "1").is_dir()
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(here))
    done = CliRunner().invoke(cli.app, ["tune", str(path), *SETTINGS])
    assert done.exit_code == 0, done.output
    assert done.output.count("fine_tuned") == 1
    # Three epochs of three steps a fold; the first fold and two steps were done.
    assert len(steps) == 12 + 7
    rows = json.loads((folder / "results.json").read_text())["rows"]
    by_name = {row["method"]: row for row in rows}
    controls = {name for name, row in by_name.items() if row["control"]}
    assert {"response_length", "novel_words", "tfidf"} < controls
    assert set(by_name) - controls == {"fine_tuned"}
    row = by_name["fine_tuned"]
    assert row["AUROC"] > 0.95 and row["difference"] is not None

    # Every answer is judged once, by a reader tuned without it.
    frame = pd.read_parquet(folder / "scores.parquet")
    assert sorted(frame["row"]) == list(range(48))
    flagged = frame["fine_tuned.flagged"]
    for _, part in frame.groupby("fold"):
        assert part["fine_tuned.probability"].between(0, 1).all()
        threshold = part.loc[flagged, "fine_tuned"].min()
        assert (part.loc[~flagged, "fine_tuned"] < threshold).all()

    # What is saved is the reader of the first split.
    tuned = tuning.load(folder / "fitted" / "fruit" / "fine_tuned")
    first = frame[frame["fold"] == 0]
    examples = [toy(48)[row] for row in first["row"]]
    assert_close(tuned.score(lm, examples), first["fine_tuned"].to_numpy(), 1e-5)
    text = (folder / "results.md").read_text()
    assert "![tuning_fruit](tuning_fruit.png)" in text
    assert "LoRA of rank 3 on q_proj, v_proj" in text
    assert (folder / "tuning_fruit.png").read_bytes()[:4] == b"\x89PNG"
    assert not (folder / "checkpoints").exists()
    assert load_config(folder / "config.yaml").tuning == tuned.tuning


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tuning.method=prefix"], "method is 'prefix'"),
        (["tuning.rang=3"], "unknown key 'tuning.rang'; it takes method, rank"),
        (["tuning.rank=many"], "could not be converted to Integer"),
        (["tuning.validation_share=0"], "needs a validation part"),
        (["unit=window"], "judges whole answers"),
    ],
)
def test_bad_configurations(here, tmp_path, settings, message):
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(here))
    done = CliRunner().invoke(cli.app, ["tune", str(path), *settings])
    assert done.exit_code == 2
    assert message in done.output


def test_a_configuration_without_tuning_stays_without(here):
    with pytest.raises(ValueError, match="detectors is empty"):
        load_config(here)
    assert load_config({**here, "detectors": ["toha"]}).tuning is None
    changes = ["tuning={}", "tuning.alpha=2"]
    tuned = load_config({**here, "tuning": {"rank": 5}}, changes).tuning
    assert tuned == Tuning(rank=5, alpha=2.0)
    tuned = load_config({**here, "detectors": ["toha"]}, ["tuning.rank=5"]).tuning
    assert tuned == Tuning(rank=5)


def test_the_loss_curve():
    figure = plotting.loss_curve([0.9, 0.7, 0.6, 0.4], [0.8, 0.7])
    training_line, validation = figure.axes[0].lines
    assert training_line.get_xydata().tolist() == [
        [1, 0.9],
        [2, 0.7],
        [3, 0.6],
        [4, 0.4],
    ]
    assert validation.get_xydata().tolist() == [[2, 0.8], [4, 0.7]]
    assert len(plotting.loss_curve([0.5]).axes[0].lines) == 1
    for losses, epochs, message in [
        ([], [], r"losses of shape \[0\]"),
        ([0.1, 0.2, 0.3], [0.1, 0.2], "3 steps do not make 2 equal epochs"),
        ([[0.1]], [], "losses of shape"),
        ([0.1, np.nan], [], "losses of shape"),
        ([0.1], [np.inf], "validation of shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            plotting.loss_curve(losses, epochs)
