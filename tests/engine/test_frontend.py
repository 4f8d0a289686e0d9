"""Frontend.prepare: a prompt and its parameters become validated requests."""

import functools
import json

import numpy as np
import pytest
import tokenizers
from fake_client import collect
from tokenizers import decoders, models, processors

from jaxserve.engine.frontend import sampling_defaults
from jaxserve.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer


def letters():
    """Return a tokenizer with a token for each of a few letters, which puts <s> and </s> around a text."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abcde")}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 5), ("</s>", 6)]
    )
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


class TestPrepare:
    def test_requests_of_siblings(self, start, tokenizer):
        frontend = start(tokenizer, eos_token_ids=(2, 77))
        params = SamplingParams(n=3, seed=5, max_tokens=7, prompt_logprobs=1, stop_token_ids=[9])
        group = frontend.prepare("the", params, request_id="x", priority=3, cache_salt="salt")
        assert [request.request_id for request in group.requests] == ["x-0", "x-1", "x-2"]
        assert {request.group_id for request in group.requests} == {"x-0"}
        assert [request.params.prompt_logprobs for request in group.requests] == [1, None, None]
        for request in group.requests:
            assert request.prompt_token_ids == tokenizer.encode("the") == group.prompt_token_ids
            assert request.stop_token_ids == {2, 77, 9}
            assert (request.max_tokens, request.priority, request.cache_salt) == (7, 3, "salt")

    @pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
    def test_all_logprobs(self, start, tokenizer, name):
        """All tokens, if the engine computes so many; otherwise the error names field and limit."""
        small = start(tokenizer, vocab_size=20)
        (request,) = small.prepare([5, 6], SamplingParams(**{name: -1}), request_id="x").requests
        assert getattr(request.params, name) == 20
        large = start(tokenizer, vocab_size=21)
        with pytest.raises(InvalidRequest, match=rf"^{name}=-1 asks for all 21 .* at most 20") as refused:
            large.prepare([5, 6], SamplingParams(**{name: -1}), request_id="x")
        assert refused.value.param == name
        unlimited = start(tokenizer, vocab_size=21, max_logprobs=-1)
        for number in (-1, 21, 500):
            (request,) = unlimited.prepare([5, 6], SamplingParams(**{name: number}), request_id="x").requests
            assert getattr(request.params, name) == 21
        few = start(tokenizer, vocab_size=100, max_logprobs=3)
        with pytest.raises(InvalidRequest, match=rf"^{name} is 4, at most 3"):
            few.prepare([5, 6], SamplingParams(**{name: 4}), request_id="x")

    def test_named_tokens_are_of_the_vocabulary(self, start, tokenizer):
        frontend = start(tokenizer, vocab_size=100)
        (request,) = frontend.prepare([5], SamplingParams(logprob_token_ids=np.arange(100)), request_id="x").requests
        assert request.params.logprobs == 0
        with pytest.raises(InvalidRequest, match="token id 100 is outside") as refused:
            frontend.prepare([5], SamplingParams(logprob_token_ids=[5, 100]), request_id="x")
        assert refused.value.param == "logprob_token_ids"

    def test_seeds(self, start, tokenizer):
        def seeds(frontend, **sampling):
            group = frontend.prepare("the", SamplingParams(n=4, **sampling), request_id="x")
            return [request.seed for request in group.requests]

        given = seeds(start(tokenizer), seed=5)
        assert given == seeds(start(tokenizer), seed=5)
        assert given[0] == 5, "n does not change the first text"
        assert seeds(start(tokenizer), seed=-1)[0] != seeds(start(tokenizer), seed=1)[0]
        reproducible, again = start(tokenizer, seed=0), start(tokenizer, seed=0)
        drawn = [seeds(reproducible), seeds(reproducible)]
        assert drawn == [seeds(again), seeds(again)]
        assert drawn != [seeds(start(tokenizer)), seeds(start(tokenizer))], "without a seed every run differs"
        everything = [*given, *drawn[0], *drawn[1]]
        assert len(set(everything)) == len(everything)
        assert all(0 <= seed < 2**63 for seed in everything)

    def test_ignore_eos(self, start, tokenizer):
        group = start(tokenizer).prepare("a", SamplingParams(ignore_eos=True, stop_token_ids=[9]), request_id="x")
        assert group.requests[0].stop_token_ids == {9}

    @pytest.mark.parametrize("prompt", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7])])
    def test_token_ids_as_prompt(self, start, tokenizer, prompt):
        group = start(tokenizer).prepare(prompt, SamplingParams(), request_id="x", prompt_text="shown")
        assert group.requests[0].prompt_token_ids == [5, 6, 7]
        assert {type(token_id) for token_id in group.prompt_token_ids} == {int}
        assert group.prompt == "shown"

    def test_none_is_no_stop_and_no_bad_word(self, start, tokenizer):
        frontend = start(tokenizer)
        group = frontend.prepare("abc", SamplingParams(stop=None, stop_token_ids=None, bad_words=None), request_id="x")
        assert (group.requests[0].stop_token_ids, group.requests[0].bad_word_ids) == ({2}, ())
        (output,) = collect(frontend, group)
        assert len(output.outputs[0].token_ids) == 16

    def test_an_empty_prompt_needs_bos(self, start, tokenizer, byte_level):
        assert start(tokenizer).prepare("", SamplingParams(), request_id="x").prompt_token_ids == [1]
        for frontend, prompt in ((start(byte_level), ""), (start(tokenizer), [])):
            with pytest.raises(InvalidRequest, match="empty") as caught:
                frontend.prepare(prompt, SamplingParams(), request_id="x")
            assert caught.value.param == "prompt"

    @pytest.mark.parametrize(
        ("param", "prompt", "sampling"),
        [
            ("prompt", [3, 512], {}),
            ("prompt", [-1], {}),
            ("logit_bias", "a", {"logit_bias": {512: 1.0}}),
            ("allowed_token_ids", "a", {"allowed_token_ids": [5, -1]}),
            ("stop_token_ids", "a", {"stop_token_ids": [600]}),
            ("stop", "a", {"stop": ["x"], "detokenize": False}),
            ("bad_words", "a", {"bad_words": [""]}),
            ("bad_words", "a", {"bad_words": [5]}),
            ("bad_words", "a", {"bad_words": ["much too long for a word"]}),
            ("bad_words", "a", {"bad_words": "word"}),
            ("min_tokens", "a", {"max_tokens": None, "min_tokens": 511}),
        ],
    )
    def test_invalid_fields_are_named(self, start, tokenizer, param, prompt, sampling):
        with pytest.raises(InvalidRequest) as caught:
            start(tokenizer).prepare(prompt, SamplingParams(**sampling), request_id="x")
        assert caught.value.param == param
        assert param in str(caught.value)

    def test_ids_of_the_tokenizer_beyond_the_model(self, start, tokenizer):
        with pytest.raises(InvalidRequest, match="outside the vocabulary of 100"):
            start(tokenizer, vocab_size=100).prepare("the", SamplingParams(), request_id="x")

    @pytest.mark.parametrize(("max_tokens", "fits"), [(6, True), (7, False), (None, True)])
    def test_context_length(self, start, tokenizer, max_tokens, fits):
        frontend = start(tokenizer, max_model_len=10)
        params = SamplingParams(max_tokens=max_tokens)
        if fits:
            assert frontend.prepare([3] * 4, params, request_id="x").requests[0].max_tokens == 6
            return
        with pytest.raises(ContextLengthExceeded, match=r"10 tokens.* 11 .*4 in the prompt and 7") as caught:
            frontend.prepare([3] * 4, params, request_id="x")
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")

    @pytest.mark.parametrize(("max_tokens", "cut"), [(5, 5), (6, 6), (7, 6), (None, 6)])
    def test_output_is_shortened_where_allowed(self, start, tokenizer, max_tokens, cut):
        params = SamplingParams(max_tokens=max_tokens)
        frontend = start(tokenizer, max_model_len=10)
        group = frontend.prepare([3] * 4, params, request_id="x", shorten_output=True)
        assert group.requests[0].max_tokens == cut
        with pytest.raises(ContextLengthExceeded, match="10 in the prompt and 1 for"):
            frontend.prepare([3] * 10, params, request_id="x", shorten_output=True)

    def test_a_prompt_that_fills_the_context(self, start, tokenizer):
        with pytest.raises(ContextLengthExceeded, match="10 in the prompt") as caught:
            start(tokenizer, max_model_len=10).prepare([3] * 10, SamplingParams(max_tokens=None), request_id="x")
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize(
        ("limit", "side", "kept"),
        [
            (5, "left", "<s>|c|d|e|</s>"),
            (5, "right", "<s>|a|b|c|</s>"),
            (3, "left", "<s>|e|</s>"),
            (2, "left", "<s>|</s>"),
            (2, "right", "<s>|</s>"),
            (9, "left", "<s>|a|b|c|d|e|</s>"),
            (-1, "left", "<s>|d|e|</s>"),
            (-1, "right", "<s>|a|b|</s>"),
        ],
    )
    def test_truncation_cuts_the_text_not_what_the_tokenizer_adds(self, start, limit, side, kept):
        tokenizer = letters()
        frontend = start(tokenizer, max_model_len=10 if limit != -1 else 6)
        params = SamplingParams(max_tokens=1 if limit != -1 else 2)
        cut = {"request_id": "x", "truncate_prompt_tokens": limit, "truncation_side": side}
        group = frontend.prepare("abcde", params, **cut)
        assert "|".join(map(tokenizer.token_text, group.prompt_token_ids)) == kept
        if limit != -1:
            embedding = frontend.prepare_embedding("abcde", pooling="last", **cut)
            assert embedding.prompt_token_ids == group.prompt_token_ids
        ids = tokenizer.encode("abcde")
        number = 4 if limit == -1 else limit
        for prompt, of_the_prompt in ((ids, ids), ("abcde", ids[1:-1])):  # ids are the caller's, whatever they are
            group = frontend.prepare(prompt, params, add_special_tokens=False, **cut)
            assert group.prompt_token_ids == (of_the_prompt[-number:] if side == "left" else of_the_prompt[:number])

    def test_truncation_leaves_room_for_what_the_tokenizer_adds(self, start):
        for prepare in (
            functools.partial(start(letters()).prepare, params=SamplingParams()),
            functools.partial(start(letters()).prepare_embedding, pooling="last"),
        ):
            with pytest.raises(InvalidRequest, match="is 1, but the tokenizer adds 2 special tokens") as caught:
                prepare("a", request_id="x", truncate_prompt_tokens=1)
            assert caught.value.param == "truncate_prompt_tokens"

    @pytest.mark.parametrize("limit", [0, -2, True])
    def test_bad_truncation(self, start, tokenizer, limit):
        with pytest.raises(InvalidRequest) as caught:
            start(tokenizer).prepare("a", SamplingParams(), request_id="x", truncate_prompt_tokens=limit)
        assert caught.value.param == "truncate_prompt_tokens"

    def test_bad_words_in_both_positions(self, start, byte_level, tokenizer):
        def bad_words(tokenizer, *words):
            params = SamplingParams(bad_words=words)
            (request,) = start(tokenizer).prepare("a", params, request_id="x").requests
            return request.bad_word_ids

        # In a byte-level vocabulary "the" and " the" are different tokens.
        (the,), (spaced_the,) = byte_level.encode("the"), byte_level.encode(" the")
        assert bad_words(byte_level, "the", " the") == ((the,), (spaced_the,))
        (upon,) = byte_level.encode(" upon")
        assert bad_words(byte_level, "upon") == (tuple(byte_level.encode("upon")), (upon,))
        # " on" is a space and "on": if "on" is forbidden, so is this.
        assert bad_words(byte_level, "on") == (tuple(byte_level.encode("on")),)
        # Sentencepiece puts a space before every text.
        assert bad_words(tokenizer, "the") == (tuple(tokenizer.encode("the", add_special_tokens=False)),)

    def test_no_bad_word_is_left_out(self, start, byte_level):
        words = [f"u{chr(0x61 + i // 10)}{i % 10}" for i in range(40)]  # two forms each
        with pytest.raises(InvalidRequest, match="80 token sequences") as caught:
            start(byte_level).prepare("a", SamplingParams(bad_words=words), request_id="x")
        assert caught.value.param == "bad_words"

    def test_sampling_defaults(self, start, tokenizer, tmp_path):
        config = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 99, "do_sample": True, "x": 1}
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        frontend = start(tokenizer, default_sampling=sampling_defaults(tmp_path))
        assert frontend.sampling_params() == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=99)
        assert frontend.sampling_params({"temperature": 0.0}).temperature == 0.0
        fallback = {"max_tokens": 5, "min_p": 0.5}
        assert frontend.sampling_params({"top_p": 0.8}, fallback=fallback) == SamplingParams(
            temperature=0.6, top_p=0.8, max_tokens=99, min_p=0.5
        )
        with pytest.raises(TypeError, match="temprature"):
            frontend.sampling_params({"temprature": 1.0})

    @pytest.mark.parametrize(
        ("fields", "complaint"),
        [
            ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
            ({"max_new_tokens": 0}, "max_new_tokens must be"),
            ({"top_p": [1]}, "top_p must be"),
        ],
    )
    def test_defaults_that_no_request_could_have(self, tmp_path, fields, complaint):
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps(fields))
        with pytest.raises(CheckpointError, match=f"^{path}: {complaint}"):
            sampling_defaults(tmp_path)
