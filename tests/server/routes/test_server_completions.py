"""POST /v1/completions without streaming."""

import pytest
import tiny_tokenizer
from serving import running

from jaxserve.tokenizer import Tokenizer


def test_text(server, openai_client):
    answer = openai_client.completions.create(model="fake", prompt="abc", max_tokens=7)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == ["abcabca"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == 11
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_max_tokens_is_16_by_default(openai_client):
    assert openai_client.completions.create(model="fake", prompt="x").usage.completion_tokens == 16


def test_end_of_text(server, openai_client):
    server.says("good bye")
    choice = openai_client.completions.create(model="fake", prompt="x", max_tokens=100).choices[0]
    assert (choice.text, choice.finish_reason) == ("good bye", "stop")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["aba"]), (["ab", "cd"], ["aba", "cdc"]), ([1, 70, 71], None), ([[1, 70, 71], [1, 72]], None)],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_shapes_of_prompts(server, openai_client, prompt, texts):
    answer = openai_client.completions.create(model="fake", prompt=prompt, max_tokens=3)
    if texts is None:
        texts = [server.tokenizer.decode(ids) for ids in ([70, 71, 70], [72, 72, 72])[: len(answer.choices)]]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_n_continuations_of_each_prompt(server, openai_client):
    answer = openai_client.completions.create(model="fake", prompt=["a", "b"], n=3, max_tokens=2, best_of=3)
    assert [choice.text for choice in answer.choices] == ["aa"] * 3 + ["bb"] * 3
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == 4  # a prompt counts once, however many continuations it has


def test_stop_string(server, openai_client):
    server.says("one two three")
    choice = openai_client.completions.create(model="fake", prompt="x", max_tokens=100, stop=["two"]).choices[0]
    assert (choice.text, choice.finish_reason) == ("one ", "stop")
    assert choice.model_dump()["stop_reason"] == "two"


def test_logprobs(server, openai_client):
    server.says("hé")
    logprobs = openai_client.completions.create(model="fake", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["h", "\ufffd", "\ufffd"]
    assert logprobs.token_logprobs == [-1.5] * 3
    assert logprobs.text_offset == [0, 1, 1]  # the two halves of é begin at the same character
    assert logprobs.top_logprobs[0] == {"i": -0.5, "h": -1.5}


def test_logprobs_0_are_those_of_the_tokens(server, openai_client):
    logprobs = openai_client.completions.create(model="fake", prompt="ab", logprobs=0).choices[0].logprobs
    assert logprobs.top_logprobs[:2] == [{"a": -1.5}, {"b": -1.5}]


@pytest.fixture(scope="module")
def sentencepiece_server(tmp_path_factory):
    with running(Tokenizer.load(tiny_tokenizer.sentencepiece(tmp_path_factory.mktemp("sentencepiece")))) as server:
        yield server


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    ("prompt", "form", "text"),
    [
        ("", None, "theon"),
        ("", {"regex": " theon"}, " theon"),
        ("a b", None, " theon"),
        ("a b", {"regex": " theon"}, " theon"),
    ],
)
def test_text_offsets_behind_a_first_space(sentencepiece_server, prompt, form, text, echo):
    """A tokenizer that puts a space before every text takes it away again, but from a form."""
    sentencepiece_server.says("theon")
    (choice,) = sentencepiece_server.post(
        "/v1/completions", {"prompt": prompt, "structured_outputs": form, "logprobs": 0, "echo": echo}
    ).json()["choices"]
    assert choice["text"] == prompt * echo + text
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][-2:] == [" the", "on"]
    assert logprobs["text_offset"][-2:] == [len(prompt * echo), len(choice["text"]) - len("on")]


def test_scoring_as_lm_evaluation_harness_does(server, openai_client):
    """Log likelihoods: lists of token ids, max_tokens 1, echo, logprobs 1, all continuations in one request."""
    prompts = [server.tokenizer.encode(text) for text in ("the cat", "a")]
    answer = openai_client.completions.create(
        model="fake", prompt=prompts, echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234
    )
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(prompt) + 1
        assert logprobs.token_logprobs == [None] + [-1.5] * len(prompt)
        assert logprobs.top_logprobs[0] is None
        assert all(max(top.values()) == -0.5 for top in logprobs.top_logprobs[1:])
    assert "".join(answer.choices[0].logprobs.tokens[1:-1]) == "the cat"
    assert answer.choices[0].logprobs.text_offset == [0, *range(3, 11)]  # BOS is shown as it was sent


def test_scoring_without_generating(server, openai_client):
    answer = openai_client.completions.create(
        model="fake", prompt="the cat", echo=True, max_tokens=0, logprobs=1, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("the cat", "length")
    assert len(choice.logprobs.tokens) == 8
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == 8
    assert choice.model_dump()["token_ids"] == []
    assert server.client.submitted[0].max_tokens == 1


def test_cached_tokens(server, openai_client):
    server.says("x", num_cached_tokens=3)
    usage = openai_client.completions.create(model="fake", prompt=["abcd", "abce"]).usage
    assert usage.prompt_tokens_details.cached_tokens == 6


def test_extensions_reach_the_engine(server):
    """Those that are no sampling parameters, and what values of these are turned into."""
    body = {"prompt": "hello world", "max_tokens": 9, "truncate_prompt_tokens": 4, "priority": -2, "cache_salt": "mine"}
    body |= {"stop_token_ids": [70], "ignore_eos": True, "bad_words": ["x"], "logit_bias": {"60": 1, "61": -1.5}}
    body |= {"temperature": 1, "seed": 3, "suffix": None, "tools": [], "some_field_of_the_future": {"a": 1}}
    assert server.post("/v1/completions", body).status_code == 200
    request = server.client.submitted[0]
    assert request.prompt_token_ids == server.tokenizer.encode("rld")
    assert (request.priority, request.cache_salt, request.seed) == (-2, "mine", 3)
    assert request.stop_token_ids == {70}
    assert request.bad_word_ids
    assert request.params.temperature == 1
    assert request.params.logit_bias == {60: 1.0, 61: -1.5}


def test_return_token_ids_and_prompt_logprobs(server):
    body = {"prompt": "ab", "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    ids = server.tokenizer.encode("ab")
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == ids[1:]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])] == {"logprob": -1.5, "rank": 2, "decoded_token": "a"}
    assert choice["logprobs"] is None
    body |= {"echo": True, "logprobs": 2, "prompt_logprobs": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert [each and list(each) for each in choice["prompt_logprobs"]] == [None, *([str(each)] for each in ids[1:])]
    assert [each and len(each) for each in choice["logprobs"]["top_logprobs"]] == [None, *(2 for _ in (ids * 2)[2:])]


@pytest.mark.parametrize("length", [4, -1])
def test_a_prompt_of_any_length_can_be_truncated(server, length):
    text = "abcd" * 1000
    for path, prompt in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        server.client.submitted.clear()
        answer = server.post(path, {**prompt, "max_tokens": 3, "truncate_prompt_tokens": length})
        assert answer.status_code == 200, answer.text
        expected = server.client.info.max_model_len - 3 if length == -1 else length
        assert len(server.client.submitted[0].prompt_token_ids) == expected


def test_the_default_limit_is_cut_to_what_the_context_holds(server):
    prompt = "x" * (server.client.info.max_model_len - 6)  # and BOS
    usage = server.post("/v1/completions", {"prompt": prompt}).json()["usage"]
    assert usage["completion_tokens"] == 5


def test_null_is_absent(server):
    body = dict.fromkeys(("n", "stop", "logprobs", "echo", "stream", "stream_options", "temperature", "seed"))
    assert server.post("/v1/completions", {"prompt": "a", **body}).status_code == 200
