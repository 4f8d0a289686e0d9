"""The last lines of a start: what they say, and that the command in them works as it stands."""

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
from unittest import mock

import pytest
from certificates import make_certificate
from serving import running
from waiting import wait_until

from jaxserve import logs
from jaxserve.config import ServerConfig
from jaxserve.engine.client import EngineInfo
from jaxserve.server.process.announcement import announce, curl, url_of


@pytest.fixture
def log(caplog):
    """The record of what is logged."""
    caplog.set_level(logging.INFO, "jaxserve")
    return caplog


def announced(log):
    """The command of the last line, and the other lines by name."""
    wait_until(lambda: any("\n  try" in message for message in log.messages))
    first, context, memory, playground, last = log.messages[-1].splitlines()
    lines = dict(line.split(maxsplit=1) for line in (context, memory, playground, last))
    return lines.pop("try"), {"first": first, **lines}


def run(command, **environment):
    shell = ["sh", "-c", command.replace("curl ", "curl -sS ", 1)]
    result = subprocess.run(shell, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_command_works_as_it_stands(tokenizer, log, host):
    with running(tokenizer, host=host) as server:
        command, lines = announced(log)
        answer = run(command)
        assert lines["first"] == (f"serving fake at {lines['playground']}v1")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert server.client.submitted[0].max_tokens == 64


def test_a_model_without_a_chat_template_is_asked_for_a_completion(tokenizer, log, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "has_chat_template", property(lambda _: False))
    with running(tokenizer):
        assert run(announced(log)[0])["choices"][0]["text"]


def test_a_classifier_is_asked_for_labels():
    command = curl("http://127.0.0.1:8000", ServerConfig(), has_chat=True, can_generate=False)
    assert command.startswith("curl http://127.0.0.1:8000/classify ")
    assert '{"input": ' in command


def test_a_key_is_named_and_not_shown(tokenizer, log):
    with running(tokenizer, api_key=["secret-1"]):
        command, _ = announced(log)
        assert run(command, JAXSERVE_API_KEY="secret-1")["choices"]
        assert "error" in run(command, JAXSERVE_API_KEY="another")
    assert "secret-1" not in log.text


def test_the_certificate_is_trusted(tokenizer, log, tmp_path):
    certificate, key = make_certificate(tmp_path, "server")
    with running(tokenizer, ssl_certfile=certificate, ssl_keyfile=key):
        command, lines = announced(log)
        assert run(command)["choices"]
    assert lines["playground"].startswith("https://127.0.0.1:")


INFO = EngineInfo(
    model="m",
    vocab_size=10,
    hidden_size=1,
    max_model_len=8192,
    block_size=16,
    num_blocks=1,
    max_num_seqs=1,
    max_num_batched_tokens=1,
    eos_token_ids=(),
    weight_bytes=1,
    kv_kinds=(),
    kv_dtype="bfloat16",
    device="2 x NVIDIA H200",
    total_weight_bytes=15 * 2**30,
    kv_cache_bytes=2**22,
    num_full_requests=1234,
)


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_for_people_are_fields_for_collectors(monkeypatch, form):
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    logs.configure("info", form)
    url = "http://127.0.0.1:8000"
    announce(INFO, ServerConfig(root_path="/llm"), names=("a", "b"), url=url, has_chat=True)
    if form == "json":
        (line,) = text.getvalue().splitlines()
        record = json.loads(line)
        assert record["message"] == "serving a b at http://127.0.0.1:8000/v1"
        assert record["models"] == ["a", "b"]
        assert record["max_model_len"] == 8192
        assert record["num_full_requests"] == 1234
        assert record["weight_bytes"] == 15 * 2**30
        assert record["kv_cache_bytes"] == 2**22
        assert record["device"] == "2 x NVIDIA H200"
        assert record["playground"] == "http://127.0.0.1:8000/llm/"
        assert record["curl"].startswith("curl http://127.0.0.1:8000/v1/chat/completions ")
        return
    first, *rest = text.getvalue().splitlines()
    assert first.endswith("serving a b at http://127.0.0.1:8000/v1")
    assert [line.split()[0] for line in rest] == ["context", "memory", "playground", "try"]
    assert "8,192 tokens; the KV cache holds 1,234 such requests" in rest[0]
    assert "15.00 GiB of weights, 4.00 MiB of KV cache (bfloat16) on 2 x NVIDIA H200" in rest[1]
    for fact in ("8,192 tokens", "GiB of weights", "/v1/chat"):  # each is said once
        assert len(re.findall(fact, text.getvalue())) == 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("192.0.2.1", "192.0.2.1"), ("2001:db8::1", "[2001:db8::1]")],
)
def test_the_address_is_one_that_this_machine_reaches(host, expected):
    listener = mock.create_autospec(socket.socket, instance=True)
    listener.getsockname.return_value = (host, 8000)
    assert url_of(listener, ServerConfig()) == f"http://{expected}:8000"
