"""Frontend.run: prompts in an event loop."""

import asyncio
import collections
import itertools
import threading

import pytest
from fake_client import Script, collect, echo
from waiting import PATIENCE, until

from jaxserve.engine.stream import LOGPROBS_A_TURN, PROMPTS_A_TURN, Dispatcher
from jaxserve.errors import EngineDead, InvalidRequest, QueueFull, RequestFailed
from jaxserve.request import EngineOutput, TokenLogprobs
from jaxserve.sampling_params import SamplingParams


def ignore(_index, _delta):
    """A callback for tests that use only the results."""


def failing(name, error):
    """Return what requests do of which this one fails and the others go on."""
    scripts = collections.defaultdict(lambda: Script(token_ids=[5], hangs=True))
    scripts[name] = Script(token_ids=[5], error=error)
    return lambda request: scripts[request.request_id]


class TestRun:
    async def test_runs_equal_generate(self, start, tokenizer):
        frontend = start(tokenizer)
        prompts = ["the upon", "a 🦙 b", "Once"] * 5
        params = SamplingParams(max_tokens=30, n=2, logprobs=1)
        groups = [frontend.prepare(prompt, params, request_id=f"sync-{i}") for i, prompt in enumerate(prompts)]
        expected = [result.outputs for result in collect(frontend, *groups)]

        async def some(name, prompts):
            groups = [frontend.prepare(prompt, params, request_id=f"{name}-{i}") for i, prompt in enumerate(prompts)]
            texts, ids, finished = {}, {}, {}

            def take(index, delta):
                for completion in delta.outputs:
                    key = (index, completion.index)
                    texts[key] = texts.get(key, "") + completion.text
                    ids[key] = ids.get(key, []) + completion.token_ids
                    assert len(completion.logprobs) == len(completion.token_ids)
                finished.setdefault(index, []).append(delta.finished)

            await frontend.run(groups, take)
            assert set(finished) == set(range(len(prompts)))
            for said in finished.values():
                assert said == [False] * (len(said) - 1) + [True]
            results = [group.result().outputs for group in groups]
            for index, result in enumerate(results):
                assert [completion.text for completion in result] == [texts[index, i] for i in range(2)]
                assert [completion.token_ids for completion in result] == [ids[index, i] for i in range(2)]
            return results

        parts = await asyncio.gather(some("a", prompts[:1]), some("b", prompts[1:4]), some("c", prompts[4:]))
        assert [result for part in parts for result in part] == expected

    async def test_one_call_into_the_loop_a_step(self, start, tokenizer):
        frontend = start(tokenizer)
        calls = []
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), original(*args))
        groups = [frontend.prepare("the", SamplingParams(max_tokens=20), request_id=str(i)) for i in range(10)]
        with frontend.client.held():
            running = [asyncio.create_task(frontend.run([group], ignore)) for group in groups]
            await asyncio.sleep(0)  # all are submitted
        await asyncio.gather(*running)
        assert len(calls) == frontend.client.num_sink_calls == frontend.client.num_steps == 20

    async def test_what_has_come_meanwhile_is_one_piece(self, start, tokenizer):
        frontend = start(tokenizer)
        deltas = []
        group = frontend.prepare("the", SamplingParams(max_tokens=40), request_id="x")
        running = asyncio.create_task(frontend.run([group], lambda _, delta: deltas.append(delta)))
        await asyncio.sleep(0)
        frontend.client.wait_until_told()  # the loop is blocked
        await running
        (delta,) = deltas
        assert len(delta.outputs[0].token_ids) == 40

    @pytest.mark.parametrize("fails", [False, True])
    async def test_many_prompts_are_submitted_in_turns(self, start, tokenizer, fails):
        """with the loop; a failure of one that has been is not waited for."""
        frontend = start(tokenizer, lambda _: Script(token_ids=[], hangs=True))
        num_prompts = 3 * PROMPTS_A_TURN + 1
        groups = [frontend.prepare("the", SamplingParams(), request_id=f"{i}") for i in range(num_prompts)]
        counts = [0]
        running = asyncio.create_task(frontend.run(groups, ignore))
        while counts[-1] < num_prompts and not running.done():
            await asyncio.sleep(0)
            counts.append(len(frontend.client.submitted))
            if fails and counts[-1] == PROMPTS_A_TURN:
                frontend._dispatcher.sink([EngineOutput(request_id="0-0", finish_reason="error", error="NaN")])
        running.cancel()
        with pytest.raises(RequestFailed if fails else asyncio.CancelledError):
            await running
        assert counts[-1] < num_prompts if fails else counts[-1] == num_prompts
        assert max(after - before for before, after in itertools.pairwise(counts)) <= PROMPTS_A_TURN
        assert len(frontend.client.aborted) == counts[-1] - fails
        assert frontend._dispatcher._prompts == {}

    async def test_a_newcomer_goes_before_those_who_have_begun(self, start, tokenizer):
        """The outputs of a step are delivered in turns, between which the event loop does other things."""
        frontend = start(tokenizer, lambda _: Script(token_ids=[], hangs=True))
        names, seen, between = [f"{i}" for i in range(2 * PROMPTS_A_TURN)], [], []

        def told(name):
            return lambda _index, _delta: seen.append(name)

        def token(name):
            return EngineOutput(request_id=f"{name}-0", new_token_ids=[5])

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    frontend.run([frontend.prepare("the", SamplingParams(), request_id=name)], told(name))
                )
                for name in [*names, "new"]
            ]
            await asyncio.sleep(0)
            sink = frontend._dispatcher.sink
            sink([token(name) for name in names])
            while len(seen) < len(names):
                await asyncio.sleep(0)
            seen.clear()
            sink([token(name) for name in names])
            sink([token("new")])
            while len(seen) <= len(names):
                await asyncio.sleep(0)
                between.append(len(seen))
            for task in running:
                task.cancel()
        assert seen == ["new", *names]
        assert between[0] <= PROMPTS_A_TURN < len(seen) == between[-1]

    @pytest.mark.parametrize("is_first", [True, False])
    @pytest.mark.parametrize("length", [0, 1, LOGPROBS_A_TURN, 5 * LOGPROBS_A_TURN + 3])
    async def test_log_probabilities_of_a_long_prompt_come_in_turns(self, start, tokenizer, length, is_first):
        """The event loop runs in between; nothing is delivered before all of them are ready."""
        frontend = start(tokenizer, lambda _: Script(token_ids=[], hangs=True))
        group = frontend.prepare("the", SamplingParams(n=2, prompt_logprobs=1), request_id="x")
        outputs = [
            EngineOutput(
                request_id="x-0",
                new_token_ids=[7],
                prompt_logprobs=[TokenLogprobs(5, -float(i), 2, [6], [-0.5]) for i in range(length)],
                num_cached_tokens=3,
            ),
            EngineOutput(request_id="x-1", new_token_ids=[8]),
        ]
        deltas, lengths = [], [1]
        running = asyncio.create_task(frontend.run([group], lambda _index, delta: deltas.append(delta)))
        await asyncio.sleep(0)
        frontend._dispatcher.sink(outputs if is_first else outputs[::-1])
        while sum(len(delta.outputs) for delta in deltas) < 2:
            await asyncio.sleep(0)
            lengths.append(len(group.prompt_logprobs))
            assert not deltas or lengths[-1] == length + 1
        running.cancel()
        told = [(output.index, output.token_ids) for delta in deltas for output in delta.outputs]
        assert told == [(0, [7]), (1, [8])]
        assert max(after - before for before, after in itertools.pairwise(lengths)) <= LOGPROBS_A_TURN
        none, *entries = group.result().prompt_logprobs
        assert none is None
        assert [entry[5].logprob for entry in entries] == [-float(i) for i in range(length)]
        assert deltas[0].prompt_logprobs == [none, *entries]
        assert deltas[0].num_cached_tokens == 3

    @pytest.mark.parametrize("a_step", [1, 3, LOGPROBS_A_TURN + 1])
    async def test_log_probabilities_that_have_piled_up_come_in_turns(self, start, tokenizer, a_step):
        """In order, with the end of the sequence last; the outputs of one step are not split."""
        frontend = start(tokenizer, lambda _: Script(token_ids=[], hangs=True))
        group = frontend.prepare("the", SamplingParams(logprobs=1), request_id="x")
        num_steps = 4 * LOGPROBS_A_TURN // a_step + 2
        entries = [TokenLogprobs(5, -float(i), 2, [6], [-0.5]) for i in range(num_steps * a_step)]
        outputs = [
            EngineOutput(
                request_id="x-0",
                new_token_ids=[5] * a_step,
                logprobs=entries[step * a_step : (step + 1) * a_step],
                finish_reason="length" if step == num_steps - 1 else None,
            )
            for step in range(num_steps)
        ]
        told: list[list[float]] = []

        def take(_, delta):
            told.extend([entry[5].logprob for entry in output.logprobs] for output in delta.outputs)
            group.forget_logprobs()

        running = asyncio.create_task(frontend.run([group], take))
        await asyncio.sleep(0)
        for output in outputs:
            frontend._dispatcher.sink([output])
        await asyncio.wait_for(running, PATIENCE)
        assert [value for some in told for value in some] == [-float(i) for i in range(len(entries))]
        assert max(map(len, told)) <= max(LOGPROBS_A_TURN, a_step)
        assert len(told) <= 2 * len(entries) // LOGPROBS_A_TURN + 1  # and not one by one
        assert group.result().outputs[0].finish_reason == "length"

    @pytest.mark.parametrize("in_one_step", [False, True])
    async def test_no_token_overtakes_another(self, start, tokenizer, in_one_step):
        """Regardless of what is delivered about the prompt at the same time."""
        frontend = start(tokenizer, lambda _: Script(token_ids=[], hangs=True))
        group = frontend.prepare("the", SamplingParams(prompt_logprobs=1), request_id="x")
        of_prompt = [TokenLogprobs(5, -1.0, 2, [6], [-0.5])]
        outputs = [
            EngineOutput(request_id="x-0", new_token_ids=[7], prompt_logprobs=of_prompt),
            EngineOutput(request_id="x-0", new_token_ids=[8]),
            EngineOutput(request_id="x-0", new_token_ids=[9], prompt_logprobs=[], finish_reason="length"),
        ]
        running = asyncio.create_task(frontend.run([group], ignore))
        await asyncio.sleep(0)
        for some in [outputs] if in_one_step else [[output] for output in outputs]:
            frontend._dispatcher.sink(some)
        await asyncio.wait_for(running, PATIENCE)
        assert group.result().outputs[0].token_ids == [7, 8, 9]

    async def test_cancelling_aborts(self, start, tokenizer):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))
        groups = [frontend.prepare("the", SamplingParams(n=2), request_id=name) for name in "xy"]
        seen = asyncio.Event()
        running = asyncio.create_task(frontend.run(groups, lambda *_: seen.set()))
        await asyncio.wait_for(seen.wait(), PATIENCE)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert frontend._dispatcher._prompts == {}
        assert sorted(frontend.client.aborted) == ["x-0", "x-1", "y-0", "y-1"]
        assert frontend.client.num_running == 0

    def test_a_stop_string_aborts_in_the_engine(self, start, tokenizer):
        frontend = start(tokenizer, lambda request: Script(token_ids=echo(request).token_ids, hangs=True))
        group = frontend.prepare("abcd", SamplingParams(stop=["d a"]), request_id="x")
        asyncio.run(frontend.run([group], ignore))
        completion = group.result().outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (" abc", "stop", "d a")
        assert frontend.client.aborted == ["x-0"]

    @pytest.mark.parametrize(
        "error",
        [None, InvalidRequest("NaN is too complex", param="structured_outputs", code="unsupported_grammar")],
        ids=["failure", "refusal"],
    )
    def test_a_failed_request_raises(self, start, tokenizer, error):
        """Its sibling is aborted; a refusal in the middle is raised as it is."""
        frontend = start(tokenizer, failing("x-1", error or "NaN"))
        with pytest.raises(type(error) if error else RequestFailed, match="NaN") as caught:
            asyncio.run(frontend.run([frontend.prepare("the", SamplingParams(n=2), request_id="x")], ignore))
        assert error is None or vars(caught.value) == vars(error)
        assert frontend.client.aborted == ["x-0"]

    def test_one_failed_prompt_aborts_the_others(self, start, tokenizer):
        frontend = start(tokenizer, failing("b-0", "NaN"))
        groups = [frontend.prepare("the", SamplingParams(), request_id=name) for name in "abc"]
        with pytest.raises(RequestFailed, match="NaN"):
            asyncio.run(frontend.run(groups, ignore))
        assert sorted(frontend.client.aborted) == ["a-0", "c-0"]

    async def test_what_came_before_a_failure_is_shown_first(self, start, byte_level):
        token_ids = byte_level.encode("abc")
        frontend = start(byte_level, lambda _: Script(token_ids=token_ids, error="NaN"))
        deltas = []
        group = frontend.prepare("the", SamplingParams(), request_id="x")
        running = asyncio.create_task(frontend.run([group], lambda _, delta: deltas.append(delta)))
        await asyncio.sleep(0)
        frontend.client.wait_until_told()  # everything has arrived when it is this prompt's turn
        with pytest.raises(RequestFailed, match="NaN"):
            await running
        assert [(delta.outputs[0].text, delta.finished) for delta in deltas] == [("abc", False)]

    async def test_who_cannot_take_pays_alone(self, start, tokenizer):
        def play(request):
            return Script(token_ids=[5], hangs=True) if request.request_id == "x-0" else echo(request)

        frontend = start(tokenizer, play)

        def fall(_index, _delta):
            raise ZeroDivisionError

        groups = [frontend.prepare("the", SamplingParams(max_tokens=20), request_id=name) for name in "xy"]
        running = frontend.run(groups[:1], fall), frontend.run(groups[1:], ignore)
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError, type(None)]
        assert frontend.client.aborted == ["x-0"]

    @pytest.mark.parametrize("silently", [False, True])
    async def test_engine_death_reaches_everyone(self, start, tokenizer, silently):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))
        groups = [frontend.prepare("the", SamplingParams(), request_id=f"{i}") for i in range(4)]
        tasks = [asyncio.create_task(frontend.run([group], ignore)) for group in groups]
        await until(lambda: frontend.client.num_output_tokens == 4)
        frontend.client.die(silently=silently)
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
        assert [type(error) for error in errors] == [EngineDead] * 4

    async def test_closing_the_engine_ends_requests_as_aborted(self, start, tokenizer):
        frontend = start(tokenizer, lambda _: Script(token_ids=[5], hangs=True))
        group = frontend.prepare("the", SamplingParams(), request_id="x")
        seen = asyncio.Event()
        running = asyncio.create_task(frontend.run([group], lambda *_: seen.set()))
        await asyncio.wait_for(seen.wait(), PATIENCE)
        await asyncio.to_thread(frontend.client.close)
        await running
        assert group.result().outputs[0].finish_reason == "abort"

    async def test_a_refused_request_leaves_nothing_behind(self, start, tokenizer):
        frontend = start(tokenizer)
        frontend.client.refusal = QueueFull("full")
        with pytest.raises(QueueFull):
            await frontend.run([frontend.prepare("the", SamplingParams(), request_id="x")], ignore)
        assert frontend._dispatcher._prompts == {}
        assert frontend.client.aborted == []
        frontend.client.refusal = None
        await frontend.run([frontend.prepare("the", SamplingParams(), request_id="x")], ignore)
        assert frontend._dispatcher._prompts == {}

    def test_a_loop_that_is_gone_aborts_its_requests(self, start, tokenizer):
        client = start(tokenizer).client
        loop = asyncio.new_event_loop()
        sink = Dispatcher(client, loop).sink
        loop.close()
        engine = threading.Thread(target=sink, args=([EngineOutput(request_id="x-0", new_token_ids=[5])],))
        engine.start()
        engine.join()
        assert client.aborted == ["x-0"]

    def test_nothing_to_run(self, start, tokenizer):
        asyncio.run(asyncio.wait_for(start(tokenizer).run([], ignore), PATIENCE))

    def test_a_second_loop(self, start, tokenizer):
        frontend = start(tokenizer)
        groups = [frontend.prepare("the", SamplingParams(), request_id=name) for name in "xy"]
        for group in groups:
            asyncio.run(frontend.run([group], ignore))
        assert groups[0].result().outputs == groups[1].result().outputs
