"""200 hostile schemas and grammars next to 16 good streams, none of which is affected."""

import concurrent.futures
import threading

import pytest
from hostile_grammars import bodies
from serving import assert_error, frames, serving
from waiting import PATIENCE

from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
NUM_STREAMS = 16
NUM_CLIENTS = 8


@pytest.fixture(scope="module")
def server(random_model, random_engine):
    with serving(Frontend(random_engine, Tokenizer.load(random_model), seed=0)) as server:
        yield server


def stream(server, seed):
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 40, "seed": seed, "ignore_eos": True}
    form = {"structured_outputs": {"regex": "[a-z]{30}"}} if seed % 2 else {}
    choices = [event["choices"][0] for event in frames(server.post(CHAT, body | form))]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


@pytest.mark.slow
def test_a_worker_survives_hostile_grammars_beside_good_streams(server):
    hostile = list(bodies())
    hostile += [body.replace("{", "{ ", 1) for body in hostile[:: len(hostile) // 20]]
    assert len(hostile) >= 200
    alone = [stream(server, seed) for seed in range(NUM_STREAMS)]
    is_over = threading.Event()

    def listen(seed):
        texts = {stream(server, seed)}
        while not is_over.is_set():
            texts.add(stream(server, seed))
        return texts

    def attack(part):
        content = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 2, {part}}}'
        answer = server.request("POST", CHAT, content=content, headers={"Content-Type": "application/json"})
        return answer.status_code, part[:80], answer.text[:200]

    with (
        concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as listeners,
        concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as attackers,
    ):
        listening = [listeners.submit(listen, seed) for seed in range(NUM_STREAMS)]
        answers = list(attackers.map(attack, hostile))
        is_over.set()
    assert [future.result() for future in listening] == [{whole} for whole in alone]
    assert [answer for answer in answers if answer[0] not in (200, 400)] == []
    assert sum(status == 400 for status, *_ in answers) > 100
    assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_a_small_schema_does_not_wait_behind_large_ones(server):
    """Eight clients with schemas of 3,000 names, and one with a small schema, which is answered before most."""
    finished = []

    def ask(schema, name):
        body = {"messages": MESSAGES, "max_tokens": 2, "structured_outputs": {"json": schema}}
        assert server.post(CHAT, body).status_code == 200
        finished.append(name)

    def large(number):
        names = {f"{number}{index}": True for index in range(3000)}
        return {"type": "object", "properties": names, "required": [*names]}

    ask({"type": "string"}, "first")
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS + 1) as clients:
        for number in range(NUM_CLIENTS):
            clients.submit(ask, large(number), "large")
        small = clients.submit(ask, {"type": "integer"}, "small")
        small.result(PATIENCE)
        assert finished.count("large") <= 3
    assert len(finished) == NUM_CLIENTS + 2


def test_what_would_crash_the_compiler_is_a_400_that_names_its_field(server):
    for body, param in (
        ({"structured_outputs": {"json": {"const": -(2**63)}}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": -(2**63)}}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"enum": [{"a": -(2**63)}]}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ):
        assert_error(server.post(CHAT, {"messages": MESSAGES} | body), 400, param)
