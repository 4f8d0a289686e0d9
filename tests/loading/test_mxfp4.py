"""MXFP4 against the definition of its values. The parity test compares a model of it with transformers'."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDENS
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError
from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.loading.mxfp4 import PIECE, dequantize
from jaxserve.models import gpt_oss

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = np.array(MAGNITUDES + [-value for value in MAGNITUDES])
PREFIX = "model.layers.0.mlp.experts.down_proj"


def test_every_byte_under_every_scale():
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (256, 16, 16))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16))
    got = dequantize(np.ascontiguousarray(blocks), np.ascontiguousarray(scales))
    assert got.shape == (256, 512)
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(256, 512)
    expected = np.ldexp(VALUES[halves], np.arange(256)[:, None] - 127)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got[:255].view(np.uint16), expected[:255].view(np.uint16))
    assert np.isnan(got[255].astype(np.float32)).all()  # that scale is not a number


def test_more_blocks_than_one_piece():
    rng = np.random.default_rng(0)
    rows = PIECE // 4 + 3
    blocks, scales = (
        rng.integers(256, size=(rows, 5, 16), dtype=np.uint8),
        rng.integers(250, size=(rows, 5), dtype=np.uint8),
    )
    whole = dequantize(blocks, scales)
    for row in (0, rows // 2, rows - 1):
        np.testing.assert_array_equal(whole[row], dequantize(blocks[row], scales[row]))
    assert dequantize(blocks[:0], scales[:0]).shape == (0, 160)


@pytest.fixture
def checkpoint(tmp_path):
    path = next(path for path in GOLDENS if path.name == "gpt_oss_mxfp4")
    shutil.copy(path / "config.json", tmp_path)
    return tmp_path, load_file(path / "model.safetensors")


def load(path, tensors):
    save_file(tensors, path / "model.safetensors")
    specs = gpt_oss.FAMILY.param_specs(gpt_oss.FAMILY.config(load_config(path)))
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    return load_params(path, specs, dtype=np.dtype(jnp.float32), mesh=mesh, progress=False)


def test_experts_that_are_not_quantized_are_read_too(checkpoint):
    path, tensors = checkpoint
    expected = load(path, tensors)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        values = dequantize(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
        tensors[name] = np.ascontiguousarray(values.transpose(0, 2, 1))
    fields = json.loads((path / "config.json").read_text())
    del fields["quantization_config"]
    (path / "config.json").write_text(json.dumps(fields))
    jax.tree.map(np.testing.assert_array_equal, load(path, tensors), expected)


def test_what_is_wrong_with_blocks_and_scales_is_named(checkpoint):
    path, tensors = checkpoint
    blocks, scales = tensors[f"{PREFIX}_blocks"], tensors.pop(f"{PREFIX}_scales")
    with pytest.raises(CheckpointError, match=rf"missing: {PREFIX}; unexpected: {PREFIX}_blocks"):
        load(path, tensors)
    short = {f"{PREFIX}_scales": scales[..., :0]}
    with pytest.raises(
        CheckpointError, match=rf"{PREFIX} is MXFP4 of .* scales U8 \[4, 32, 0\] and not of \[4, 32, 32\]"
    ):
        load(path, tensors | short)
    signed = {f"{PREFIX}_blocks": blocks.view(np.int8), f"{PREFIX}_scales": scales}
    with pytest.raises(CheckpointError, match=rf"{PREFIX} is MXFP4 of blocks I8 \[4, 32, 1, 16\]"):
        load(path, tensors | signed)
