import gc

from jaxserve import garbage
from jaxserve.garbage import full_collections


def test_full_collections_wait_for_all_who_put_them_off():
    before = gc.get_threshold()
    with full_collections.later():
        with full_collections.later():
            pass
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 10**9
    assert gc.get_threshold() == before


def test_threads_that_take_turns_do_not_put_them_off_for_ever(monkeypatch):
    monkeypatch.setattr(garbage, "LONGEST", 0.0)
    seen: list[int] = []
    with full_collections.later():
        gc.callbacks.append(lambda phase, info: seen.append(info["generation"]) if phase == "stop" else None)
        try:
            with full_collections.later():
                pass
        finally:
            gc.callbacks.pop()
    assert 2 in seen
