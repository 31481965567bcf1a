"""Plans for devices that are not here, by what this machine can compile for."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import test_quantized
import thorough
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typer.testing import CliRunner

import jaxhal
import tiny
import tiny_lm
from jaxhal import detectors, lrp
from jaxhal.bench import bounds, topologies
from jaxhal.bench import plan as plans
from jaxhal.bench.bounds import Shape
from jaxhal.capture import forward as capture
from jaxhal.cli import planning
from jaxhal.cli.app import app
from jaxhal.generation import Sampling, decoding
from jaxhal.generation.decoding import Decoding
from jaxhal.models import devices, kernels
from jaxhal.models.families import from_huggingface

REDUCERS = {"lookback": jaxhal.LookbackRatio(), "states": jaxhal.HiddenStates()}
SHAPE = Shape(2, 64, 16)


@pytest.fixture
def here(monkeypatch):
    """One device of this machine in the place of a topology."""
    monkeypatch.setattr(topologies, "described", lambda topology: jax.devices()[:1])
    monkeypatch.setitem(devices.PEAKS, "cpu", devices.Peak(1e12, 1e11, 1e9, 1e10))
    return tiny_lm.tiny_lm().config


def test_a_plan_is_what_the_program_takes(here):
    lm, batch = tiny_lm.tiny_lm(), plans.random_batch(here.vocab_size, 64, 16, 2)
    found = plans.plan(here, "-", SHAPE, REDUCERS, dtype="float32")
    features = jaxhal.read(lm, batch, REDUCERS)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(features))
    assert size <= found.outputs <= size + 64  # and where each of them is
    assert found.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    assert found.temporaries > 0 and found.fits
    assert found.mesh == {"data": 1, "model": 1} and found.collectives == {}
    assert found.kernels == found.squares == 0
    assert found.first.flops == bounds.flops(here, SHAPE)
    assert found.first.arithmetic == found.first.flops / 1e12
    assert found.first.sending == 0
    # No row of a table has to be read as a whole where no logits are.
    read = jax.tree.leaves((lm.params["blocks"], lm.params["norm"]))
    assert found.first.moving == sum(leaf.nbytes for leaf in read) / 1e11
    assert found.pace == 2 / max(found.first.arithmetic, found.first.moving)
    each = sum(leaf.nbytes for leaf in read) / 2
    assert found.an_answer == (found.first.flops / 2, pytest.approx(each))


@pytest.mark.parametrize("window", [0, 1, 7, 40, 100])
def test_windows_hide_columns(here, window):
    """Products of attention as they are counted query by query."""
    seen = [min(column, window or column) for column in range(1, 65)]
    assert bounds.seen(0, 64, window) == pytest.approx(np.mean(seen), abs=0.51)
    late = bounds.seen(48, 64, window)
    assert late == pytest.approx(np.mean(seen[48:]), abs=0.51)
    own = dataclasses.replace(here, windows=(window, 0))
    heads = here.num_attention_heads * here.head_dim
    hidden = 65 / 2 - np.mean(seen)  # columns, of which each is two products a head
    less = bounds.flops(here, Shape(3, 64, 8)) - bounds.flops(own, Shape(3, 64, 8))
    assert less / (3 * 64 * 4 * heads) == pytest.approx(hidden, abs=0.76)
    assert bounds.step(own, SHAPE) <= bounds.step(here, SHAPE)


def test_what_detectors_read_is_counted(here):
    forward = bounds.flops(here, SHAPE)
    logits = 2 * (2 * 17) * here.hidden_size * here.vocab_size
    means = {"a": lrp.ResponseRelevance(), "b": lrp.PromptRelevance()}
    other = lrp.ResponseRelevance(rules="cp_lrp")
    small = lrp.RelevanceMap(response_bins=4, prompt_bins=8)
    for reducers, want in (
        (REDUCERS | {"entropy": jaxhal.TokenEntropy()}, forward + logits),
        (means, 3 * forward),  # one forward, a push and a pull-back for both
        ({"a": means["a"]}, 2 * forward),
        (REDUCERS | means | {"c": other}, round(5.5 * forward)),
        ({"map": small}, 5 * forward),
    ):
        assert bounds.reading(here, SHAPE, reducers) == want
    alone = plans.plan(here, "-", SHAPE, REDUCERS)
    both = plans.plan(here, "-", SHAPE, REDUCERS | means)
    assert both.temporaries > alone.temporaries
    assert both.first.flops == 4 * forward


def test_what_bounds_a_pass():
    assert bounds.Bound(1, 3.0, 2.0, 1.0).by == "products"
    assert bounds.Bound(1, 2.0, 3.0, 1.0).by == "reading memory"
    slow = bounds.Bound(1, 2.0, 1.0, 3.0)
    assert slow.by == "sums over links" and slow.seconds == 3.0


@thorough.mark
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_plan_of_writing_is_that_of_the_loop(here, hybrid):
    """The state that ``jaxhal.generate`` holds, and what a token has to be read for."""
    lm = tiny_lm.lm_of("qwen3.5-uneven") if hybrid else tiny_lm.tiny_lm()
    here, reducers = lm.config, {"entropy": jaxhal.TokenEntropy()}
    batch = plans.random_batch(here.vocab_size, 49, 1, 2)
    how = Decoding(Sampling(), tuple(reducers.items()), stop_ids=(), pad_id=0)
    keys, limit = jax.random.split(jax.random.key(0), 2), jax.numpy.full(2, 16)
    state = decoding.start(lm.bare, batch, limit, keys, how, new_tokens=16, copies=1)
    found = plans.plan(here, "-", SHAPE, reducers, task="generate", dtype="float32")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert size <= found.outputs <= size + 512
    cache = 2 * 2 * 64 * len(here.layers_with("self_attn")) * 4
    cache *= here.num_key_value_heads * here.head_dim
    cache += 2 * sum(part.nbytes for part in state.cache.states)  # and written
    head = "embed_tokens" if here.tie_word_embeddings else "lm_head"
    parts = (lm.params[name] for name in ("blocks", "norm", head))
    weights = sum(leaf.nbytes for part in parts for leaf in jax.tree.leaves(part))
    assert found.step.moving == pytest.approx((weights + cache) / 1e11)
    assert found.first.flops == bounds.prompts(here, SHAPE)
    assert found.seconds == found.first.seconds + 15 * found.step.seconds
    assert found.an_answer == (
        (found.first.flops + 15 * found.step.flops) / 2,
        pytest.approx((found.first.moving + 15 * found.step.moving) * 1e11 / 2),
    )
    assert found.fits and found.temporaries > 0


def test_weights_in_blocks_are_those_that_loading_packs(here, tmp_path):
    lm = jaxhal.load(tiny_lm.write_lm(tmp_path), weights="int8", mesh="data=1")
    found = plans.plan(here, "-", SHAPE, REDUCERS, dtype="float32", packed="Q8_0")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    read = jax.tree.leaves((lm.params["blocks"], lm.params["norm"]))
    whole = jax.tree.leaves(tiny_lm.tiny_lm().params)
    assert found.weights == held < 0.3 * sum(leaf.nbytes for leaf in whole)
    assert found.first.moving == sum(leaf.nbytes for leaf in read) / 1e11


def test_what_does_not_fit(here, monkeypatch):
    small = devices.Peak(1e12, 1e11, 1e3, 1e10)
    monkeypatch.setitem(devices.PEAKS, "cpu", small)
    found = plans.plan(here, "-", SHAPE, REDUCERS)
    assert not found.fits and "weights alone" in found.refused


@pytest.mark.parametrize(
    "shape, changes, message",
    [
        (Shape(0, 64, 16), {}, "answers is 0"),
        (Shape(2, 16, 16), {}, "tokens is 16; give more than the 16"),
        (Shape(2, 9999, 16), {}, "at most the model's context of 512"),
        (SHAPE, {"mesh": {"data": 2, "model": 1}}, "is not all of the topology's 1"),
        (SHAPE, {"task": "train"}, "task is 'train'; use one of read, generate"),
        (SHAPE, {"reducers": {}}, "there are no reducers"),
        (
            SHAPE,
            {"task": "generate", "reducers": {"toha": jaxhal.MTopDiv()}},
            "'toha' needs all response rows at once",
        ),
    ],
)
def test_what_cannot_be_planned(here, shape, changes, message):
    options = {"reducers": REDUCERS} | changes
    with pytest.raises(ValueError, match=message):
        plans.plan(here, "-", shape, **options)


def test_the_command(here, tmp_path, monkeypatch):
    path = tiny_lm.write_lm(tmp_path) / "config.json"
    command = ["plan", str(path), "--topology", "-", "--tokens", "64", "--batch", "2"]
    command += ["--response", "16", "--price", "3.6"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for text in (
        *("1 x cpu", "2 of 64 tokens", "seconds, at least", "dollars a million"),
        *("products an answer", "TFLOP", "memory read an answer", "MiB"),
        *("fused attention, a layer's once", "heads x tokens x tokens"),
    ):
        assert text in done.output
    done = CliRunner().invoke(app, [*command, "--task", "generate"])
    assert done.exit_code == 0, done.output
    for text in ("cache and features", "first token, at least", "tokens a second"):
        assert text in done.output
    done = CliRunner().invoke(app, [*command, "--weights", "stored"])
    assert done.exit_code == 2 and "is no GGUF file; use int8 or" in done.output
    file = tmp_path / "tiny.gguf"
    test_quantized.write(file)
    options = ["--weights", "stored", "--dtype", "float32"]
    done = CliRunner().invoke(app, ["plan", str(file), *command[2:], *options])
    assert done.exit_code == 0, done.output
    monkeypatch.setitem(devices.PEAKS, "cpu", devices.Peak(1e12, 1e11, 1e3, 1e10))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "does not fit" in done.output


def test_the_command_reads_what_its_detectors_do(here, tmp_path, monkeypatch):
    path = tiny_lm.write_lm(tmp_path) / "config.json"
    asked = []

    def plan(config, topology, shape, reducers, **how):
        asked.append(reducers)
        raise ValueError("enough")

    monkeypatch.setattr(plans, "plan", plan)
    command = ["plan", str(path), "--topology", "-"]
    for names in (["toha", "context_gain"], ["lrp4rag_svm"]):
        options = [word for name in names for word in ("--detector", name)]
        assert CliRunner().invoke(app, [*command, *options]).exit_code == 2
        want = [one.reducers for one in detectors.get(names)]
        assert asked.pop() == {k: v for one in want for k, v in one.items()}
    done = CliRunner().invoke(app, [*command, "--detector", "no_such"])
    assert done.exit_code == 2 and "no_such" in done.output and not asked


@pytest.mark.parametrize(
    "weights, temporaries, refused, said",
    [
        (4e8, 4e8, "", None),
        (6e8, 4e8, "", "more devices, or weights of fewer bits"),
        (2e9, 0, "the weights alone are too large", "more devices, or weights of"),
        (2e8, 8e8, "", "take fewer or shorter answers together, or more devices"),
        (2e8, 0, "out of memory", "take fewer or shorter answers together"),
    ],
)
def test_what_to_change_is_said(weights, temporaries, refused, said):
    found = plans.Plan(
        kind="cpu",
        mesh={"data": 1, "model": 1},
        shape=SHAPE,
        weights=int(weights),
        memory=1e9,
        first=bounds.Bound(0, 0.0, 0.0, 0.0),
        temporaries=int(temporaries),
        refused=refused,
    )
    advice = " ".join(planning._advice(found))
    assert (advice == "") if said is None else (said in advice)
    assert refused in advice


@pytest.mark.parametrize(
    "platform, kind, topology",
    [
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "NVIDIA L4", None),  # of which only the peak is known
        ("tpu", "TPU v5 lite", None),  # without its plugin
    ],
)
def test_the_topology_of_one_device(monkeypatch, platform, kind, topology):
    monkeypatch.setattr(kernels, "installed", lambda: {"cuda": kernels.CUDA})
    one = types.SimpleNamespace(platform=platform, device_kind=kind)
    assert topologies.of_one(one) == topology


@pytest.mark.parametrize(
    "topology, extra", [("v5e:2x4", "tpu"), ("h100:8", "cuda"), ("b:8", "tpu")]
)
def test_without_its_plugin_the_extra_is_named(monkeypatch, topology, extra):
    monkeypatch.setattr(kernels, "installed", dict)
    with pytest.raises(RuntimeError, match=rf'pip install "jaxhal\[{extra}\]"'):
        topologies.described(topology)


@pytest.mark.parametrize("topology", ["h100:", "h100:0", "a100:2x4", "h200:many"])
def test_gpus_are_counted(topology):
    with pytest.raises(ValueError, match="say how many GPUs a host has, such as"):
        topologies.described(topology)


@pytest.mark.parametrize(
    "plugin, topology, kind",
    [("tpu", "v5e:2x2", "TPU v5 lite"), ("cuda", "h100:4", "NVIDIA H100 80GB HBM3")],
)
def test_attention_stays_on_its_device(tmp_path, plugin, topology, kind):
    """Compiled for real, where the plugin that can is installed.

    By its own kernel, of which no scores come out.  The way back of relevance keeps no
    copy of the weights.
    """
    if plugin not in kernels.installed():
        pytest.skip(f"no plugin compiles for {plugin}")
    small = dict(hidden_size=256, head_dim=32, num_attention_heads=8)
    small |= dict(num_hidden_layers=24)
    tiny_lm.write_lm(tmp_path, **small, num_key_value_heads=4)
    code = (
        "import json, jaxhal; from jaxhal.bench import plan, read;"
        "from jaxhal.models.families import read_config;"
        f"config = read_config({str(tmp_path)!r});"
        "tapped = {'lookback': jaxhal.LookbackRatio()};"
        "each = {'read': read.REDUCERS, 'generate': tapped};"
        "mesh, shape = {'data': 2, 'model': 2}, plan.Shape(4, 256, 64);"
        f"made = [plan.plan(config, {topology!r}, shape, r, task=t, mesh=mesh)"
        " for t, r in each.items()];"
        "few, back = plan.Shape(2, 32, 8), {'prompt': jaxhal.lrp.PromptRelevance()};"
        f"made.append(plan.plan(config, {topology!r}, few, back, mesh=mesh));"
        "print(json.dumps([vars(m) for m in made]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    reading, writing, back = json.loads(ran.stdout.splitlines()[-1])
    for found in (reading, writing):
        assert found["kind"] == kind and found["temporaries"] > 0
        assert "all-reduce" in found["collectives"]
    assert set(reading["collectives"]) == {"all-reduce"}
    assert reading["kernels"] == 1 and reading["squares"] == 0
    # Two sums a layer of two bytes for each of 256 numbers of 2 x 256 tokens: of two
    # devices each sends the other its half, and gets the sum of the other half.
    sums = 2 * 24 * 256 * 2 * 256 * 2
    sending = [bounds.Bound(*found["first"]).sending for found in (reading, back)]
    rate = devices.peak(kind).links
    assert sending == [pytest.approx(sums / rate), pytest.approx(2 * sums / 16 / rate)]
    assert not back["refused"] and back["temporaries"] < back["weights"] / 2


@pytest.mark.parametrize(
    "case, dtype",
    [
        ("llama-gqa", "bfloat16"),
        ("qwen3.5-gqa", "float32"),
        *thorough.more(("qwen3.5-gqa", "bfloat16")),
    ],
)
def test_a_way_back_keeps_no_copy_of_the_weights(here, monkeypatch, case, dtype):
    """Where layers are computed again: on CPU, and where they come in periods."""
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(kept=0))
    about = tiny.golden(case)["config"] | {"hidden_size": 256}
    more = 48 // about["num_hidden_layers"]
    about["num_hidden_layers"] *= more
    if "layer_types" in about:
        about["layer_types"] *= more
    back, shape = {"prompt": lrp.PromptRelevance()}, Shape(1, 32, 8)
    config = from_huggingface(about)
    capture.read_jit.clear_cache()
    found = plans.plan(config, "-", shape, back, dtype=dtype)
    assert found.temporaries < found.weights / 2


def test_the_bench_of_what_is_compiled(here, monkeypatch, capsys):
    from jaxhal.bench import compiled

    def described(topology):
        if topology == "-":
            return jax.devices()[:1]
        raise RuntimeError("no compiler; pip install it")

    monkeypatch.setattr(topologies, "described", described)
    small = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2}
    small |= {"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    config = compiled.QWEN3_30B | small
    one = compiled.Case("small", config, "-", SHAPE, "Q4_0")
    monkeypatch.setattr(compiled, "CASES", (one._replace(topology="v0"), one))
    rows = list(compiled.rows())
    assert {row["case"] for row in rows} == {"small, 2 x 64, -, data=1,model=1"}
    found = {row["metric"]: row["value"] for row in rows}
    assert found["temporaries, all reducers / forward and their features"] > 0
    assert found["all-reduces, a layer's once"] == found["other collectives"] == 0
    assert capsys.readouterr().err == "v0 is left out: no compiler; pip install it\n"


def test_topologies_that_the_plugin_knows_or_not():
    if "tpu" not in kernels.installed():
        pytest.skip("no plugin compiles for TPUs")
    devices = topologies.described("v5e:1x1")
    assert len(devices) == 1
    sharding = NamedSharding(Mesh(np.array(devices), "data"), PartitionSpec())
    x = jax.ShapeDtypeStruct((), np.float32, sharding=sharding)
    seen = []

    def look(x):
        seen.append(kernels.platform_of(x))
        return kernels.by_platform(lambda *some: seen.append(some[0]) or x, x)

    jax.eval_shape(look, x)
    assert seen == [kernels.TPU] * 2
    with pytest.raises(ValueError, match="libtpu does not know"):
        topologies.described("v99:2x4")


def test_a_container_leaves_what_its_limit_does(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_GROUP", tmp_path)
    whole = devices.memory()
    texts = {
        "max": "5000\n",
        "current": "3000\n",
        "stat": "anon 1\ninactive_file 700\n",
    }
    for name, text in texts.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert devices.memory() == 2700 < whole
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.memory() > 2700
