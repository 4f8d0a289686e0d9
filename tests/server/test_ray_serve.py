"""The Ray Serve application over a Ray of this machine, where Ray is installed (the extra "ray")."""

import asyncio
import os
import socket
import time

import httpx
import pytest
from waiting import PATIENCE

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

import ray
from ray import serve

from jaxserve import ray_serve
from jaxserve.errors import ConfigError

SCRIBE = "scribe-2m"
OPTIONS = {
    "model": SCRIBE,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": 2**22,
    "warmup": "none",
    "min_replicas": 2,
    "max_replicas": 2,
    "num_cpus": 0.1,
}


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "JAX_PLATFORMS": "cpu"}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(ray_serve.app(OPTIONS))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="unknown options: modle"):
        ray_serve.app({"modle": "a"})
    with pytest.raises(ConfigError, match="min_replicas and max_replicas must be in"):
        ray_serve.app({"min_replicas": 3, "max_replicas": 2})


def test_equal_beginnings_of_prompts_are_equal_bytes():
    one, two = (ray_serve.prompt_bytes(b'{"temperature": %d, "prompt": "Once upon %d"}' % (n, n)) for n in (1, 2))
    assert one[:-2] == two[:-2]
    assert ray_serve.prompt_bytes(b"[") == ray_serve.prompt_bytes(b"[]") == b""


@pytest.mark.slow
def test_routes_streams_and_the_death_of_a_replica(url):
    body = {"model": SCRIBE, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    async def ask(http, **more):
        return await http.post(f"{url}/v1/completions", json=body | more)

    async def run():
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            first = (await ask(http)).json()
            text = first["choices"][0]["text"]
            assert (await http.get(f"{url}/v1/models")).json()["data"][0]["id"] == SCRIBE
            refused = await ask(http, max_tokens=-1)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "max_tokens"
            streamed = await ask(http, stream=True)
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed.text.count("data: ") > 30
            running = [asyncio.create_task(ask(http, prompt=f"{n} is a number")) for n in range(24)]
            await asyncio.sleep(0.2)
            replicas = [
                ray.get_actor(actor["name"], namespace="serve")
                for actor in ray.util.list_named_actors(all_namespaces=True)
                if actor["name"].startswith("SERVE_REPLICA::") and "#engine#" in actor["name"]
            ]
            assert len(replicas) == 2
            ray.kill(replicas[0])
            answers = await asyncio.gather(*running)
            failed = [answer for answer in answers if answer.status_code != 200]
            assert len(failed) < len(answers)
            assert all(answer.status_code == 500 and "has died" in answer.text for answer in failed)
            again = [await ask(http) for _ in range(4)]
            assert [answer.json()["choices"][0]["text"] for answer in again] == [text] * 4

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < PATIENCE
