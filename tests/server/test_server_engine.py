"""The server over the real engine: the same texts as without HTTP, whatever else is in the batch."""

import asyncio
import contextlib
import json

import httpx
import pytest
import tiny_tokenizer
from serving import asynchronous, frames, serving
from waiting import PATIENCE, wait_until

from jaxserve.config import EngineConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.local import LocalEngineClient
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 288,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
PROMPTS = [f"{'Once upon a time ' * (i % 3 + 1)}{i}" for i in range(6)]


@pytest.fixture(scope="module")
def engine_server(tmp_path_factory):
    """A random Llama of a few thousand weights behind the server."""
    folder = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("llama"))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        max_num_seqs=4,
        max_num_batched_tokens=4,
        block_size=4,
        kv_cache_memory=2**20,
        warmup="none",
    )
    with (
        contextlib.closing(LocalEngineClient.start(config)) as client,
        serving(Frontend(client, Tokenizer.load(folder), seed=0), served_model_name="tiny") as server,
    ):
        yield server


@pytest.fixture(scope="module")
def expected(engine_server):
    """The greedy continuation of each prompt, one at a time, without HTTP."""
    frontend = engine_server.frontend
    texts = []
    for index, prompt in enumerate(PROMPTS):
        group = frontend.prepare(prompt, SamplingParams(temperature=0, max_tokens=12), request_id=f"direct-{index}")
        assert list(frontend.generate([group]))
        texts.append(group.result().outputs[0].text)
    return texts


async def test_many_clients_get_what_each_would_get_alone(engine_server, expected):
    async with asynchronous(engine_server) as client:

        async def whole(prompt):
            answer = await client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=12)
            return answer.choices[0].text

        async def streamed(prompt):
            stream = await client.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(whole, PROMPTS), *map(streamed, PROMPTS)) == expected * 2


def test_all_prompts_in_one_request(engine_server, expected):
    body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 12, "n": 2}
    choices = engine_server.post("/v1/completions", body).json()["choices"]
    assert [choice["text"] for choice in choices] == [text for text in expected for _ in range(2)]


def test_chat_with_logprobs_and_usage(engine_server):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = frames(engine_server.post("/v1/chat/completions", body))
    tokens = [
        token
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for token in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert len(tokens) == last["usage"]["completion_tokens"] == 6
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0 for token in tokens)


def test_scores_do_not_depend_on_generating(engine_server):
    body = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1, "temperature": 0}
    scored = engine_server.post("/v1/completions", {**body, "max_tokens": 0}).json()["choices"][0]["logprobs"]
    both = engine_server.post("/v1/completions", {**body, "max_tokens": 3}).json()["choices"][0]["logprobs"]
    assert scored["token_logprobs"][1:] == pytest.approx(both["token_logprobs"][1:-3], abs=1e-4)
    assert len(scored["tokens"]) == len(both["tokens"]) - 3


def test_a_client_that_leaves_frees_its_blocks(engine_server):
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{engine_server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    wait_until(lambda: engine_server.frontend.client.stats().num_running == 0)
    wait_until(lambda: engine_server.frontend.client.stats().kv_positions_allocated == 0)


def test_times_of_a_request_add_up(engine_server):
    def sums():
        found = {}
        for line in engine_server.get("/metrics").text.splitlines():
            name, _, value = line.partition(" ")
            found[name.partition("{")[0].removeprefix("jaxserve:")] = float(value) if name[0] != "#" else None
        return found

    before = sums()
    engine_server.post("/v1/completions", {"prompt": PROMPTS[2], "max_tokens": 20, "ignore_eos": True})
    spent = {name: value - before[name] for name, value in sums().items() if name.endswith("_seconds_sum")}
    parts = [spent[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(spent["e2e_request_latency_seconds_sum"])


def test_the_second_time_comes_from_the_prefix_cache(engine_server):
    body = {"prompt": "A long beginning that is the same", "max_tokens": 1, "cache_salt": "second time"}
    counts = [
        engine_server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert counts[0] == 0
    assert counts[1] > 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_do_not_depend_on_company(engine_server, pooling):
    texts = [*PROMPTS, "x" * 128]  # in steps of four tokens, up to the whole context
    body = {"pooling": pooling, "cache_salt": pooling}
    together = engine_server.post("/v1/embeddings", {"input": texts, **body}).json()["data"]
    for text, entry in zip(texts, together, strict=True):
        (alone,) = engine_server.post("/v1/embeddings", {"input": text, **body}).json()["data"]
        assert entry["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)
    assert len({tuple(entry["embedding"]) for entry in together}) == len(texts)
    assert engine_server.frontend.client.stats().num_running == 0
