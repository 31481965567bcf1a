"""Models over several devices: what cannot be asked for, and that the rest is right."""

import eight
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxhal
import tiny_lm
from jaxhal.models import mesh as mesh_lib
from jaxhal.scoring.results import settings_of


def test_eight_devices_compute_what_one_does(pytestconfig):
    eight.passes("on_eight_devices.py", pytestconfig.option.markexpr)


def test_a_mesh_in_words():
    mesh = mesh_lib.parse_mesh("model=1, data=1")
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    for wrong in ("", "4", "data", "data=x", "data=1,data=1", "rows=2", "data=-1"):
        with pytest.raises(ValueError, match="such as data=2,model=4"):
            mesh_lib.parse_mesh(wrong)
    with pytest.raises(ValueError, match="data is 0; a mesh has at least 1"):
        mesh_lib.parse_mesh("data=0")
    with pytest.raises(ValueError, match="needs 6000 devices and there"):
        mesh_lib.parse_mesh("data=2,model=3000")


@pytest.mark.parametrize(
    "model, heads, kv, message",
    [
        (3, 8, 2, "8 attention heads cannot be shared by model=3 devices; use one of"),
        (4, 12, 3, "3 key heads cannot be shared by model=4 devices"),
    ],
)
def test_a_mesh_that_does_not_divide_the_heads(model, heads, kv, message):
    lm = tiny_lm.tiny_lm(num_attention_heads=heads, num_key_value_heads=kv, head_dim=8)
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = AbstractMesh((1, model), ("data", "model"), axis_types=axes)
    with pytest.raises(ValueError, match=message):
        mesh_lib.check_mesh(mesh, lm.config)


def test_a_mesh_of_other_axes():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="name them data and model"):
        mesh_lib.check_mesh(mesh, tiny_lm.tiny_lm().config)


def test_a_mesh_of_one_device_and_wrong_weights(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tiny_lm.write_lm(tmp_path)
    want, got = jaxhal.load(folder), jaxhal.load(folder, mesh="data=1,model=1")
    # A result that is half there goes on over the mesh that it began on.
    one, other = (settings_of(lm, [], 8) for lm in (want, got))
    assert {name for name in one if one[name] != other[name]} == {"mesh"}
    for a, b in zip(*map(jax.tree.leaves, (want.params, got.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] = np.nan
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite values"):
        jaxhal.load(folder, mesh="data=1")
    tensors[name] = tensors[name][1:]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name} has shape .* does not give"):
        jaxhal.load(folder, mesh="data=1")
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        jaxhal.load(folder, mesh="data=1")
