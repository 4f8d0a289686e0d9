"""LLM over an engine that plays scripts: prompts, streams, chats, vectors, and the end of an LLM."""

import gc
import logging
import signal
import threading

import numpy as np
import pytest
from fake_client import HIDDEN_SIZE, FakeEngineClient, Script, echo
from waiting import PATIENCE, wait_until

import jaxserve
import jaxserve.llm
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import as_prompt_list
from jaxserve.errors import ContextLengthExceeded, EngineDead, InvalidRequest, RequestFailed
from jaxserve.llm import LLM
from jaxserve.sampling_params import BeamSearchParams, SamplingParams

USER = {"role": "user", "content": "hi"}


def texts(outputs):
    return [completion.text for output in outputs for completion in output.outputs]


class TestGenerate:
    def test_one_prompt_or_many_always_give_a_list(self, start):
        llm, _ = start()
        params = SamplingParams(max_tokens=2)
        assert texts(llm.generate("abc", params)) == ["bc"]
        assert texts(llm.generate(["abc", "xyz", "the"], params)) == ["bc", "yz", "thethe"]
        assert llm.generate([], params) == []

    def test_no_beams_for_no_prompts(self, start):
        llm, _ = start()
        assert llm.beam_search([], BeamSearchParams(beam_width=2)) == []

    def test_types_of_a_prompt(self, start, tokenizer):
        llm, _ = start()
        ids = tokenizer.encode("abc")
        prompts = [
            "abc",
            ids,
            tuple(ids),
            np.array(ids),
            {"prompt": "abc"},
            {"prompt_token_ids": ids},
            {"prompt_token_ids": ids, "prompt": "shown"},
        ]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
        assert texts(outputs) == ["bc"] * len(prompts)
        assert [output.prompt for output in outputs] == ["abc", None, None, None, "abc", None, "shown"]
        assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
        assert texts(llm.generate(ids, SamplingParams(max_tokens=2))) == ["bc"], "one list of ids is one prompt"
        assert texts(llm.generate(np.array(ids), SamplingParams(max_tokens=2))) == ["bc"]

    def test_types_of_many_prompts(self, start, tokenizer):
        llm, _ = start()
        ids = tokenizer.encode("abc")
        for prompts in (["abc"] * 2, ("abc", ids), (text for text in ["abc"] * 2), np.array([ids] * 2), [ids] * 2):
            assert texts(llm.generate(prompts, SamplingParams(max_tokens=2))) == ["bc"] * 2

    @pytest.mark.parametrize("prompts", [None, 5, b"abc"])
    def test_what_is_no_prompt(self, prompts):
        with pytest.raises(InvalidRequest, match=f"not {type(prompts).__name__}"):
            as_prompt_list(prompts)

    def test_results_keep_the_order_and_have_the_names_of_vllm(self, start):
        llm, _ = start()
        lengths = [9, 1, 5, 3]
        params = [SamplingParams(max_tokens=length, logprobs=1) for length in lengths]
        outputs = llm.generate(["abc"] * 4, params)
        for output, length in zip(outputs, lengths, strict=True):
            assert output.prompt == "abc"
            assert output.finished
            (completion,) = output.outputs
            assert (completion.index, completion.finish_reason) == (0, "length")
            assert len(completion.token_ids) == len(completion.logprobs) == length
            assert completion.logprobs[0][completion.token_ids[0]].rank == 2
            assert output.num_cached_tokens == 0
        assert len({output.request_id for output in outputs}) == 4

    def test_defaults(self, start):
        llm, client = start()
        assert len(llm.generate("abc")[0].outputs[0].token_ids) == 16
        llm, client = start(default_sampling={"temperature": 0.5, "max_tokens": 3})
        llm.generate("abc")
        assert client.submitted[0].params == SamplingParams(temperature=0.5, max_tokens=3) == llm.sampling_params()

    def test_output_ends_with_the_context(self, start):
        llm, _ = start(max_model_len=20)
        (output,) = llm.generate("x" * 10, SamplingParams(max_tokens=100))
        completion = output.outputs[0]
        assert len(output.prompt_token_ids) + len(completion.token_ids) == 20
        assert completion.finish_reason == "length"

    def test_a_wrong_prompt_stops_the_call_before_it_runs(self, start):
        llm, client = start(max_model_len=20)
        with pytest.raises(ContextLengthExceeded) as caught:
            llm.generate(["abc", "x" * 30])
        assert caught.value.__notes__ == ["in prompts[1]"]
        with pytest.raises(InvalidRequest, match="2 sampling_params for 1 prompts"):
            llm.generate(["abc"], [SamplingParams()] * 2)
        for prompt in ({"promt": "abc"}, {}, b"abc"):
            with pytest.raises(InvalidRequest, match="prompt"):
                llm.generate(["abc", prompt])
        assert client.submitted == []

    def test_a_failed_prompt_is_told_apart_and_logged(self, start, caplog):
        llm, _ = start(
            lambda request: Script(token_ids=[5], error="NaN") if len(request.prompt_token_ids) == 1 else echo(request)
        )
        with caplog.at_level(logging.ERROR, logger="jaxserve"):
            outputs = llm.generate(["abc", "a"])
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
        assert "prompts[1] could not be finished: NaN" in caplog.text

    def test_the_seed_makes_runs_reproducible(self, start):
        seeds = []
        for _ in range(2):
            llm, client = start()
            llm.generate(["abc", "abc"], SamplingParams(n=2))
            seeds.append([request.seed for request in client.submitted])
        assert seeds[0] == seeds[1]
        assert len(set(seeds[0])) == 4

    def test_the_bar_shows_rates(self, start, capsys):
        llm, _ = start()
        llm.generate(["abc", "def"], use_tqdm=False)
        assert capsys.readouterr().err == ""
        llm.generate(["abc", "def"])
        shown = capsys.readouterr().err
        assert "2/2" in shown
        assert "tok/s" in shown

    async def test_inside_a_running_event_loop(self, start):
        llm, _ = start()
        assert texts(llm.generate("abc", SamplingParams(max_tokens=2))) == ["bc"]

    def test_from_several_threads(self, start):
        llm, _ = start()
        results = {}

        def work(name):
            results[name] = llm.generate([f"x{name}"] * 3, SamplingParams(max_tokens=4), use_tqdm=False)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert {name: texts(outputs) for name, outputs in results.items()} == {
            name: [name * 4] * 3 for name in "abcdef"
        }

    def test_an_interrupt_aborts_what_runs(self, start, monkeypatch):
        llm, client = start(lambda _: Script(token_ids=[5, 6, 7], hangs=True))
        monkeypatch.setattr(jaxserve.llm.Progress, "update", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate(["abc", "def"])
        assert client.num_running == 0, "although the traceback is still held"
        assert len(client.aborted) == 2
        assert caught.tb is not None

    def test_engine_death(self, start):
        llm, client = start(lambda _: Script(token_ids=[5], hangs=True))

        def die():
            wait_until(lambda: client.num_output_tokens == 1)
            client.die()

        threading.Thread(target=die).start()
        with pytest.raises(EngineDead, match="the device is gone"):
            llm.generate("abc")


class TestStream:
    def test_deltas(self, start):
        llm, _ = start()
        deltas = list(llm.stream("abc", SamplingParams(max_tokens=4)))
        assert [delta.outputs[0].text for delta in deltas] == ["b", "c", "b", "c"]
        assert [delta.finished for delta in deltas] == [False] * 3 + [True]

    def test_logprobs_that_were_given_are_forgotten(self, start, monkeypatch):
        llm, _ = start()
        num_kept = []
        forget = RequestGroup.forget_logprobs

        def watched(group):
            forget(group)
            num_kept.append(len(group.result().outputs[0].logprobs))

        monkeypatch.setattr(RequestGroup, "forget_logprobs", watched)
        deltas = list(llm.stream("abc", SamplingParams(max_tokens=4, logprobs=2)))
        assert [len(delta.outputs[0].logprobs) for delta in deltas] == [1] * 4
        assert num_kept == [0] * 4

    def test_wrong_parameters_are_refused_at_once(self, start):
        llm, _ = start()
        with pytest.raises(InvalidRequest):
            llm.stream("abc", SamplingParams(stop_token_ids=[99999]))

    def test_closing_aborts(self, start):
        llm, client = start(lambda _: Script(token_ids=[5], hangs=True))
        stream = llm.stream("abc")
        next(stream)
        stream.close()
        assert client.num_running == 0

    def test_a_failure_raises(self, start):
        llm, _ = start(lambda _: Script(token_ids=[5], error="NaN"))
        with pytest.raises(RequestFailed, match="NaN"):
            list(llm.stream("abc"))


class TestChat:
    def test_one_conversation_or_many(self, start):
        llm, _ = start()
        params = SamplingParams(max_tokens=3)
        (output,) = llm.chat([USER], params)
        assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
        outputs = llm.chat([[USER], [USER, {"role": "assistant", "content": "Well"}]], params)
        assert [output.prompt.count("im_start") for output in outputs] == [2, 3]

    def test_options_reach_the_template(self, start):
        llm, _ = start()
        (output,) = llm.chat([USER], tools=[{"type": "f"}], chat_template_kwargs={"mood": "ok"})
        assert 'tools: [{"type": "f"}]\nmood: ok\n' in output.prompt
        messages = [USER, {"role": "assistant", "content": "Well"}]
        (output,) = llm.chat(messages, add_generation_prompt=False, continue_final_message=True)
        assert output.prompt.endswith("assistant\nWell")
        (output,) = llm.chat([USER], chat_template="{{ messages[0].content }}!")
        assert output.prompt == "hi!"

    def test_messages_of_a_clients_history(self, start):
        llm, _ = start()
        template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}[%s]{% endfor %};{% endfor %}"
        call = {"type": "function", "function": {"name": "look_up", "arguments": '{"word": "ä"}'}}
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        written = "{{ c.function.name }} {{ c.function.arguments | tojson }}"
        for arguments in (written, "{{ c.function.name + ' ' + c.function.arguments }}"):
            (output,) = llm.chat(messages, chat_template=template.replace("%s", arguments))
            assert output.prompt == 'a\nb;[look_up {"word": "ä"}];'
        messages[0]["content"] = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
        with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[2\] must be a text part"):
            llm.chat(messages)

    def test_stream_chat(self, start):
        llm, _ = start()
        streamed = "".join(delta.outputs[0].text for delta in llm.stream_chat([USER], SamplingParams(max_tokens=5)))
        assert streamed == llm.chat([USER], SamplingParams(max_tokens=5))[0].outputs[0].text

    @pytest.mark.parametrize("messages", [[], [[]], [{"role": "robot", "content": ""}]])
    def test_bad_messages(self, start, messages):
        llm, client = start()
        if messages == []:
            assert llm.chat(messages) == []
        else:
            with pytest.raises(InvalidRequest):
                llm.chat(messages)
        assert client.submitted == []

    @pytest.mark.parametrize(
        ("message", "name"), [({"content": "hi"}, "role"), ({"role": "user", "contents": "hi"}, "content")]
    )
    def test_what_a_message_lacks_is_named(self, start, message, name):
        llm, _ = start()
        with pytest.raises(InvalidRequest) as raised:
            llm.chat([USER, message])
        assert raised.value.param == f"messages[1].{name}"


class TestLife:
    def test_the_context_manager_closes_the_engine(self, start):
        llm, client = start()
        with llm as entered:
            assert entered is llm
            assert llm.info is client.info
            assert llm.stats().num_running == 0
            assert llm.reset_prefix_cache()
        assert not client.is_alive()
        llm.close()
        with pytest.raises(EngineDead):
            llm.generate("abc")

    def test_the_engine_ends_with_its_llm(self, tokenizer):
        client = FakeEngineClient()
        llm = LLM.from_frontend(Frontend(client, tokenizer))
        llm.generate("abc")
        assert client.is_alive()
        del llm
        gc.collect()
        assert not client.is_alive()

    @pytest.mark.slow
    def test_an_llm_whose_close_was_interrupted_ends_with_its_engine(self, tokenizer, monkeypatch):
        client = FakeEngineClient()
        llm = LLM.from_frontend(Frontend(client, tokenizer))
        with monkeypatch.context() as interrupted:
            interrupted.setattr(client, "close", lambda: signal.default_int_handler(signal.SIGINT, None))
            with pytest.raises(KeyboardInterrupt):
                llm.close()
        assert client.is_alive()
        del llm
        gc.collect()
        assert not client.is_alive()

    @pytest.mark.slow
    def test_a_stream_keeps_its_llm(self, tokenizer):
        client = FakeEngineClient()
        stream = LLM.from_frontend(Frontend(client, tokenizer)).stream("abc", SamplingParams(max_tokens=4))
        assert len(list(stream)) == 4
        del stream
        gc.collect()
        assert not client.is_alive()


class TestEmbed:
    def test_a_vector_for_each_prompt(self, start):
        llm, client = start()
        outputs = llm.embed(["ab", [7, 9], {"prompt_token_ids": [3], "prompt": "c"}], use_tqdm=False)
        assert [output.prompt for output in outputs] == ["ab", None, "c"]
        assert [output.prompt_token_ids for output in outputs][1:] == [[7, 9], [3]]
        for output in outputs:
            powers = float(output.prompt_token_ids[-1]) ** np.arange(HIDDEN_SIZE)
            np.testing.assert_allclose(output.embedding, powers / np.linalg.norm(powers), rtol=1e-6)
        assert all(request.pooling == "last" for request in client.submitted)

    def test_options(self, start):
        llm, _ = start()
        (output,) = llm.embed([4, 8], pooling="mean", dimensions=2, normalize=False, use_tqdm=False)
        assert output.embedding.dtype == np.float32
        assert output.embedding.tolist() == [1.0, 6.0]

    def test_refusals(self, start):
        llm, client = start()
        with pytest.raises(InvalidRequest, match="dimensions"):
            llm.embed("a", dimensions=HIDDEN_SIZE + 1)
        with pytest.raises(ContextLengthExceeded):
            llm.embed(["a", [5] * 513])
        assert client.submitted == []

    def test_a_failure(self, start):
        llm, _ = start(lambda request: Script(token_ids=[], error="not a number"))
        with pytest.raises(RequestFailed, match="not a number"):
            llm.embed("a", use_tqdm=False)
