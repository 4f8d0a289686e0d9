"""A trained model says what its authors published: alone, and 16 times in one batch of different lengths."""

import pytest

from jaxserve import LLM, SamplingParams

NUM_TOKENS = 150


@pytest.fixture(scope="module")
def published(test_data):
    golden = (test_data / "models/stories260K/GOLDEN.md").read_text()
    return golden.split("-t 0.0\n")[1].split("\n```")[0]


@pytest.fixture(scope="module")
def llm(test_data):
    options = {"warmup": "none", "max_num_batched_tokens": 32, "kv_cache_memory": 2**24, "progress": False}
    with LLM(str(test_data / "models/stories260K"), max_model_len=256, **options) as llm:
        yield llm


@pytest.mark.slow
def test_alone_and_in_a_batch(llm, published):
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    (alone,) = llm.generate("Once upon a time", greedy, use_tqdm=False)
    text = alone.prompt + alone.outputs[0].text
    assert published.startswith(text)
    assert len(text) > 350

    ids = alone.prompt_token_ids + alone.outputs[0].token_ids
    prompts = [ids[: 5 + 8 * number] for number in range(16)]
    lengths = [len(ids) - len(prompt) - number % 3 for number, prompt in enumerate(prompts)]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    continuations = [output.outputs[0].token_ids for output in outputs]
    assert continuations == [
        ids[len(prompt) : len(prompt) + length] for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert outputs[-1].num_cached_tokens > 0
