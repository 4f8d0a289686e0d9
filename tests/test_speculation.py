"""The options of speculative decoding: what they mean, and which are refused by name."""

import re
from typing import get_args

import pytest

from jaxserve.config import EngineConfig, Quantization
from jaxserve.errors import ConfigError
from jaxserve.speculation import BY_CHECKPOINT, QUANTIZATIONS, parse_speculation, with_acceptance

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def test_what_is_not_given():
    options = parse_speculation(NGRAM)
    assert options == parse_speculation('{"model": "ngram", "num_speculative_tokens": 4}')
    assert options == parse_speculation(NGRAM | {"method": "ngram_gpu"})
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == (5, 5)
    assert options.up_to(7, step_tokens=64).drafts_by_rows == ((1, 4), (2, 2), (3, 1))
    assert options.acceptance_rates == ()
    assert parse_speculation(None) is None


def test_drafters_with_weights():
    options = parse_speculation({"model": "a/b", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2})
    assert (options.method, options.model, options.tensor_parallel_size) == (BY_CHECKPOINT, "a/b", 2)
    mtp = {"num_speculative_tokens": 1, "draft_sample_method": "probabilistic"}
    assert parse_speculation(mtp | {"method": "glm4_moe_mtp"}) == parse_speculation(mtp | {"method": "mtp"})
    assert parse_speculation(mtp | {"method": "mtp"}).is_coupled
    assert parse_speculation({"method": "mtp"}).num_drafts == 1
    assert get_args(Quantization) == QUANTIZATIONS
    for name in (None, *QUANTIZATIONS):
        assert parse_speculation({"method": "mtp", "quantization": name}).quantization == name
    unknown = {"method": "eagle3", "model": "a/b"}
    assert parse_speculation(unknown).num_drafts == 0
    assert parse_speculation(unknown, published=3).num_drafts == 3
    assert parse_speculation(unknown | {"num_speculative_tokens": 2}, published=3).num_drafts == 2


@pytest.mark.parametrize(
    ("bounds", "expected"), [({"max": 3}, (3, 3)), ({"min": 2}, (2, 2)), ({"min": 2, "max": 7}, (2, 7))]
)
def test_bounds_of_lookup(bounds, expected):
    options = parse_speculation(NGRAM | {f"prompt_lookup_{name}": value for name, value in bounds.items()})
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == expected


def test_drafts_by_the_number_of_rows():
    options = parse_speculation(NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 2], [17, 99, 0]]})
    assert options.up_to(7, step_tokens=64).drafts_by_rows == ((4, 4), (16, 2), (99, 0))
    assert options.up_to(7, step_tokens=32).drafts_by_rows == ((4, 4), (10, 2), (16, 0), (99, 0))
    assert options.widths == [3, 5]
    assert [options.min_rows(width) for width in options.widths] == [5, 1]
    assert [options.max_rows(width) for width in options.widths] == [16, 4]


def test_no_drafts_that_the_largest_step_cannot_verify():
    options = parse_speculation(NGRAM)
    assert options.up_to(64, step_tokens=16).drafts_by_rows == ((3, 4), (5, 2), (8, 1))
    assert options.up_to(64, step_tokens=4).drafts_by_rows == ((1, 2), (2, 1))
    with pytest.raises(ConfigError, match=r"num_speculative_tokens leaves .* max_num_batched_tokens \(1\)"):
        options.up_to(64, step_tokens=1)


@pytest.mark.parametrize(
    ("length", "rates"), [(1, (0, 0, 0, 0)), (3, (1, 1, 0, 0)), (3.25, (1, 1, 0.25, 0)), (5, (1, 1, 1, 1))]
)
def test_synthetic_acceptance(length, rates):
    synthetic = NGRAM | {"rejection_sample_method": "synthetic"}
    assert parse_speculation(synthetic | {"synthetic_acceptance_length": length}).acceptance_rates == rates
    assert parse_speculation(with_acceptance(None, length)).acceptance_rates == rates  # as of `bench latency`
    assert parse_speculation(synthetic | {"synthetic_acceptance_rates": list(rates)}).acceptance_rates == rates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle3"}, "model is missing: the method eagle3 needs a checkpoint"),
        ({"method": "draft_model"}, "model is missing: the method draft_model needs a checkpoint"),
        ({"method": "eagle"}, "method 'eagle' is not supported yet: there is ngram"),
        ({"method": "mtp", "prompt_lookup_max": 3}, "prompt_lookup_max has no meaning for the method mtp"),
        ({"draft_sample_method": "probabilistic"}, "must be greedy: n-gram lookup has no probabilities"),
        ({"method": "suffix"}, "method 'suffix' is not supported: ngram with a prompt_lookup_max of 24"),
        ({"method": "medusa"}, "method 'medusa' is not supported: its heads"),
        ({"method": "tree"}, "method 'tree' is not supported: drafts are chains"),
        ({"method": "n-gram"}, "method 'n-gram' is unknown"),
        ({"method": None}, "method is missing"),
        ({"model": "a/b"}, "model is 'a/b', but the method ngram has no model"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be in"),
        ({"num_speculative_tokens": 32}, "num_speculative_tokens must be in"),
        ({"num_speculative_tokens": "4"}, "Expected `int | null`, got `str` - at `$.num_speculative_tokens`"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be in"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min must be in"),
        ({"prompt_lookup_max": 33}, "prompt_lookup_max must be at most 32"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 5]]}, "num_speculative_tokens_per_batch_size must have"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 4], [6, 8, 2]]}, "num_speculative_tokens_per_batch_size"),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 0]]},
            "num_speculative_tokens_per_batch_size drafts nothing",
        ),
        ({"rejection_sample_method": "block"}, "rejection_sample_method must be standard or synthetic"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method synthetic takes"),
        ({"synthetic_acceptance_length": 3}, 'synthetic_acceptance_length needs "rejection_sample_method"'),
        ({"draft_sample_method": "gumbel"}, "draft_sample_method must be greedy or probabilistic"),
        ({"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size has no meaning"),
        ({"quantization": "fp8"}, "quantization has no meaning for the method ngram"),
        ({"quantization": "gptq"}, "quantization must be int8, fp8, int4 or null, got 'gptq'"),
        ({"disable_eagle_block_drop": True}, "unknown field `disable_eagle_block_drop`"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        EngineConfig(speculative_config=NGRAM | changes)
    assert str(caught.value).startswith("speculative_config: ")


def test_length_of_synthetic_acceptance_has_bounds():
    for length in (0.5, 5.5):
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
        with pytest.raises(ConfigError, match="synthetic_acceptance_length must be in"):
            EngineConfig(speculative_config=NGRAM | synthetic)


def test_a_static_batch_has_no_drafts():
    with pytest.raises(ConfigError, match="speculative_config: the static scheduler"):
        EngineConfig(speculative_config=NGRAM, scheduler="static")
