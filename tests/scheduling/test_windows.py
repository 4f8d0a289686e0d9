"""KV groups with windows: what requests need, what is given back, what is still found. The simulation checks KV."""

import dataclasses

import pytest
from scheduling_simulation import Simulation, make_limits, make_request, never_stops, prompt

from jaxserve.errors import CapacityExceeded
from jaxserve.request import NO_BLOCK
from jaxserve.scheduling.block_needs import BlockNeeds


def held(request):
    return [sum(block_id != NO_BLOCK for block_id in table) for table in request.block_tables]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 100])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_needs_are_what_a_request_alone_comes_to_hold(window, chunk):
    needs = BlockNeeds(windows=(window, None, window), block_size=4, max_chunk=chunk)
    limits = make_limits(num_blocks=200, max_num_batched_tokens=chunk, windows=needs.windows)
    simulation = Simulation(limits)
    (request,) = simulation.add(never_stops("a", 30, 20))
    most = [0, 0, 0]
    while not request.is_finished:
        simulation.schedule()
        most = list(map(max, most, held(request)))
        simulation.update()
    bound = min(13, needs.most_of_window(window, chunk=chunk))
    assert most[0] == most[2]
    assert most[0] in (bound - 1, bound)  # chunks of this size may not have extended over one block more
    assert most[1] == 13
    assert needs.peak(49) == 2 * bound + 13
    tight = Simulation(dataclasses.replace(limits, num_blocks=needs.peak(49)))
    tight.add(never_stops("a", 30, 20))
    tight.drain(1)
    with pytest.raises(CapacityExceeded):
        Simulation(dataclasses.replace(limits, num_blocks=needs.peak(49) - 1)).add(never_stops("a", 30, 20))


def test_longest_and_number_of_requests():
    needs = BlockNeeds(windows=(None, 8), block_size=4, max_chunk=16)
    assert needs.peak(100) == 25 + 7
    assert needs.longest(32, limit=1000) == 100
    assert needs.longest(31, limit=1000) == 96
    assert needs.longest(32, limit=50) == 50
    assert needs.longest(0, limit=50) == 0
    assert BlockNeeds(windows=(8,), block_size=4, max_chunk=16).longest(7, limit=10**6) == 10**6
    # Each holds 25 and 3, but for the one that computes its prompt.
    assert [needs.num_requests(n, num_tokens=100) for n in (31, 32, 59, 60, 88)] == [0, 1, 1, 2, 3]


def test_blocks_go_back_while_plans_are_in_flight():
    simulation = Simulation(make_limits(windows=(6, None), num_blocks=40))
    (request,) = simulation.add(never_stops("a", 20, 20))
    for _ in range(8):
        simulation.step(3)
    assert request.num_pending == 3
    assert held(request) == [2, 7]
    simulation.drain(3)


def test_a_prefix_is_found_whose_window_has_gone_back():
    simulation = Simulation(make_limits(windows=(None, 6), num_blocks=40))
    (first,) = simulation.add(never_stops("a", 30, 4))
    simulation.drain()
    again = make_request("b", [*first.token_ids[:14], 7, 7], 1)
    (second,) = simulation.add(again)
    simulation.schedule()
    assert second.num_cached_tokens == 12
    full, local = second.block_tables
    assert NO_BLOCK not in full
    assert [block_id == NO_BLOCK for block_id in local] == [True, False, False, False]  # 7 and on are seen
    simulation.update()
    simulation.drain()


def test_without_the_blocks_of_its_window_a_prefix_is_of_no_use():
    simulation = Simulation(make_limits(windows=(None, 6), num_blocks=40))
    (first,) = simulation.add(never_stops("a", 30, 2))
    simulation.drain()
    scheduler = simulation.scheduler
    entry = scheduler._cache._entries[first.block_hashes[5]]
    # As if it had been evicted: tokens from 24 on miss it, those from 20 on do not attend to it.
    victim = entry.block_ids[1]
    scheduler._cache.remove(victim)
    del scheduler._pool._evictable[victim]
    scheduler._pool._free.append(victim)
    (again,) = simulation.add(make_request("b", first.token_ids[:27], 1))
    simulation.schedule()
    assert again.num_cached_tokens == 20
    simulation.update()
    simulation.drain()
    assert entry.block_ids[1] != NO_BLOCK, "the group has the block again"


def test_prefixes_of_windows_alone_need_no_beginning():
    simulation = Simulation(make_limits(windows=(6,), num_blocks=10))
    (first,) = simulation.add(never_stops("a", 30, 8))
    simulation.drain()
    simulation.add(make_request("other", prompt(9, first=4), 1))  # takes what was given back first
    simulation.drain()
    assert simulation.scheduler._cache._entries.get(first.block_hashes[0]) is None
    (turn,) = simulation.add(make_request("b", [*first.token_ids, 1], 1))
    simulation.drain()
    assert turn.num_cached_tokens == 36


def test_held_blocks_are_counted_by_window():
    simulation = Simulation(make_limits(windows=(6, None, 6, 3), num_blocks=60))
    simulation.add(never_stops("a", 21, 3))
    for _ in range(3):
        simulation.step(0)
    assert simulation.scheduler.stats().held_blocks == {6: 4, None: 6, 3: 2}
    simulation.drain()
    assert simulation.scheduler.stats().held_blocks == {6: 0, None: 0, 3: 0}


def test_nothing_of_a_failed_request_stays_cached_in_any_group():
    simulation = Simulation(make_limits(windows=(6, None), num_blocks=40))
    (request,) = simulation.add(never_stops("a", 30, 8))
    for _ in range(4):
        simulation.step(0)
    assert len(simulation.scheduler._cache.block_ids()) > 8
    simulation.poisoned_requests.add(request)
    simulation.step(0)
    assert simulation.scheduler._cache.block_ids() == []
