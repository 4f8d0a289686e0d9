"""The engine with the kernels for Hopper GPUs against plain XLA in bfloat16, where there is such a GPU."""

import random

import jax
import pytest
from tiny_tokenizer import byte_level

from jaxserve.bench.shapes import SMALL_SHAPES, write_config
from jaxserve.execution.programs import model
from jaxserve.layers import launch
from jaxserve.llm import LLM
from jaxserve.quantization import ggml
from jaxserve.quantization.scheme import SCHEMES, Scheme
from jaxserve.sampling_params import SamplingParams

NUM_TOKENS = 24
OTHER_CODES = {
    "nf4": Scheme(codes="nf4", group_size=64),
    "nvfp4": Scheme(codes="e2m1", group_size=16, scale_dtype="float8_e4m3fn", factor_dtype="float32"),
    **{name: ggml.SCHEMES[name] for name in ("Q4_K", "Q6_K")},
}


@pytest.fixture(autouse=True)
def _prompts_are_two_programs(monkeypatch):
    """Cut the forward passes of this small model into two programs, as those of larger models are."""
    monkeypatch.setattr(launch, "MIN_LAYERS", 2)
    monkeypatch.setattr(launch, "FIRST_PROGRAM", 2)
    monkeypatch.setitem(launch.CUTS, "in programs", (1.3,))
    monkeypatch.setattr(model, "MIN_BYTES_IN_PROGRAMS", 0)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("shape", "max_num_seqs"), [*((shape, 32) for shape in SMALL_SHAPES), ("llama", 12), ("many-heads", 12)]
)
def test_kernels_choose_what_xla_finds_as_likely(tmp_path, shape, max_num_seqs):
    """Chunks, prefix hits, many rows and few: each greedy token is the likeliest in plain XLA too, up to rounding."""
    compare_with_xla(tmp_path, SMALL_SHAPES[shape], max_num_seqs=max_num_seqs)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("shape", "kv_cache_dtype"),
    [
        *(("llama", dtype) for dtype in ("fp8", "fp8_e5m2", "int8")),
        *((shape, "fp8") for shape in ("many-heads", "window", "caps-and-windows", "experts", "latents")),
        *((shape, "int8") for shape in ("latents", "heads-of-two-sizes", "delta-rule")),
    ],
)
def test_kernels_read_and_write_kv_in_8_bits_as_xla_does(tmp_path, shape, kv_cache_dtype):
    compare_with_xla(tmp_path, SMALL_SHAPES[shape], max_num_seqs=32, kv_cache_dtype=kv_cache_dtype, bound=0.1)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("shape", "kv_cache_dtype"),
    [
        *((shape, "auto") for shape in ("llama", "experts", "latents", "delta-rule", "short-convolutions")),
        ("llama", "fp8"),
    ],
)
def test_tokens_drawn_with_drafts_are_as_likely(tmp_path, shape, kv_cache_dtype):
    """Texts of a random model repeat themselves: drafts of lookup are accepted, and refused."""
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {"kv_cache_dtype": kv_cache_dtype, "speculative_config": drafts}
    compare_with_xla(
        tmp_path, SMALL_SHAPES[shape], max_num_seqs=12, bound=0.1 if kv_cache_dtype == "fp8" else 0.03, **options
    )


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(("shape", "max_num_seqs"), [("llama", 12), ("llama", 32), ("experts", 32)])
@pytest.mark.parametrize("quantization", ["int4", "fp8", "int8"])
def test_kernels_of_quantized_weights_choose_what_xla_finds_as_likely(tmp_path, quantization, shape, max_num_seqs):
    compare_with_xla(tmp_path, SMALL_SHAPES[shape], max_num_seqs=max_num_seqs, quantization=quantization)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("nf4", "llama"),
        ("nvfp4", "llama"),
        ("Q4_K", "llama"),
        *((name, "experts") for name in ("nvfp4", "Q4_K", "Q6_K")),
    ],
)
def test_kernels_of_other_codes_choose_what_xla_finds_as_likely(tmp_path, monkeypatch, name, shape):
    """They take int4's place: `--quantization` does not round to them."""
    monkeypatch.setitem(SCHEMES, "int4", OTHER_CODES[name])
    sizes = SMALL_SHAPES[shape] | ({"moe_intermediate_size": 256} if shape == "experts" else {})
    # Scales and minimums of Q4_K are rounded to bfloat16: its weights change by 2.4e-3 of their norm.
    bound = 0.1 if name == "Q4_K" else 0.03
    compare_with_xla(tmp_path, sizes, max_num_seqs=32, quantization="int4", bound=bound)


@pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("shape", "quantization", "max_num_seqs"),
    [
        ("llama", None, 32),
        ("many-heads", None, 12),
        ("experts", None, 32),
        ("llama", "int4", 32),
        ("llama", "fp8", 12),
        ("experts", "fp8", 32),
        ("experts", "int4", 32),
    ],
)
def test_kernels_on_two_gpus_choose_what_xla_finds_as_likely_on_one(tmp_path, shape, quantization, max_num_seqs):
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 1024, "quantization": quantization}
    compare_with_xla(tmp_path, SMALL_SHAPES[shape], parallel={"tensor_parallel_size": 2}, **options)


@pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        ("llama", {"pipeline_parallel_size": 2}),
        ("experts", {"pipeline_parallel_size": 2}),
        ("experts", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_stages_and_whole_experts_on_two_gpus(tmp_path, shape, parallel):
    compare_with_xla(tmp_path, SMALL_SHAPES[shape], max_num_seqs=32, parallel=parallel)


def compare_with_xla(
    tmp_path,
    shape,
    *,
    max_num_seqs,
    parallel=None,
    max_num_batched_tokens=256,
    quantization=None,
    kv_cache_dtype="auto",
    speculative_config=None,
    bound=0.03,
):
    folder = str(write_config(byte_level(tmp_path / "model"), shape))
    rng = random.Random(0)
    shared = [rng.randrange(1000) for _ in range(40)]
    prompts = [[rng.randrange(1000) for _ in range(rng.choice([1, 2, 15, 16, 17, 90, 300]))] for _ in range(30)]
    prompts += [shared + prompt for prompt in prompts[:10]]
    options = {"load_format": "dummy", "max_num_batched_tokens": max_num_batched_tokens, "warmup": "none"}
    # Plain XLA does not round activations.
    options |= {"quantization": quantization, "quantize_activations": False, "kv_cache_dtype": kv_cache_dtype}
    options |= {"max_num_seqs": max_num_seqs, "kv_cache_memory": 2**28, "progress": False, "compilation_cache_dir": ""}

    ours = {"kernels": "sm90", "speculative_config": speculative_config} | (parallel or {})
    with LLM(folder, **ours, **options) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        texts = [prompt + list(llm.generate([prompt], greedy)[0].outputs[0].token_ids) for prompt in prompts[:3]]
        outputs = llm.generate(prompts, greedy)
        assert not speculative_config or llm.stats().spec_decode_num_accepted_tokens
        texts += [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]

    with LLM(folder, kernels="xla", **options) as llm:
        scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=1))
    behind = []
    for text, output in zip(texts, scored, strict=True):
        for token, choices in zip(text[-NUM_TOKENS:], output.prompt_logprobs[-NUM_TOKENS:], strict=True):
            behind.append(max(choice.logprob for choice in choices.values()) - choices[token].logprob)
    assert max(behind) < bound  # of logits that differ by some 1e-2 between two ways of rounding
    assert sum(gap > 0 for gap in behind) < 0.1 * len(behind)
