"""StaticScheduler: fixed batches, left padding, whole reservations."""

import pytest
from scheduling_simulation import Simulation, make_limits, make_request, naive_generation

from jaxserve.errors import ConfigError
from jaxserve.scheduling.scheduler import make_scheduler


def simulate(*lengths, **limits):
    defaults = {"num_blocks": 64, "max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 64}
    simulation = Simulation(make_limits(**(defaults | limits)), kind="static")
    simulation.add(*(make_request(str(i), [1 + i] * length, 4) for i, length in enumerate(lengths)))
    return simulation


def test_prompts_are_padded_to_the_longest_and_end_together():
    simulation = simulate(9, 2, 5)
    plans = [simulation.step(0) for _ in range(3)]
    assert [[(row.request.request_id, row.start, row.num_tokens) for row in plan.rows] for plan in plans] == [
        [("0", 0, 4)],
        [("1", 0, 1), ("0", 4, 4), ("2", 0, 4)],
        [("0", 8, 1), ("1", 1, 1), ("2", 4, 1)],
    ]
    assert [plan.padded_tokens for plan in plans] == [12, 12, 3]
    assert [len(plan.admitted) for plan in plans] == [1, 2, 0]
    assert all(row.samples for row in plans[2].rows)


def test_batch_keeps_its_shape_until_its_last_member_is_done():
    simulation = simulate(3, 3, 3, 3)
    simulation.step(0)
    late, members = simulation.requests[3], simulation.requests[:3]
    while not all(request.is_finished for request in members):
        plan = simulation.step(0)
        assert plan.padded_tokens == 3
        assert late.slot == -1
        assert plan.num_tokens <= 3
    assert simulation.step(0).rows[0].request is late
    simulation.drain()


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_tokens_are_those_of_a_naive_generation(num_in_flight):
    simulation = simulate(1, 7, 20, 4, 33, 2)
    simulation.step(num_in_flight)
    simulation.abort(simulation.requests[2])
    simulation.drain(num_in_flight)
    for request in simulation.requests[3:]:
        assert (request.token_ids, request.finish_reason) == naive_generation(request.asked)


def test_every_member_reserves_the_longest_sequence():
    simulation = simulate(5, 5, 5, num_blocks=40)
    plan = simulation.step(0)
    assert len(plan.rows) == 2  # 40 // (64 / 4)
    stats = simulation.scheduler.stats()
    assert stats.kv_positions_allocated == 128
    assert stats.kv_tokens_held == 10
    assert stats.kv_cache_usage == 0.8
    with pytest.raises(ConfigError, match="max_model_len"):
        make_scheduler("static", make_limits(num_blocks=15))


def test_budget_bounds_the_batch():
    simulation = simulate(5, 5, 5, max_num_batched_tokens=2)
    assert simulation.step(0).padded_tokens == 2
    simulation.drain()


def test_nothing_is_cached():
    simulation = simulate(8)
    simulation.step(0)
    assert not simulation.scheduler.reset_prefix_cache()
    simulation.drain()
    assert simulation.scheduler.reset_prefix_cache()
    assert simulation.scheduler.stats().prefix_cache_queries == 0
