"""The choices that follow from the kind of device, for kinds that are not here."""

import types

import numpy as np
import pytest
from engine_harness import GOLDENS

from jaxserve.config import EngineConfig
from jaxserve.engine.checkpoint import choose_dtype, read_checkpoint
from jaxserve.engine.device import choose_kernels, has_bfloat16
from jaxserve.errors import ConfigError


def gpu(kind, capability):
    return types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
H100, H200 = gpu("NVIDIA H100 80GB HBM3", "9.0"), gpu("NVIDIA H200", "9.0")
OTHERS = [
    gpu("Tesla V100-SXM2-16GB", "7.0"),
    gpu("Tesla T4", "7.5"),
    gpu("NVIDIA A100-SXM4-40GB", "8.0"),
    gpu("NVIDIA L4", "8.9"),
    gpu("NVIDIA B200", "10.0"),
    gpu("NVIDIA GeForce RTX 5090", "12.0"),
]
BFLOAT16 = np.dtype("bfloat16")


@pytest.mark.parametrize("device", OTHERS, ids=lambda device: device.device_kind)
def test_a_gpu_without_kernels_runs_plain_xla_with_one_warning_and_has_no_others(device, caplog):
    assert choose_kernels("auto", device, BFLOAT16) == "xla"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"no kernels for {device.device_kind}" in record.message
    assert "plain XLA" in record.message
    with pytest.raises(ConfigError, match=f"no kernels for {device.device_kind}: leave --kernels out"):
        choose_kernels("sm90", device, BFLOAT16)


@pytest.mark.parametrize(
    ("requested", "device", "expected"),
    [
        ("auto", CPU, "xla"),
        ("auto", H100, "sm90"),
        ("auto", H200, "sm90"),
        ("sm90", H200, "sm90"),
        ("xla", H100, "xla"),
        ("xla", OTHERS[1], "xla"),
        ("xla", CPU, "xla"),
    ],
)
def test_nothing_is_said_of_what_is_as_it_should_be(requested, device, expected, caplog):
    assert choose_kernels(requested, device, BFLOAT16) == expected
    assert not caplog.records


def test_what_no_kernel_takes_is_refused_by_name():
    with pytest.raises(ConfigError, match="dtype is float32, but there are kernels for bfloat16 and float16 only"):
        choose_kernels("auto", H200, np.dtype("float32"))
    with pytest.raises(ConfigError, match="kernels is sm90, but the model runs on a CPU"):
        choose_kernels("sm90", CPU, BFLOAT16)


@pytest.mark.parametrize(
    ("capability", "expected"), [("7.0", False), ("7.5", False), ("8.0", True), ("9.0", True), ("10.0", True)]
)
def test_gpus_before_ampere_have_no_bfloat16(capability, expected):
    assert has_bfloat16(gpu("", capability)) == expected


@pytest.mark.parametrize(
    ("model", "stored", "requested", "expected", "says"),
    [
        ("llama_untied", "bfloat16", "auto", "float16", "dtype is float16: this GPU has no bfloat16"),
        ("gemma2_caps", "bfloat16", "auto", "float32", "dtype is float32: this GPU has no bfloat16"),
        ("gemma3_two_thetas", "bfloat16", "auto", "float32", "dtype is float32: this GPU has no bfloat16"),
        ("llama_untied", "bfloat16", "bfloat16", "bfloat16", "XLA computes in float32"),
        ("llama_untied", "float16", "auto", "float16", ""),
        ("llama_untied", "bfloat16", "float32", "float32", ""),
    ],
)
def test_the_dtype_where_there_is_no_bfloat16(model, stored, requested, expected, says, caplog):
    config, checkpoint = read_checkpoint(EngineConfig(model=str(GOLDENS / model), dtype=requested), progress=False)
    checkpoint = checkpoint._replace(fields=checkpoint.fields | {"dtype": stored, "torch_dtype": stored})
    dtype = choose_dtype(config, checkpoint, is_cpu=False, has_bfloat16=False)
    assert dtype == np.dtype(expected)
    assert (says in caplog.text) if says else not caplog.records
    caplog.clear()
    usual = choose_dtype(config, checkpoint, is_cpu=False, has_bfloat16=True)
    assert usual == np.dtype(stored if requested == "auto" else requested)
    assert not caplog.records
