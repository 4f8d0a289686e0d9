"""Traffic of every kind through the simulation, which checks all that can be stated after each operation."""

import dataclasses
import random
from typing import ClassVar

import pytest
from depths import examples, quick_first
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from scheduling_simulation import STOP, VOCAB, Simulation, make_limits, make_request

from jaxserve.errors import CapacityExceeded
from jaxserve.scheduling.drafting import NO_DRAFTS

STEMS = [[1 + i * k % VOCAB for i in range(24)] for k in (1, 2, 3)]
PROMPTS = st.builds(
    lambda stem, length, tail: STEMS[stem][:length] + tail,
    st.integers(0, len(STEMS) - 1),
    st.integers(0, 18),
    st.lists(st.integers(STOP, VOCAB), min_size=1, max_size=6),
)
GROUPS = st.tuples(
    st.sampled_from([1, 1, 1, 2, 4]),
    st.fixed_dictionaries(
        {
            "prompt": PROMPTS,
            "max_tokens": st.integers(1, 30),
            "priority": st.integers(-2, 2),
            "salt": st.sampled_from(["", "", "", "s"]),
            "prompt_logprobs": st.sampled_from([None, None, None, 1]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.0, 1.0]),  # no drafts
        }
    ),
)
COUNTS = ("num_operations", "num_accepted", "num_rejected", "num_resumed", "num_passed")
"""What a machine sums up over its examples."""


class Traffic(RuleBasedStateMachine):
    """Any order of operations that a client and an engine could choose, under any limits."""

    kept_states: ClassVar[tuple[int | None, ...]] = (None,)
    requests = Bundle("requests")

    @initialize(
        limits=st.builds(
            make_limits,
            num_blocks=st.integers(8, 24),
            block_size=st.sampled_from([2, 4]),
            max_num_seqs=st.integers(2, 8),
            max_num_batched_tokens=st.integers(1, 32),
            policy=st.sampled_from(["fcfs", "priority"]),
            windows=st.sampled_from([(None,), (None,), (None, 5), (None, 3, 3, 9), (4,), (1,), (1, None)]),
            num_stages=st.sampled_from([1, 1, 2, 3]),
            drafts=st.sampled_from([(), ((8, 1),), ((8, 4),), ((8, 4),), ((2, 5), (4, 2)), ((4, 5), (8, 3))]),
            num_kept_states=st.runner().flatmap(lambda machine: st.sampled_from(machine.kept_states)),
            min_kept_tokens=st.sampled_from([1, 2, 6]),
        ),
        enable_prefix_caching=st.booleans(),
        kind=st.sampled_from(["continuous"] * 5 + ["static"]),
    )
    def start(self, limits, enable_prefix_caching, kind):
        if kind == "static":
            limits = dataclasses.replace(limits, num_blocks=32 * len(limits.windows), block_size=4, drafts=NO_DRAFTS)
        self.simulation = Simulation(limits, kind=kind, enable_prefix_caching=enable_prefix_caching)
        self.num_added = 0

    @precondition(lambda self: len(self.simulation.unfinished) < 8)
    @rule(target=requests, groups=st.lists(GROUPS, min_size=1, max_size=6))
    def add(self, groups):
        added = []
        for n, group in groups:
            names = [f"{self.num_added + i}" for i in range(n)]
            self.num_added += n
            try:
                added += self.simulation.add(*(make_request(name, group=names[0], **group) for name in names))
            except CapacityExceeded:
                assert not any(request.request_id in names for request in self.simulation.unfinished)
        return added

    @precondition(lambda self: len(self.simulation.in_flight) < 4)
    @rule()
    def schedule(self):
        self.simulation.schedule()

    @precondition(lambda self: self.simulation.in_flight)
    @rule()
    def update(self):
        self.simulation.update()

    @rule(num_in_flight=st.integers(0, 2), count=st.integers(1, 8))
    def run(self, num_in_flight, count):
        for _ in range(count):
            self.simulation.step(num_in_flight)

    @rule(siblings=requests, index=st.integers(0, 3))
    def abort(self, siblings, index):
        self.simulation.abort(*siblings[index : index + 1])

    @precondition(lambda self: len(self.simulation.poisoned_requests) < 3)
    @rule(siblings=requests)
    def poison(self, siblings):
        self.simulation.poisoned_requests.update(siblings[:1])

    @precondition(lambda self: not self.simulation.unfinished or self.num_added % 5 == 0)
    @rule()
    def reset_prefix_cache(self):
        is_running = any(request.slot >= 0 for request in self.simulation.unfinished)
        assert self.simulation.scheduler.reset_prefix_cache() == (not is_running)
        self.simulation.check()

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.drain(num_in_flight=1)
            for name in COUNTS:
                source = self.simulation if name == "num_operations" else self.simulation.device
                setattr(type(self), name, getattr(self, name) + getattr(source, name))


class TrafficWithStates(Traffic):
    """Traffic of a model whose layers keep states."""

    kept_states = (1, 4)


@pytest.mark.parametrize(("machine", "number"), [(Traffic, 70), (TrafficWithStates, 40)])
def test_hypothesis_traffic(machine, number):
    for name in COUNTS:  # of this machine alone: one inherits the sums of the other
        setattr(machine, name, 0)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(number),
            stateful_step_count=80,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert machine.num_operations >= examples(90 * number)
    assert min(machine.num_accepted, machine.num_rejected) >= examples(2 * number)
    if machine is TrafficWithStates:
        assert min(machine.num_resumed, machine.num_passed) >= examples(30)


@pytest.mark.parametrize("num_in_flight", [0, 1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    ("num_blocks", "windows"), quick_first([(22, (6, None, 6)), (9, (None,)), (16, (None,)), (40, (None,))])
)
@pytest.mark.parametrize("num_drafts", quick_first([4, 0]))
def test_saturating_traffic(policy, num_in_flight, num_blocks, windows, num_drafts):
    """More arrives than fits, for a long time: preemption at every turn, and still everyone gets the right tokens.
    Three plans are in flight of three stages.
    """
    rng = random.Random(f"{policy} {num_in_flight} {num_blocks}")
    sizes = {"num_blocks": num_blocks, "max_num_seqs": 6, "max_num_batched_tokens": 12}
    sizes["num_stages"] = max(1, num_in_flight)
    simulation = Simulation(make_limits(**sizes, policy=policy, windows=windows, drafts=((6, num_drafts),)))
    for index in range(120):
        if len(simulation.unfinished) < 12:
            prompt = rng.choice(STEMS)[: rng.randrange(17)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
            names = [f"{index}.{i}" for i in range(rng.choice([1, 1, 3]))]
            priority, max_tokens = rng.randrange(3), rng.randint(1, 14)
            simulation.add(
                *(make_request(name, prompt, max_tokens, group=names[0], priority=priority) for name in names)
            )
        simulation.step(num_in_flight)
        if index % 16 == 15:
            simulation.abort(rng.choice(simulation.requests))
    simulation.drain(num_in_flight)
    stats = simulation.scheduler.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions > 0 or num_blocks == 40


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize("block_size", quick_first([4, 2, 8]))
def test_steps_of_one_token_a_row(block_size, num_in_flight):
    """Prompts that continue, by one token, from where another request is: the device checks what their rows attend
    to.
    """
    rng = random.Random(f"{block_size} {num_in_flight}")
    devices = []
    for budget in (1, 2, 3, 4, 6, 8):
        limits = make_limits(
            num_blocks=rng.choice([80, 160]) // block_size,
            block_size=block_size,
            max_num_batched_tokens=budget,
            policy=rng.choice(["fcfs", "priority"]),
        )
        simulation = Simulation(limits)
        devices.append(simulation.device)
        for index in range(60):
            if len(simulation.unfinished) < 6:
                text = rng.choice([request.token_ids for request in simulation.unfinished] or STEMS)
                prompt = text[: rng.choice([len(text), rng.randint(1, 3) * block_size])][:40]
                max_tokens, priority = rng.randint(1, 12), rng.randrange(2)
                simulation.add(make_request(f"{index}", [*prompt, rng.randrange(VOCAB)], max_tokens, priority=priority))
            simulation.step(num_in_flight)
        simulation.drain(num_in_flight)
    assert sum(device.num_shared_decodes for device in devices) > 40
    assert sum(device.num_cut_decodes for device in devices) > 40
