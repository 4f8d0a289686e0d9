import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
import tiny_tokenizer
from engine.fake_client import FakeEngineClient, Script, echo

from jaxserve.engine.frontend import Frontend, sampling_defaults
from jaxserve.errors import ContextLengthExceeded, EngineDead, InvalidRequest, QueueFull, RequestFailed
from jaxserve.request import SamplingParams
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture
def start():
    """Start a front end on a fake engine that plays the given scripts."""
    with contextlib.ExitStack() as stack:

        def start(tokenizer, play=echo, *, seed=None, default_sampling=None, **options):
            client = FakeEngineClient(play, **options)
            stack.callback(client.close)
            return Frontend(client, tokenizer, seed=seed, default_sampling=default_sampling)

        yield start


def collect(frontend, *groups):
    for _ in frontend.generate(groups):
        pass
    return [group.result() for group in groups]


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
        ("limit", "max_tokens", "kept"), [(3, 4, [7, 8, 9]), (50, 4, list(range(10))), (-1, 4, [4, 5, 6, 7, 8, 9])]
    )
    def test_truncation_keeps_the_end(self, start, tokenizer, limit, max_tokens, kept):
        group = start(tokenizer, max_model_len=len(kept) + max_tokens).prepare(
            list(range(10)), SamplingParams(max_tokens=max_tokens), request_id="x", truncate_prompt_tokens=limit
        )
        assert group.prompt_token_ids == kept

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
        # " on" is a space and "on": whoever may not write "on" cannot write it.
        assert bad_words(byte_level, "on") == (tuple(byte_level.encode("on")),)
        # Sentencepiece puts a space before every text.
        assert bad_words(tokenizer, "the") == (tuple(tokenizer.encode("the", add_special_tokens=False)),)

    def test_no_bad_word_is_left_out(self, start, byte_level):
        words = [f"u{chr(0x61 + i // 10)}{i % 10}" for i in range(40)]  # two forms each
        with pytest.raises(InvalidRequest, match="80 token sequences") as caught:
            start(byte_level).prepare("a", SamplingParams(bad_words=words), request_id="x")
        assert caught.value.param == "bad_words"

    def test_sampling_defaults(self, start, tokenizer):
        config = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 99, "do_sample": True, "x": 1}
        frontend = start(tokenizer, default_sampling=sampling_defaults(config))
        assert frontend.sampling_params() == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=99)
        assert frontend.sampling_params({"temperature": 0.0}).temperature == 0.0
        fallback = {"max_tokens": 5, "min_p": 0.5}
        assert frontend.sampling_params({"top_p": 0.8}, fallback=fallback) == SamplingParams(
            temperature=0.6, top_p=0.8, max_tokens=99, min_p=0.5
        )
        with pytest.raises(TypeError, match="temprature"):
            frontend.sampling_params({"temprature": 1.0})


class TestGenerate:
    def test_texts_in_the_order_of_the_prompts(self, start, tokenizer):
        frontend = start(tokenizer)
        prompts = ["the upon", "a b c", "🦙", "Once"]
        groups = [
            frontend.prepare(prompt, SamplingParams(n=2, max_tokens=3 + i), request_id=str(i))
            for i, prompt in enumerate(prompts)
        ]
        for result, group in zip(collect(frontend, *groups), groups, strict=True):
            request = group.requests[0]
            ids = echo(request).token_ids
            text = tokenizer.decode([*request.prompt_token_ids, *ids]).removeprefix(group.prompt)
            for completion in result.outputs:
                assert (completion.token_ids, completion.text) == (ids, text)
                assert completion.finish_reason == "length"
        assert frontend.client.aborted == []

    def test_deltas_come_as_they_are_made(self, start, tokenizer):
        frontend = start(tokenizer)
        group = frontend.prepare("the upon", SamplingParams(max_tokens=6), request_id="x")
        deltas = [delta.outputs[0].text for _, delta in frontend.generate([group])]
        assert deltas == [" the", " upon"] * 3

    def test_a_stop_string_aborts_in_the_engine(self, start, tokenizer):
        frontend = start(tokenizer, lambda request: Script(token_ids=echo(request).token_ids, hangs=True))
        group = frontend.prepare("abcd", SamplingParams(n=2, stop="d a"), request_id="x")
        (result,) = collect(frontend, group)
        assert [(completion.text, completion.stop_reason) for completion in result.outputs] == [(" abc", "d a")] * 2
        assert sorted(frontend.client.aborted) == ["x-0", "x-1"]
        frontend.client.wait_until(lambda: frontend.client.num_running == 0)

    def test_leaving_early_aborts(self, start, tokenizer):
        frontend = start(tokenizer, step_seconds=0.001)
        groups = [frontend.prepare("the", SamplingParams(max_tokens=400), request_id=f"{i}") for i in range(3)]
        events = frontend.generate(groups)
        next(events)
        events.close()
        assert sorted(frontend.client.aborted) == ["0-0", "1-0", "2-0"]
        assert frontend.client.num_running == 0

    def test_one_failed_request_does_not_stop_the_others(self, start, tokenizer):
        def play(request):
            if request.request_id == "1-0":
                return Script(token_ids=[5, 6], error="NaN in the logits")
            return echo(request)

        frontend = start(tokenizer, play)
        groups = [frontend.prepare("the", SamplingParams(max_tokens=20), request_id=f"{i}") for i in range(3)]
        results = collect(frontend, *groups)
        assert [result.outputs[0].finish_reason for result in results] == ["length", "error", "length"]
        assert [group.error for group in groups] == [None, "NaN in the logits", None]
        assert results[1].outputs[0].token_ids == [5, 6]

    @pytest.mark.parametrize("silently", [False, True])
    def test_engine_death(self, start, tokenizer, silently):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))
        group = frontend.prepare("the", SamplingParams(), request_id="x")
        threading.Timer(0.05, frontend.client.die, kwargs={"silently": silently}).start()
        with pytest.raises(EngineDead, match="died" if silently else "the device is gone"):
            collect(frontend, group)
        with pytest.raises(EngineDead):
            collect(frontend, frontend.prepare("the", SamplingParams(), request_id="y"))

    def test_a_refusal_reaches_the_caller(self, start, tokenizer):
        frontend = start(tokenizer)
        frontend.client.refusal = QueueFull("full")
        with pytest.raises(QueueFull):
            collect(frontend, frontend.prepare("the", SamplingParams(), request_id="x"))

    def test_from_several_threads(self, start, tokenizer):
        frontend = start(tokenizer)
        results = {}

        def work(name):
            group = frontend.prepare(f"{name} the", SamplingParams(max_tokens=50), request_id=name)
            (results[name],) = collect(frontend, group)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcdefgh"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        for name in "abcdefgh":
            assert results[name].outputs[0].text.startswith(f" {name} the {name} the")


class TestSubmit:
    def test_streams_equal_generate(self, start, tokenizer):
        frontend = start(tokenizer)
        prompts = ["the upon", "a 🦙 b", "Once"] * 5
        groups = [
            frontend.prepare(prompt, SamplingParams(max_tokens=30, n=2, logprobs=1), request_id=f"sync-{i}")
            for i, prompt in enumerate(prompts)
        ]
        expected = [result.outputs for result in collect(frontend, *groups)]

        async def one(i, prompt):
            params = SamplingParams(max_tokens=30, n=2, logprobs=1)
            stream = await frontend.submit(frontend.prepare(prompt, params, request_id=f"async-{i}"))
            texts, ids, finished = ["", ""], [[], []], []
            async for delta in stream:
                for completion in delta.outputs:
                    texts[completion.index] += completion.text
                    ids[completion.index] += completion.token_ids
                    assert len(completion.logprobs) == len(completion.token_ids)
                finished.append(delta.finished)
            assert finished == [False] * (len(finished) - 1) + [True]
            result = stream.group.result().outputs
            assert [completion.text for completion in result] == texts
            assert [completion.token_ids for completion in result] == ids
            return result

        async def all_of_them():
            return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

        assert asyncio.run(all_of_them()) == expected

    def test_one_call_into_the_loop_a_step(self, start, tokenizer):
        frontend = start(tokenizer, step_seconds=0.002)

        async def main():
            calls = []
            loop = asyncio.get_running_loop()
            original = loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda *args: (calls.append(args), original(*args))
            streams = [
                await frontend.submit(frontend.prepare("the", SamplingParams(max_tokens=20), request_id=str(i)))
                for i in range(10)
            ]
            await asyncio.gather(*(stream.result() for stream in streams))
            return len(calls)

        assert asyncio.run(main()) == frontend.client.num_sink_calls <= frontend.client.num_steps <= 30

    def test_a_slow_consumer_gets_what_has_come_in_one_piece(self, start, tokenizer):
        frontend = start(tokenizer)

        async def main():
            stream = await frontend.submit(frontend.prepare("the", SamplingParams(max_tokens=40), request_id="x"))
            while frontend.client.num_running:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            return [delta async for delta in stream]

        (delta,) = asyncio.run(main())
        assert len(delta.outputs[0].token_ids) == 40

    @pytest.mark.parametrize("way", ["aclose", "async with", "cancel"])
    def test_leaving_early_aborts(self, start, tokenizer, way):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))

        async def consume(stream):
            async for _ in stream:
                pass

        async def main():
            group = frontend.prepare("the", SamplingParams(n=2), request_id="x")
            stream = await frontend.submit(group)
            assert (await anext(stream)).outputs[0].token_ids == [5]
            if way == "aclose":
                waiting = asyncio.create_task(consume(stream))
                await asyncio.sleep(0.01)
                await stream.aclose()
                await stream.aclose()
                await asyncio.wait_for(waiting, 5)
            elif way == "async with":
                async with stream:
                    pass
            else:
                waiting = asyncio.create_task(consume(stream))
                await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

        asyncio.run(main())
        assert sorted(frontend.client.aborted) == ["x-0", "x-1"]
        assert frontend.client.num_running == 0

    def test_a_stop_string_aborts_in_the_engine(self, start, tokenizer):
        frontend = start(tokenizer, lambda request: Script(token_ids=echo(request).token_ids, hangs=True))

        async def main():
            group = frontend.prepare("abcd", SamplingParams(stop=["d a"]), request_id="x")
            return await (await frontend.submit(group)).result()

        completion = asyncio.run(main()).outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (" abc", "stop", "d a")
        assert frontend.client.aborted == ["x-0"]

    def test_a_failed_request_raises(self, start, tokenizer):
        def play(request):
            is_first = request.request_id == "x-0"
            return Script(token_ids=[5], hangs=is_first, error=None if is_first else "NaN")

        frontend = start(tokenizer, play)

        async def main():
            stream = await frontend.submit(frontend.prepare("the", SamplingParams(n=2), request_id="x"))
            await stream.result()

        with pytest.raises(RequestFailed, match="NaN"):
            asyncio.run(main())
        assert frontend.client.aborted == ["x-0"], "its sibling is aborted"

    def test_what_came_before_a_failure_is_shown_first(self, start, byte_level):
        token_ids = byte_level.encode("abc")
        frontend = start(byte_level, lambda _: Script(token_ids=token_ids, error="NaN"))

        async def main():
            group = frontend.prepare("the", SamplingParams(), request_id="x")
            stream = await frontend.submit(group)
            frontend.client.wait_until(lambda: frontend.client.num_running == 0)
            await asyncio.sleep(0.05)  # all of it has come when the consumer looks
            first = await anext(stream)
            assert (first.outputs[0].text, first.finished) == ("abc", False)
            with pytest.raises(RequestFailed, match="NaN"):
                await anext(stream)

        asyncio.run(main())

    @pytest.mark.parametrize("silently", [False, True])
    def test_engine_death_reaches_every_consumer(self, start, tokenizer, silently):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))

        async def consume(i):
            group = frontend.prepare("the", SamplingParams(), request_id=f"{i}")
            return await (await frontend.submit(group)).result()

        async def main():
            tasks = [asyncio.create_task(consume(i)) for i in range(4)]
            await asyncio.sleep(0.05)
            frontend.client.die(silently=silently)
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

        assert [type(error) for error in asyncio.run(main())] == [EngineDead] * 4

    def test_closing_the_engine_ends_requests_as_aborted(self, start, tokenizer):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))

        async def main():
            stream = await frontend.submit(frontend.prepare("the", SamplingParams(), request_id="x"))
            await anext(stream)
            await asyncio.to_thread(frontend.client.close)
            return [delta async for delta in stream]

        assert [delta.outputs[0].finish_reason for delta in asyncio.run(main())] == ["abort"]

    def test_a_refused_request_leaves_nothing_behind(self, start, tokenizer):
        frontend = start(tokenizer)

        async def main():
            frontend.client.refusal = QueueFull("full")
            with pytest.raises(QueueFull):
                await frontend.submit(frontend.prepare("the", SamplingParams(), request_id="x"))
            assert frontend._dispatcher._streams == {}
            frontend.client.refusal = None
            await (await frontend.submit(frontend.prepare("the", SamplingParams(), request_id="x"))).result()
            assert frontend._dispatcher._streams == {}

        asyncio.run(main())

    def test_a_loop_that_is_gone_aborts_its_requests(self, start, tokenizer):
        frontend = start(tokenizer, step_seconds=0.001)

        async def main():
            await frontend.submit(frontend.prepare("the", SamplingParams(max_tokens=400), request_id="x"))

        asyncio.run(main())
        frontend.client.wait_until(lambda: frontend.client.num_running == 0)
        assert frontend.client.aborted == ["x-0"]

    def test_a_second_loop(self, start, tokenizer):
        frontend = start(tokenizer)

        async def main(request_id):
            group = frontend.prepare("the", SamplingParams(), request_id=request_id)
            return (await (await frontend.submit(group)).result()).outputs

        assert asyncio.run(main("x")) == asyncio.run(main("y"))

    def test_a_busy_loop_does_not_hold_up_the_engine(self, start, tokenizer):
        frontend = start(tokenizer)

        async def main():
            stream = await frontend.submit(frontend.prepare("the", SamplingParams(max_tokens=100), request_id="x"))
            time.sleep(0.1)  # the loop is blocked; the engine goes on
            assert frontend.client.num_running == 0
            return await stream.result()

        assert len(asyncio.run(main()).outputs[0].token_ids) == 100
