import random

import pytest
from scheduling_simulation import Simulation, make_limits, never_stops

from jaxserve.scheduling.snapshot import CACHED, FREE, BlocksSnapshot


def _states(runs):
    return [state for state, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_runs_spell_every_block(seed):
    rng = random.Random(seed)
    ref_counts = [rng.choice([0, 0, 1, 1, 1, 2, 300]) for _ in range(200)]
    evictable = [block for block, count in enumerate(ref_counts) if count == 0 and rng.random() < 0.5]
    runs = BlocksSnapshot(ref_counts, evictable).runs()
    expected = [CACHED if block in evictable else count for block, count in enumerate(ref_counts)]
    assert _states(runs) == expected
    assert all(state != later for state, later in zip(runs[::2], runs[2::2], strict=False)), "a run is split"


def test_an_untouched_pool_is_one_run():
    assert BlocksSnapshot([0] * 7, []).runs() == [FREE, 7]


def test_shared_prefixes_show_and_stay_cached():
    simulation = Simulation(make_limits(max_num_seqs=3, num_blocks=32))
    simulation.add(never_stops("a", 12, 8))
    for _ in range(4):
        simulation.step(0)
    simulation.add(never_stops("aa", 12, 8), never_stops("b", 5, 8), never_stops("waits", 9, 3))
    simulation.step(0)
    snapshot = simulation.scheduler.snapshot(max_waiting=5)
    assert [request.request_id for request in snapshot.running] == ["a", "aa", "b"]
    assert [request.slot for request in snapshot.running] == [0, 1, 2]
    first, second, third = snapshot.running
    assert (first.num_prompt_tokens, first.max_tokens) == (12, 8)
    assert first.num_computed_tokens >= 12
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert [request.request_id for request in snapshot.waiting] == ["waits"]
    assert (snapshot.waiting[0].slot, snapshot.waiting[0].block_ids) == (-1, [])
    assert simulation.scheduler.snapshot(max_waiting=0).waiting == []

    states = _states(snapshot.blocks.runs())
    assert len(states) == 32
    assert [states[block] for block in first.block_ids[:3]] == [2, 2, 1]
    assert sum(state > 0 for state in states) == len({*first.block_ids, *second.block_ids, *third.block_ids})

    simulation.drain()
    snapshot = simulation.scheduler.snapshot(max_waiting=5)
    assert snapshot.running == snapshot.waiting == []
    states = _states(snapshot.blocks.runs())
    assert set(states) == {FREE, CACHED}


def test_a_snapshot_is_a_copy():
    simulation = Simulation(make_limits())
    (request,) = simulation.add(never_stops("a", 12, 8))
    simulation.step(0)
    snapshot = simulation.scheduler.snapshot(max_waiting=5)
    before = (list(snapshot.running[0].block_ids), snapshot.blocks.runs())
    simulation.drain()
    assert request.is_finished
    assert (snapshot.running[0].block_ids, snapshot.blocks.runs()) == before


def test_the_static_scheduler_has_blocks_too():
    simulation = Simulation(make_limits(max_model_len=32), kind="static")
    simulation.add(never_stops("a", 6, 8))
    simulation.step(0)
    snapshot = simulation.scheduler.snapshot(max_waiting=5)
    states = _states(snapshot.blocks.runs())
    assert [block for block, state in enumerate(states) if state == 1] == sorted(snapshot.running[0].block_ids)
