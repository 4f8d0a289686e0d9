import gc

from jaxserve.garbage import full_collections


def test_full_collections_wait_for_all_who_put_them_off():
    before = gc.get_threshold()
    with full_collections.later():
        with full_collections.later():
            pass
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 10**9
    assert gc.get_threshold() == before
