"""ContinuousScheduler, one behaviour per test: budget, admission, sharing. The simulation checks KV and integrity."""

import pytest
from scheduling_simulation import (
    STOP,
    Simulation,
    make_limits,
    make_request,
    naive_generation,
    never_stops,
    prompt,
    shape,
)

from jaxserve.errors import CapacityExceeded, ConfigError, ContextLengthExceeded, InvalidRequest
from jaxserve.scheduling.scheduler import RowOutcome, make_scheduler


def test_prompt_in_chunks_then_one_token_a_step():
    simulation = Simulation(make_limits(max_num_batched_tokens=5))
    (request,) = simulation.add(never_stops("a", 12, 3))
    plans = [simulation.step(0) for _ in range(5)]
    assert [shape(plan)[0][1:] for plan in plans] == [
        (0, 5, False),
        (5, 5, False),
        (10, 2, True),
        (12, 1, True),
        (13, 1, True),
    ]
    assert [len(plan.admitted) for plan in plans] == [1, 0, 0, 0, 0]
    assert request.finish_reason == "length"
    assert simulation.step(0) is None


def test_decodes_and_chunks_share_one_budget():
    simulation = Simulation(make_limits(max_num_batched_tokens=6))
    simulation.add(never_stops("a", 3, 9))
    simulation.step(0)
    simulation.add(never_stops("b", 12, 2), never_stops("c", 1, 2))
    plan = simulation.step(0)
    assert shape(plan) == [("a", 3, 1, True), ("b", 0, 5, False)]
    assert (plan.num_decode_rows, plan.num_tokens) == (1, 6)
    simulation.step(0)
    plan = simulation.step(0)
    assert shape(plan) == [("a", 5, 1, True), ("c", 0, 1, True), ("b", 10, 2, True)]  # single tokens first
    assert plan.num_decode_rows == 2
    simulation.drain()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_plans_of_several_stages_have_equal_parts_of_the_requests(num_stages):
    """But the chunks of a prompt may follow each other, since they need no token that is drawn."""
    simulation = Simulation(
        make_limits(num_stages=num_stages, max_num_seqs=9, max_num_batched_tokens=18, num_blocks=64)
    )
    simulation.add(*(never_stops(str(i), 2, 12) for i in range(9)))
    plans = [simulation.step(num_stages) for _ in range(12)]
    assert len(simulation.in_flight) == num_stages
    together = [{row.request for row in plan.rows} for plan in plans[-num_stages:]]
    assert len(set().union(*together)) == sum(map(len, together)) == 9, "a request is in two plans, or in none"
    assert max(map(len, together)) == -(-9 // num_stages)
    simulation.drain(num_stages)
    simulation.add(never_stops("long", 50, 2))
    assert [shape(simulation.step(num_stages))[0][1:3] for _ in range(2)] == [(0, 18), (18, 18)]
    simulation.drain(num_stages)


def test_next_step_is_planned_before_the_last_tokens_are_known():
    simulation = Simulation(make_limits())
    (request,) = simulation.add(never_stops("a", 3, 3))
    starts = [simulation.schedule().rows[0].start for _ in range(3)]
    assert starts == [0, 3, 4]
    assert request.num_pending == 3
    assert simulation.schedule() is None  # all its tokens are on their way
    assert [simulation.update()[0] for _ in range(3)] == [RowOutcome.TOKEN, RowOutcome.TOKEN, RowOutcome.LAST_TOKEN]


def test_row_after_a_stop_token_is_dropped():
    simulation = Simulation(make_limits())
    engine_request = make_request("a", prompt(3), 5)
    tokens, _ = naive_generation(engine_request)
    (request,) = simulation.scheduler.add([engine_request])
    plans = [simulation.scheduler.schedule() for _ in range(2)]
    assert simulation.scheduler.update(plans[0], [[STOP]]) == [RowOutcome.LAST_TOKEN]
    assert request.finish_reason == "stop"
    assert request.token_ids == [*tokens[:3], STOP]
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.update(plans[1], [[5]]) == [RowOutcome.DROPPED]
    assert len(request.token_ids) == 4
    assert request.num_pending == 0


def test_admission_takes_arrival_order_and_slots():
    simulation = Simulation(make_limits(max_num_seqs=2))
    simulation.add(*(never_stops(name, 3, 2) for name in "abc"))
    assert [row[0] for row in shape(simulation.step(0))] == ["a", "b"]
    assert [row[0] for row in shape(simulation.step(0))] == ["a", "b"]
    assert [row[0] for row in shape(simulation.step(0))] == ["c"]


def test_nobody_overtakes_a_request_that_waits_for_blocks():
    simulation = Simulation(make_limits(num_blocks=6))
    simulation.add(never_stops("a", 12, 4))
    simulation.step(0)
    simulation.add(never_stops("b", 16, 4), never_stops("c", 1, 4))
    assert [row[0] for row in shape(simulation.step(0))] == ["a"]
    simulation.drain()


def test_rest_of_a_prompt_gets_its_blocks_before_anyone_is_admitted():
    simulation = Simulation(make_limits(num_blocks=8, max_num_batched_tokens=20))
    simulation.add(never_stops("a", 24, 2))
    simulation.step(0)  # holds 5 blocks, needs 6
    simulation.add(never_stops("b", 9, 2))  # 3 blocks: as many as are free, but one is reserved
    assert [row[0] for row in shape(simulation.step(0))] == ["a"]
    simulation.drain()
    assert simulation.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_request_of_exactly_the_whole_pool(num_in_flight):
    limits = make_limits(num_blocks=4, block_size=4)
    simulation = Simulation(limits)
    (request,) = simulation.add(never_stops("a", 13, 4))  # the 17th token is sampled, its KV never needed
    simulation.drain(num_in_flight)
    assert request.finish_reason == "length"
    with pytest.raises(CapacityExceeded):
        simulation.add(never_stops("b", 13, 5))


def test_what_can_never_run_is_refused_with_its_reason():
    simulation = Simulation(make_limits(num_blocks=8, max_model_len=40))
    check = simulation.scheduler.check_admissible
    with pytest.raises(ContextLengthExceeded) as error:
        check(make_request("a", prompt(36), 5))
    assert (error.value.param, error.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(ContextLengthExceeded) as error:
        check(make_request("a", prompt(41), 5))
    assert error.value.param == "prompt"
    with pytest.raises(CapacityExceeded):
        check(make_request("a", prompt(32), 2))
    check(make_request("a", prompt(32), 1))
    with pytest.raises(InvalidRequest, match="empty"):
        check(make_request("a", [], 5))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        check(make_request("a", [1], 0))


def test_add_takes_all_or_none():
    simulation = Simulation(make_limits())
    bad_batches = [
        [make_request("a", [1]), make_request("b", prompt(63), 9)],
        [make_request("a", [1]), make_request("a", [2])],
    ]
    for batch in bad_batches:
        with pytest.raises(InvalidRequest):
            simulation.add(*batch)
    assert not simulation.scheduler.has_work
    simulation.add(make_request("a", [1]), make_request("b", [1]))
    with pytest.raises(InvalidRequest, match="running already"):
        simulation.add(make_request("a", [1]))
    assert simulation.scheduler.num_waiting == 2
    simulation.drain()
    simulation.add(make_request("a", [1]))  # its id is free again
    simulation.drain()


def test_prompt_prefix_is_shared_even_within_a_step():
    simulation = Simulation(make_limits(max_num_batched_tokens=64))
    first, second = simulation.add(never_stops("a1", 12, 2), never_stops("a2", 12, 2))
    simulation.step(0)
    assert first.block_tables[0][:2] == second.block_tables[0][:2]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    stats = simulation.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (24, 8)
    assert (stats.kv_positions_allocated, stats.kv_tokens_held) == (16, 16)
    simulation.drain()


def test_hit_never_covers_the_whole_prompt():
    simulation = Simulation(make_limits())
    simulation.add(make_request("a", prompt(8), 1))
    simulation.drain()
    (again,) = simulation.add(make_request("b", prompt(8), 1))
    assert shape(simulation.step(0)) == [("b", 4, 4, True)]
    assert again.num_cached_tokens == 4


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_next_turn_starts_from_the_answer_before(num_in_flight):
    simulation = Simulation(make_limits())
    (turn,) = simulation.add(never_stops("a", 6, 11))  # 17 tokens, KV of 16
    simulation.drain(num_in_flight)
    (next_turn,) = simulation.add(make_request("b", [*turn.token_ids, 1, 2], 1))
    simulation.drain(num_in_flight)
    assert next_turn.num_cached_tokens == 16


def test_salt_and_prompt_logprobs_and_switch_stop_sharing():
    simulation = Simulation(make_limits())
    simulation.add(make_request("a", prompt(12), 1, prompt_logprobs=0))
    simulation.drain()
    other_salt, all_logits, sharing = simulation.add(
        make_request("b", prompt(12), 1, salt="mine"),
        make_request("c", prompt(12), 1, prompt_logprobs=0),
        make_request("d", prompt(12), 1),
    )
    simulation.drain()
    assert (other_salt.num_cached_tokens, all_logits.num_cached_tokens, sharing.num_cached_tokens) == (0, 0, 8)

    simulation = Simulation(make_limits(), enable_prefix_caching=False)
    for name in "ab":
        (request,) = simulation.add(make_request(name, prompt(12), 1))
        simulation.drain()
    assert request.num_cached_tokens == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_siblings_start_from_the_prompt_of_the_first(enable_prefix_caching):
    simulation = Simulation(
        make_limits(max_num_batched_tokens=8, max_num_seqs=4), enable_prefix_caching=enable_prefix_caching
    )
    siblings = simulation.add(*(never_stops(f"a{i}", 13, 4, group="a0") for i in range(3)))
    simulation.add(never_stops("b", 2, 4))
    assert shape(simulation.step(0)) == [("a0", 0, 8, False)]
    rows = shape(simulation.step(0))
    assert ("a0", 8, 5, True) in rows
    assert ("a1", 12, 1, True) in rows
    assert ("a2", 12, 1, True) in rows
    assert siblings[0].block_tables[0][:3] == siblings[1].block_tables[0][:3] == siblings[2].block_tables[0][:3]
    simulation.drain()


def test_sibling_goes_on_from_what_a_dead_leader_left():
    simulation = Simulation(make_limits(max_num_batched_tokens=8))
    leader, sibling = simulation.add(never_stops("a0", 21, 4, group="a0"), never_stops("a1", 21, 4, group="a0"))
    assert shape(simulation.step(0)) == [("a0", 0, 8, False)]
    simulation.abort(leader)
    assert shape(simulation.step(0)) == [("a1", 8, 8, False)]
    simulation.drain()
    assert sibling.finish_reason == "length"


def test_short_prompts_of_a_group_need_not_wait():
    simulation = Simulation(make_limits())
    simulation.add(*(never_stops(f"a{i}", 4, 4, group="a0") for i in range(3)))
    assert len(simulation.step(0).rows) == 3


def test_reset_prefix_cache_only_when_nobody_runs():
    simulation = Simulation(make_limits())
    simulation.add(make_request("a", prompt(12), 1))
    simulation.schedule()
    assert not simulation.scheduler.reset_prefix_cache()
    simulation.update()
    assert simulation.scheduler.reset_prefix_cache()
    (again,) = simulation.add(make_request("b", prompt(12), 1))
    simulation.drain()
    assert again.num_cached_tokens == 0


def test_long_prompt_that_waits_is_admitted_as_soon_as_it_fits():
    simulation = Simulation(make_limits(num_blocks=12))
    (first,) = simulation.add(never_stops("a", 9, 8))
    simulation.step(0)
    simulation.add(never_stops("b", 40, 2))
    while first.finish_reason is None:
        assert len(simulation.step(0).rows) == 1
    assert simulation.step(0).admitted[0].request.request_id == "b"
    simulation.drain()


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"])
def test_limits_are_checked(name):
    with pytest.raises(ConfigError, match=name):
        make_limits(**{name: 0})


def test_integrity_check_sees_a_wrong_count():
    simulation = Simulation(make_limits())
    (request,) = simulation.add(make_request("a", prompt(12)))
    simulation.schedule()
    for field in ("num_pending", "num_computed_tokens", "slot"):
        value = getattr(request, field)
        setattr(request, field, value + 1)
        with pytest.raises(AssertionError):
            simulation.scheduler.check_integrity()
        setattr(request, field, value)
    simulation.scheduler.check_integrity()


def test_results_must_come_in_order():
    scheduler = make_scheduler("continuous", make_limits())
    scheduler.add([make_request("a", prompt(3))])
    scheduler.schedule()
    later = scheduler.schedule()
    with pytest.raises(AssertionError, match="order"):
        scheduler.update(later, [[1]])
