"""`use_beam_search` over HTTP: the sequences that `LLM.beam_search` finds, as choices."""

import pytest
from serving import assert_error, frames, serving

from jaxserve import BeamSearchParams
from jaxserve.engine.beam_search import prepare_beams, run_beams
from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon"
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 6}


@pytest.fixture(scope="module")
def server(random_model, random_engine):
    frontend = Frontend(random_engine, Tokenizer.load(random_model), seed=0, default_sampling={"temperature": 0.6})
    with serving(frontend) as server:
        yield server


def texts_found(server, **fields):
    search = prepare_beams(
        server.frontend, PROMPT, BeamSearchParams(beam_width=3, max_tokens=6, **fields), request_id=f"search-{fields}"
    )
    run_beams(server.frontend, [search])
    return [sequence.output_text for sequence in search.result().sequences]


@pytest.mark.parametrize("fields", [{}, {"length_penalty": 0.0, "early_stopping": True}, {"early_stopping": "never"}])
def test_choices_are_the_beams_in_order(server, fields):
    answer = server.post(COMPLETIONS, {"prompt": [PROMPT, PROMPT]} | BEAMS | fields).json()
    assert [choice["text"] for choice in answer["choices"]] == 2 * texts_found(server, **fields)
    assert answer["usage"]["completion_tokens"] == 36
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_a_stream_has_them_at_its_end(server):
    events = frames(server.post(COMPLETIONS, {"prompt": PROMPT, "stream": True} | BEAMS))
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])] == texts_found(server)


def test_chats_have_beams_too(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "logprobs": False} | BEAMS
    first, second = (server.post(CHAT, body).json()["choices"] for _ in range(2))
    assert first == second
    assert len({choice["message"]["content"] for choice in first}) == 3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"temperature": 0.5}, "temperature"),
        (COMPLETIONS, {"top_k": 5}, "top_k"),
        (COMPLETIONS, {"stop": "a"}, "stop"),
        (COMPLETIONS, {"logprobs": 2}, "logprobs"),
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"n": 21}, "n"),
        (COMPLETIONS, {"early_stopping": "soon"}, "early_stopping"),
        (COMPLETIONS, {"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"thinking_token_budget": 3}, None),
        ("/v1/responses", {}, "use_beam_search"),
    ],
)
def test_what_beams_do_not_follow_is_named(server, path, fields, param):
    asked = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    if path == "/v1/responses":
        asked, fields = {"input": "a"}, {"use_beam_search": True}
        assert_error(server.post(path, asked | fields), 400, param)
        return
    answer = server.post(path, asked | BEAMS | fields)
    assert answer.status_code == 400
    if param is not None:
        assert answer.json()["error"]["param"] == param, answer.text
