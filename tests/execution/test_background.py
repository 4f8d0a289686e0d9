"""Requests are served before all programs are compiled, in those that are there. None waits for one that it does not
need.
"""

import contextlib
import threading
import time

import pytest
from depths import quick_first
from engine_harness import drain, request, run, tiny_config
from waiting import PATIENCE, wait_until

from jaxserve.engine import device, startup
from jaxserve.engine.local import LocalEngineClient
from jaxserve.execution.programs.kinds import AdmitExtras, Draw, Embed, PromptLogprobs
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.spec import ON_CPU, ON_GPU
from jaxserve.sampling_params import SamplingParams

CONFIG = tiny_config("llama_untied", max_num_batched_tokens=8, warmup="background", compilation_cache_dir="")
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=20, seed=3),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 2.0}),
]


class Gated(Lowering):
    """Lowers nothing in the background before `gate` is open, and then in this process; but at once what `opened` has.
    Programs of the kind `fails` fail.
    """

    gate: threading.Event
    opened: set[type] = set()  # noqa: RUF012 - replaced, not changed
    fails: type | None = None

    def __init__(self, builder, *, folder, num_workers=None, early=(), is_background=False, shipped=None):
        super().__init__(builder, folder=folder, num_workers=0, early=early)
        self._is_gated = is_background

    def lower(self, program, num_blocks):
        assert not self._is_gated or type(program) in self.opened or self.gate.wait(PATIENCE)
        if self._is_gated and self.fails is type(program):
            raise RuntimeError("it does not lower")
        return super().lower(program, num_blocks)


@pytest.fixture
def gated(monkeypatch):
    monkeypatch.setattr(startup, "Lowering", Gated)
    monkeypatch.setattr(Gated, "gate", threading.Event(), raising=False)
    monkeypatch.setattr(Gated, "opened", Gated.opened)
    monkeypatch.setattr(Gated, "fails", Gated.fails)
    yield Gated
    Gated.gate.set()


def answers(engine, kinds=KINDS):
    """What comes of requests of these kinds, alone and together."""
    engine.scheduler.reset_prefix_cache()
    results = {}
    for number, group in enumerate((kinds[:1], kinds[:2], kinds)):
        results |= run(
            engine,
            [
                request(f"{number}-{i}", range(1 + i, 4 * i + 3), 4, params, bad_word_ids=((3, 4),) if i == 3 else ())
                for i, params in enumerate(group)
            ],
        )
    return {name: result.token_ids for name, result in results.items()}


def finish(engine, results, is_waiting):
    """Step while something is waited for."""
    deadline = time.monotonic() + PATIENCE
    while is_waiting():
        assert time.monotonic() < deadline
        drain(engine, results)
        time.sleep(0.01)


def wait_until_warm(engine):
    deadline = time.monotonic() + PATIENCE
    while engine.runner.is_warming_up:
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("traits", quick_first([ON_CPU, ON_GPU]))
def test_the_same_answers_before_and_after_all_is_compiled(traits, gated, monkeypatch, caplog):
    monkeypatch.setattr(device, "ON_CPU", traits)
    caplog.set_level("INFO", logger="jaxserve")
    engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    runner = engine.runner
    first = set(runner.builder.first_programs())
    everything = first | set(runner.builder.shapes.programs)
    assert first < everything
    early = answers(engine, KINDS if traits is ON_GPU else KINDS[:2])
    assert engine.stats().num_compiles == len(first)
    assert runner.is_warming_up
    gated.gate.set()
    wait_until_warm(engine)
    assert {program for program, _ in runner.steps.items()} == everything
    assert engine.stats().num_compiles == len(everything)
    assert answers(engine).items() >= early.items()
    assert engine.stats().num_recompiles_after_warmup == 0
    assert f"all programs are compiled: {len(everything - first)}" in caplog.text
    engine.close()


@pytest.mark.slow
def test_answers_stay_the_same_while_programs_come(gated, monkeypatch):
    """Under a load that does not end before all is compiled, with the programs of a GPU."""
    monkeypatch.setattr(device, "ON_CPU", ON_GPU)
    engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    early = answers(engine)
    assert engine.runner.is_warming_up
    gated.gate.set()
    while engine.runner.is_warming_up:
        assert answers(engine) == early
    assert answers(engine) == early
    assert engine.stats().num_recompiles_after_warmup == 0
    engine.close()


def test_no_request_waits_for_a_program_that_it_does_not_need(gated):
    """Plain ones run in the first programs, and others in those and what they need, which is compiled for them."""
    engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    used = []
    started = engine.runner._run
    engine.runner._run = lambda program, *arguments: used.append(program) or started(program, *arguments)
    first = engine.runner.builder.first_programs()
    assert sorted(type(program).__name__ for program in first) == ["Admit", "Draw", "Forward"]
    gated.opened = {Draw, PromptLogprobs}
    kinds = {"plain": KINDS[1], "log probabilities": KINDS[2], "penalties": KINDS[3]}
    results = run(engine, [request(name, range(1, 20), 3, params) for name, params in kinds.items()])
    assert set(used) == set(first)
    assert [len(result.token_ids) for result in results.values()] == [3, 0, 0]
    finish(engine, results, lambda: results["log probabilities"].finish_reason is None)
    assert set(used) - set(first) <= {Draw(4, has_logprobs=True), PromptLogprobs(first[0].bucket)}
    assert engine.stats().num_waiting_deferred == 1
    engine.add([request("aborted", [1, 2, 3], 3, KINDS[3])])
    engine.abort(["aborted"])
    gated.gate.set()
    finish(engine, results, lambda: engine.has_requests)
    assert [result.finish_reason for result in results.values()] == ["length"] * 3
    assert engine.stats().num_recompiles_after_warmup == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PromptLogprobs, AdmitExtras])
def test_a_program_that_cannot_be_had_costs_only_requests_that_need_it(kind, gated, caplog):
    gated.fails = kind
    engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    early = answers(engine, KINDS[:2])
    gated.gate.set()
    params = KINDS[2 if kind is PromptLogprobs else 3]
    results = run(engine, [request("refused", [1, 2, 3], 4, params)])
    finish(engine, results, lambda: engine.has_requests)
    [ended] = results.values()
    assert (ended.finish_reason, ended.token_ids) == ("error", [])
    assert engine.runner._background._ended.wait(PATIENCE)
    assert "does not compile" in caplog.text
    assert engine.runner.is_warming_up
    assert answers(engine, KINDS[:2]) == early
    assert run(engine, [request("other", [1, 2], 3, KINDS[5 - KINDS.index(params)])])["other"].token_ids
    assert engine.stats().num_recompiles_after_warmup == 0
    engine.close()


def test_an_idle_engine_sleeps_while_programs_compile(gated):
    """It wakes when they are there, not to look for them."""
    engine, info = startup.start_engine(CONFIG, mesh=None, progress=False)
    looks, stats = [], engine.stats
    engine.stats = lambda: looks.append(None) or stats()
    with contextlib.closing(LocalEngineClient(engine, info)):
        time.sleep(0.5)
        assert len(looks) <= 2
        assert engine.runner.is_warming_up
        gated.gate.set()
        wait_until(lambda: not engine.runner.is_warming_up)


@pytest.mark.slow
def test_a_close_does_not_wait_for_what_nobody_needs(gated, caplog):
    engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    gated.gate.set()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxserve-background"]
    assert not any(isinstance(program, Embed) for program, _ in engine.runner.steps.items())
    assert "does not compile" not in caplog.text
