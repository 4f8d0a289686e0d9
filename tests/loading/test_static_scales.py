"""Static scales of keys and values: under which names they are found, and which are refused."""

import numpy as np
import pytest
from golden_folder import with_tensors
from quantized_models import FLOAT32, specs_of

from jaxserve.errors import CheckpointError
from jaxserve.layers.kv_scales import kv_scales_of, with_kv_scales
from jaxserve.loading.huggingface import open_weights
from jaxserve.loading.static_scales import static_scales


def of_second_layer(folder, scales, **options):
    tensors = {f"model.layers.1.self_attn.{name}": np.asarray(value, np.float32) for name, value in scales.items()}
    path = with_tensors(folder, tensors, **options)
    specs = specs_of(path)
    specs = with_kv_scales(specs, static_scales(path, specs))
    with open_weights(path, specs) as weights:
        first, second = (layer["attention"].get("kv_scales") for layer in weights["layers"])
        assert first is None
        assert with_kv_scales(specs_of(path), kv_scales_of(specs))["layers"][1]["attention"].keys() == set(
            specs["layers"][1]["attention"]
        )
        return None if second is None else second.read(FLOAT32)


@pytest.mark.parametrize(
    ("scales", "keys", "values"),
    [
        ({"k_scale": [0.25], "v_scale": 0.5}, [0.25, 0.25], [0.5, 0.5]),
        ({"attn.k_scale": [[[1.0]], [[2.0]]], "attn.v_scale": [3.0, 4.0]}, [1.0, 2.0], [3.0, 4.0]),
        ({"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}, [0.25, 0.25], [0.5, 0.5]),
        ({"qkv_proj.k_scale": 0.25, "qkv_proj.v_scale": 0.5}, [0.25, 0.25], [0.5, 0.5]),
        ({"k_proj.output_scale": [0.25], "v_proj.output_scale": [0.5]}, [0.25, 0.25], [0.5, 0.5]),
        ({"kv_scale": 0.25}, [0.25, 0.25], [0.25, 0.25]),
    ],
)
def test_names_and_shapes(tmp_path, scales, keys, values):
    np.testing.assert_array_equal(of_second_layer(tmp_path, scales), np.stack([keys, values], axis=1))


def test_latents_have_one(tmp_path):
    scales = {"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}
    np.testing.assert_array_equal(of_second_layer(tmp_path, scales, name="deepseek_v3_groups"), [[0.25, 0.5]])


def test_others_are_no_such_scales(tmp_path):
    assert of_second_layer(tmp_path, {"q_scale": 0.25, "prob_scale": 0.5}) is None


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": 0.0, "v_scale": 1.0}, r"k_scale must be positive and finite, got \[0.0\]"),
        ({"k_scale": 1.0, "v_scale": [1.0, -1.0]}, "v_scale must be positive"),
        ({"kv_scale": np.nan}, "kv_scale must be positive and finite"),
        ({"k_scale": 1.0}, "there must be one k_scale and one v_scale, or one kv_scale"),
        ({"k_scale": 1.0, "attn.k_scale": 1.0, "v_scale": 1.0}, "there must be one k_scale"),
        ({"k_scale": [1.0] * 3, "v_scale": 1.0}, "must have one value or 2, one a KV head"),
    ],
)
def test_what_is_no_scale_is_refused(tmp_path, scales, message):
    with pytest.raises(CheckpointError, match=message):
        of_second_layer(tmp_path, scales)
