"""Models, tokens, health, version and metrics."""

import asyncio
import re

import msgspec
import openai
import pytest
from fake_client import Script
from serving import asynchronous, running, synchronous
from waiting import wait_until

import jaxserve
from jaxserve.engine.client import EngineStats
from jaxserve.metrics import (
    ACCEPTED_PER_POSITION,
    COUNTERS,
    DRAFTING,
    ENGINE_HISTOGRAMS,
    GAUGES,
    WAITING_REASONS,
    Metrics,
)

USER = {"role": "user", "content": "hi"}


def test_models_with_the_openai_client(server):
    with synchronous(server) as client:
        (model,) = client.models.list()
        assert (model.id, model.object, model.owned_by) == ("fake", "model", "jaxserve")
        assert model.model_dump()["max_model_len"] == 512
        assert client.models.retrieve("fake") == model
        with pytest.raises(openai.NotFoundError, match="other"):
            client.models.retrieve("other")


def test_a_model_is_served_under_each_of_its_names(tokenizer):
    with running(tokenizer, served_model_name=("first", "org/second")) as server:
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["first", "org/second"]
        assert server.get("/v1/models/org/second").json()["id"] == "org/second"
        for name in ("first", "org/second", None):
            body = {"prompt": "a", "max_tokens": 1} | ({} if name is None else {"model": name})
            assert server.post("/v1/completions", body).json()["model"] == "first"
        assert server.post("/v1/completions", {"prompt": "a", "model": "third"}).status_code == 404


@pytest.mark.parametrize("text", ["", "hello", "naïve 🙂\n", "<|im_start|>x"])
def test_tokens_and_back(server, text):
    answer = server.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert answer["tokens"] == server.tokenizer.encode(text, add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokens_of_a_chat_are_those_of_the_chat(server):
    tokens = server.post("/tokenize", {"messages": [USER]}).json()["tokens"]
    server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1})
    assert server.client.submitted[0].prompt_token_ids == tokens


def test_probes(server):
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/live").json() == {"status": "ok"}
    assert server.get("/version").json() == {"version": jaxserve.__version__}


def values(exposition):
    """name{labels without the model} -> value"""
    lines = [line for line in exposition.splitlines() if not line.startswith("#")]
    assert all('model_name="fake"' in line for line in lines)
    mark = re.compile(r',model_name="fake"|model_name="fake",?')
    found = (mark.sub("", line).replace("{}", "").rsplit(" ", 1) for line in lines)
    return {name: float(value) for name, value in found}


def metrics(server):
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return values(answer.text)


def test_metrics_of_requests(tokenizer):
    with running(tokenizer) as server:
        server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5, "n": 2})
        server.says("x")
        server.post("/v1/chat/completions", {"messages": [USER], "stream": True})
        server.play = lambda request: Script(token_ids=[], error="NaN")
        server.post("/v1/completions", {"prompt": "abc"})
        server.client.refusal = jaxserve.errors.QueueFull("full")
        server.post("/v1/completions", {"prompt": "abc"})
        found = metrics(server)
    assert found["jaxserve:prompt_tokens_total"] == 4 + 4 + len(server.client.submitted[2].prompt_token_ids)
    assert found["jaxserve:generation_tokens_total"] == 11
    assert found['jaxserve:request_success_total{finished_reason="length"}'] == 2
    assert found['jaxserve:request_success_total{finished_reason="stop"}'] == 1
    assert found['jaxserve:request_success_total{finished_reason="error"}'] == 1
    assert found["jaxserve:time_to_first_token_seconds_count"] == 3
    assert found["jaxserve:e2e_request_latency_seconds_count"] == 4
    assert found["jaxserve:request_queue_time_seconds_count"] == 2
    assert found["jaxserve:request_prefill_time_seconds_count"] == 2
    assert found["jaxserve:request_decode_time_seconds_count"] == 3
    assert found["jaxserve:inter_token_latency_seconds_count"] == 8, "one between two tokens"
    assert found["jaxserve:num_requests_running"] == 0
    assert found["jaxserve:request_prompt_tokens_count"] == 3
    assert found["jaxserve:request_params_n_sum"] == 4
    assert found["jaxserve:request_max_num_generation_tokens_sum"] == 5 + 1 + 0
    assert found["jaxserve:request_generation_tokens_sum"] == 11
    assert found["jaxserve:request_inference_time_seconds_count"] == 3
    assert found["jaxserve:request_params_max_tokens_sum"] == sum(
        request.max_tokens for request in server.client.submitted if request.request_id == request.group_id
    )
    [cache] = [name for name in found if name.startswith('jaxserve:cache_config_info{block_size="')]
    assert 'gpu_memory_utilization="' in cache


def test_metrics_of_the_engine_are_read_from_its_snapshot():
    fields = EngineStats.__struct_fields__
    numbers = {name: i for i, name in enumerate(fields) if not name.endswith(("_counts", "_per_pos", "expert_tokens"))}
    counts = {kept.counts: (2,) + (0,) * (len(kept.bounds) - 2) + (1, 4) for kept in ENGINE_HISTOGRAMS.values()}
    held = {"kv_bytes_held": {"full": 70, "window of 8": 30}}
    accepted = {"spec_decode_num_accepted_tokens_per_pos": (6, 3), "expert_tokens": (5, 0)}
    snapshot = msgspec.convert(numbers | counts | held | accepted, EngineStats, strict=False)
    found = values(Metrics(model="fake", stats=lambda: {"0": snapshot}, cache_config={}).render().decode())
    for name, (field, _) in {**GAUGES, **COUNTERS, **DRAFTING}.items():
        assert found[f"jaxserve:{name}"] == fields.index(field)
    for position, count in enumerate((6, 3)):
        assert found[f'jaxserve:{ACCEPTED_PER_POSITION}{{position="{position}"}}'] == count
    assert found['jaxserve:expert_tokens_total{expert="0"}'] == 5
    assert found['jaxserve:kv_cache_held_bytes{layers="full"}'] == 70
    assert found['jaxserve:kv_cache_held_bytes{layers="window of 8"}'] == 30
    for name, kept in ENGINE_HISTOGRAMS.items():
        assert found[f"jaxserve:{name}_sum"] == fields.index(kept.total)
        assert found[f"jaxserve:{name}_count"] == 7
        first, *_, last = (f'jaxserve:{name}_bucket{{le="{float(bound)}"}}' for bound in kept.bounds)
        assert (found[first], found[last]) == (2, 3)


def test_every_field_of_the_snapshot_is_shown():
    shown = {field for field, _ in [*GAUGES.values(), *COUNTERS.values(), *DRAFTING.values()]}
    shown |= {field for kept in ENGINE_HISTOGRAMS.values() for field in (kept.counts, kept.total)}
    shown |= {"expert_tokens"} | {
        "num_steps",
        "wait_seconds",
        "kv_bytes_held",
        "spec_decode_num_accepted_tokens_per_pos",
        *WAITING_REASONS.values(),
    }
    assert shown == set(EngineStats.__struct_fields__)


def test_two_servers_have_metrics_of_their_own(tokenizer):
    with running(tokenizer) as one, running(tokenizer) as other:
        one.post("/v1/completions", {"prompt": "abc", "max_tokens": 1})
        assert metrics(one)["jaxserve:prompt_tokens_total"] == 4
        assert metrics(other)["jaxserve:prompt_tokens_total"] == 0


async def test_probes_do_not_wait_for_generations(server):
    server.play = lambda request: Script(token_ids=[], hangs=True)
    async with asynchronous(server) as client:
        waiting = [asyncio.create_task(client.completions.create(model="fake", prompt="x")) for _ in range(8)]
        await asyncio.to_thread(wait_until, lambda: server.client.num_running == 8)
        answers = [await asyncio.to_thread(server.get, path) for path in ("/health", "/metrics", "/v1/models")]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
    wait_until(lambda: server.client.num_running == 0)
