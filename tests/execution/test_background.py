"""Requests are served before all programs are compiled: in larger ones that are there. None waits for a compiler."""

import threading
import time

import pytest
from depths import quick_first
from engine_harness import GOLDENS, request, run
from few_sizes import every_size
from waiting import PATIENCE

from jaxserve.config import EngineConfig
from jaxserve.engine import device, startup
from jaxserve.execution.programs.kinds import Embed, Forward, PromptLogprobs
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.spec import ON_CPU, ON_GPU
from jaxserve.sampling_params import SamplingParams

CONFIG = EngineConfig(
    model=str(GOLDENS / "llama_untied"),
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    block_size=4,
    kv_cache_memory=2**20,
    warmup="background",
    compilation_cache_dir="",
)
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=20, seed=3),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 2.0}),
]


class Gated(Lowering):
    """Lowers nothing in the background before `gate` is open, and then in this process."""

    gate: threading.Event
    fails: type | None = None

    def __init__(self, builder, *, folder, num_workers=None, early=(), is_background=False):
        super().__init__(builder, folder=folder, num_workers=0, early=early)
        self._is_gated = is_background

    def lower(self, program, num_blocks):
        assert not self._is_gated or self.gate.wait(PATIENCE)
        if self._is_gated and self.fails is type(program):
            raise RuntimeError("it does not lower")
        return super().lower(program, num_blocks)


@pytest.fixture
def gated(monkeypatch):
    monkeypatch.setattr(startup, "Lowering", Gated)
    Gated.gate = threading.Event()
    yield Gated
    Gated.gate.set()


def answers(engine):
    """What comes of requests of all kinds, alone and together."""
    engine.scheduler.reset_prefix_cache()
    results = {}
    for number, group in enumerate(([KINDS[0]], KINDS[:2], KINDS)):
        results |= run(
            engine,
            [
                request(f"{number}-{i}", range(1 + i, 4 * i + 3), 4, params, bad_word_ids=((3, 4),) if i == 3 else ())
                for i, params in enumerate(group)
            ],
        )
    return {name: result.token_ids for name, result in results.items()}


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
    everything = set(runner.builder.shapes.programs)
    assert first < everything
    early = answers(engine)
    assert engine.stats().num_compiles == len(first)
    assert runner.is_warming_up
    gated.gate.set()
    wait_until_warm(engine)
    assert {program for program, _ in runner.steps.items()} == everything
    assert engine.stats().num_compiles == len(everything)
    assert answers(engine) == early
    assert engine.stats().num_recompiles_after_warmup == 0
    assert f"all programs are compiled: {len(everything - first)}" in caplog.text
    engine.close()


@pytest.mark.slow
def test_answers_stay_the_same_while_programs_come(monkeypatch):
    """Under a load that does not end before all is compiled, with the programs of a GPU."""
    monkeypatch.setattr(device, "ON_CPU", ON_GPU)
    engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    early = answers(engine)
    rounds = 0
    while engine.runner.is_warming_up:
        assert answers(engine) == early
        rounds += 1
    assert rounds > 1
    assert answers(engine) == early
    assert engine.stats().num_recompiles_after_warmup == 0
    engine.close()


@pytest.mark.slow
def test_steps_run_in_what_is_there(gated):
    """In the smallest program of those that are compiled, as soon as it is."""
    with every_size():
        engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    used = []
    started = engine.runner._run
    engine.runner._run = lambda program, *arguments: used.append(program) or started(program, *arguments)
    run(engine, [request("early", [1, 2], 3)])
    assert {program.size for program in used if isinstance(program, Forward)} == {8}
    gated.gate.set()
    wait_until_warm(engine)
    used.clear()
    run(engine, [request("late", [1, 2], 3)])
    assert {program.size for program in used if isinstance(program, Forward)} == {1, 4}
    engine.close()


@pytest.mark.slow
def test_a_program_that_cannot_be_had_costs_no_request(gated, caplog):
    gated.fails = PromptLogprobs
    try:
        engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
        early = answers(engine)
        gated.gate.set()
        assert engine.runner._background._ended.wait(PATIENCE)
        assert "steps keep running in larger ones" in caplog.text
        assert engine.runner.is_warming_up
        assert answers(engine) == early
        assert engine.stats().num_recompiles_after_warmup == 0
        engine.close()
    finally:
        gated.fails = None


@pytest.mark.slow
def test_a_close_does_not_wait_for_what_nobody_needs(gated, caplog):
    engine, _ = startup.start_engine(CONFIG, mesh=None, progress=False)
    gated.gate.set()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxserve-background"]
    assert not any(isinstance(program, Embed) for program, _ in engine.runner.steps.items())
    assert "does not compile" not in caplog.text
