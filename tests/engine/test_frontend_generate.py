"""Frontend.generate: many prompts together, for a thread that waits."""

import threading

import pytest
from fake_client import Script, collect, echo
from waiting import wait_until

from jaxserve.errors import EngineDead, InvalidRequest, QueueFull
from jaxserve.sampling_params import SamplingParams

TOO_COMPLEX = InvalidRequest("it is too complex", param="structured_outputs", code="unsupported_grammar")


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
        deltas = [delta.outputs[0].text for _ in frontend.generate([group]) if (delta := group.take_delta())]
        assert deltas == [" the", " upon"] * 3

    def test_a_stop_string_aborts_in_the_engine(self, start, tokenizer):
        frontend = start(tokenizer, lambda request: Script(token_ids=echo(request).token_ids, hangs=True))
        group = frontend.prepare("abcd", SamplingParams(n=2, stop="d a"), request_id="x")
        (result,) = collect(frontend, group)
        assert [(completion.text, completion.stop_reason) for completion in result.outputs] == [(" abc", "d a")] * 2
        assert sorted(frontend.client.aborted) == ["x-0", "x-1"]
        wait_until(lambda: frontend.client.num_running == 0)

    def test_leaving_early_aborts(self, start, tokenizer):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))
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

        def die():
            wait_until(lambda: frontend.client.num_output_tokens == 1)
            frontend.client.die(silently=silently)

        threading.Thread(target=die).start()
        with pytest.raises(EngineDead, match="died" if silently else "the device is gone"):
            collect(frontend, group)
        with pytest.raises(EngineDead):
            collect(frontend, frontend.prepare("the", SamplingParams(), request_id="y"))

    def test_a_refusal_reaches_the_caller(self, start, tokenizer):
        frontend = start(tokenizer)
        frontend.client.refusal = QueueFull("full")
        with pytest.raises(QueueFull):
            collect(frontend, frontend.prepare("the", SamplingParams(), request_id="x"))

    def test_a_refusal_in_the_middle_ends_one_sequence(self, start, tokenizer):
        def play(request):
            return Script(token_ids=[5], error=TOO_COMPLEX if request.request_id == "x-1" else None)

        frontend = start(tokenizer, play)
        groups = [frontend.prepare("the", SamplingParams(n=2), request_id=name) for name in "xy"]
        results = [[output.finish_reason for output in result.outputs] for result in collect(frontend, *groups)]
        assert results == [["stop", "error"], ["stop", "stop"]]
        assert "too complex" in groups[0].error
