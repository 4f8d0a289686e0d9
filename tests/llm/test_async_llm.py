"""AsyncLLM: `async for` over a scripted engine; and what LLM has under vLLM's names."""

import asyncio
import inspect

import numpy as np
import pytest
from fake_client import FakeEngineClient, Script, echo

from jaxserve import AsyncLLM, SamplingParams
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.llm import LLM

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def client():
    return FakeEngineClient(echo)


@pytest.fixture
def llm(client, tokenizer):
    llm = LLM.from_frontend(Frontend(client, tokenizer, seed=0, default_sampling={"temperature": 0.25}))
    yield llm
    llm.close()


@pytest.fixture
def opened(client, tokenizer):
    """An AsyncLLM, for `async with`."""
    return AsyncLLM.from_frontend(Frontend(client, tokenizer, seed=0))


async def text_of(outputs):
    return "".join([output.outputs[0].text async for output in outputs])


async def test_requests_stream_side_by_side(opened):
    params = SamplingParams(max_tokens=6)
    async with opened as llm:
        texts = await asyncio.gather(*(text_of(llm.generate(prompt, params)) for prompt in ("abc", "xy", "q")))
    assert texts == ["bcbcbc", "yyyyyy", "qqqqqq"]  # without the first token


async def test_chats_and_vectors(opened, tokenizer):
    async with opened as llm:
        assert len(await text_of(llm.chat([USER], SamplingParams(max_tokens=3)))) == 3
        assert (await llm.embed("abc", normalize=False)).embedding.shape == (4,)
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.get_tokenizer() is tokenizer


async def test_leaving_a_stream_aborts_its_request(tokenizer):
    client = FakeEngineClient(lambda request: Script(token_ids=[65], hangs=True))
    async with AsyncLLM.from_frontend(Frontend(client, tokenizer, seed=0)) as llm:
        outputs = llm.generate("a", SamplingParams(max_tokens=9))
        async for _ in outputs:
            break
        await outputs.aclose()
        assert len(client.aborted) == 1


async def test_mistakes_are_raised_where_they_are_awaited(opened):
    async with opened as llm:
        with pytest.raises(InvalidRequest, match="context"):
            await text_of(llm.generate([65] * 10**5))
        with pytest.raises(TypeError, match="chat has no option 'tool'; did you mean 'tools'"):
            await text_of(llm.chat([USER], tool=[]))
        with pytest.raises(InvalidRequest, match="dimensions must be in"):
            await llm.embed("a", dimensions=5)
        assert await text_of(llm.generate("ab", SamplingParams(max_tokens=2))) == "bb"


def test_token_ids_may_be_given_by_name(llm):
    params = SamplingParams(max_tokens=2)
    many = llm.generate(prompt_token_ids=[[65, 66], [67]], sampling_params=params, use_tqdm=False)
    assert [output.prompt_token_ids for output in many] == [[65, 66], [67]]
    (one,) = llm.generate(prompt_token_ids=[65, 66], sampling_params=params, use_tqdm=False)
    assert one.outputs[0].token_ids == many[0].outputs[0].token_ids
    for wrong in ({}, {"prompts": "a", "prompt_token_ids": [1]}):
        with pytest.raises(InvalidRequest, match="either prompts or prompt_token_ids"):
            llm.generate(**wrong)


def test_scores_are_cosines(llm):
    vectors = [np.asarray(output.embedding) for output in llm.embed(["a", "b", "c"], use_tqdm=False)]
    scores = llm.score("a", ["a", "b", "c"], use_tqdm=False)
    np.testing.assert_allclose(scores, [vectors[0] @ vector for vector in vectors], rtol=1e-5)
    np.testing.assert_allclose(llm.score(["a", "b"], ["b", "b"], use_tqdm=False)[1], 1, rtol=1e-5)
    with pytest.raises(InvalidRequest, match="as many as text_2: 2 and 3"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_encoding_is_an_embedding_of_any_length(llm):
    (raw,) = llm.encode("abc", use_tqdm=False)
    (same,) = llm.embed("abc", normalize=False, use_tqdm=False)
    np.testing.assert_array_equal(raw.embedding, same.embedding)


def test_the_models_own_sampling_parameters(llm):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)


HARMLESS = [
    {"trust_remote_code": True, "enforce_eager": True, "disable_log_stats": True, "swap_space": 4},
    {"tokenizer_mode": "mistral", "config_format": "mistral", "load_format": "mistral"},
    {"task": "embed", "runner": "pooling", "limit_mm_per_prompt": {"image": 1}, "cpu_offload_gb": 0},
    {"compilation_config": 3, "distributed_executor_backend": "mp", "nnodes": 1},
    {"enable_lora": False, "lora_modules": [], "enable_chunked_prefill": False},
    {"guided_decoding_backend": "xgrammar", "served_model_name": "a", "disable_custom_all_reduce": True},
]


@pytest.mark.parametrize("options", HARMLESS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("owner", [LLM, AsyncLLM])
def test_options_of_vllm_that_need_nothing_are_taken_and_logged(owner, options, caplog):
    # A wrong value, so that nothing is loaded.
    with pytest.raises(ConfigError, match=r"^block_size must be a power of two up to 512, got 3$"):
        owner("scribe-2m", **options, kv_cache_memory_bytes=2**30, async_scheduling=True, block_size=3)
    named = {name for record in caplog.records for name in record.message.split(": ")[0].split(", ")}
    assert named == options.keys()
    assert all(": nothing is needed: " in record.message and "--" not in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype: 'nvfp4' is not supported: keys and values"),
        ({"load_format": "pt"}, "load_format: 'pt' is not supported: convert it to safetensors"),
        ({"data_parallel_size": 2}, "data_parallel_size: 2 is not supported; only 1"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend: 'ray' is not supported; only mp, uni"),
        ({"scheduler_cls": "a.B"}, "scheduler_cls: instead: scheduler='continuous' or scheduler='static'"),
        ({"disable_sliding_window": True}, "disable_sliding_window: instead: max_model_len up to the window"),
        ({"rope_theta": 1e6}, "rope_theta: instead: hf_overrides="),
        (
            {"enable_lora": True, "max_loras": 2, "speculative_model": "a", "block_size": 3, "max_num_seqs": 0},
            "enable_lora, max_loras: instead: merge the adapter into the model with peft before it is served; "
            "speculative_model: not supported; max_num_seqs must be in [1, 2147483647], got 0; block_size must be",
        ),
    ],
)
@pytest.mark.parametrize("owner", [LLM, AsyncLLM])
def test_options_of_vllm_that_are_refused_are_so_at_once_and_in_pythons_spelling(owner, options, message):
    with pytest.raises(ConfigError) as caught:
        owner("scribe-2m", **options)
    assert str(caught.value).startswith(message)


def test_misspelt_options_are_named_with_what_else_is_wrong():
    with pytest.raises(TypeError) as caught:
        LLM("scribe-2m", max_num_seq=3, frob=1, enable_lora=True)
    assert str(caught.value).startswith("LLM has no option 'max_num_seq'; did you mean 'max_num_seqs'?; LLM has no ")
    assert str(caught.value).endswith("before it is served")


def test_both_take_the_same_options():
    assert inspect.signature(AsyncLLM) == inspect.signature(LLM)
