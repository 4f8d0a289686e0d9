"""The store of responses keeps within its bounds, in one process and in several."""

import concurrent.futures
import multiprocessing
import threading

import pytest
from waiting import PATIENCE

from jaxserve.server.responses.store import ResponseStore, StoredResponse


def stored(text, size=0):
    return StoredResponse(text.encode() + b" " * size, b"[]", 1)


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def make(clock):
    stores = []

    def make(**options):
        stores.append(ResponseStore(**({"max_entries": 3, "ttl": 60.0, "clock": clock} | options)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_the_oldest_go_first(make):
    store = make()
    for name in "abcd":
        store.put(name, stored(name), owner="me")
    assert [store.get(name, owner="me") for name in "abcd"] == [None, stored("b"), stored("c"), stored("d")]


def test_an_answer_that_is_replaced_keeps_its_position(make):
    store = make()
    for name in "abc":
        store.put(name, stored(name), owner="me")
    store.replace("a", stored("A"))
    assert store.get("a", owner="me") == stored("A")
    store.put("d", stored("d"), owner="me")
    assert store.get("a", owner="me") is None
    store.replace("a", stored("A"))  # too late
    assert store.get("a", owner="me") is None


def test_an_answer_that_is_still_written_stays(make, clock):
    store = make()
    store.begin("a", stored("a"), owner="me", max_incomplete=10)
    for name in "bcd":
        store.put(name, stored(name), owner="me")
    clock.now += 61
    store.replace("a", stored("aa"), is_complete=False)
    assert [store.get(name, owner="me") for name in "abcd"] == [stored("aa"), None, None, None]
    store.put("e", stored("e"), owner="me")
    store.replace("a", stored("A"))
    for name in "fg":  # it is the newest now
        store.put(name, stored(name), owner="me")
    assert [store.get(name, owner="me") is not None for name in "aefg"] == [True, False, True, True]
    clock.now += 60
    assert store.get("a", owner="me") is None


def test_answers_that_are_still_written_are_bounded_too(make):
    store = make()
    for name in "abcd":
        store.begin(name, stored(name), owner="me", max_incomplete=10)
    assert [store.get(name, owner="me") is not None for name in "abcd"] == [False, True, True, True]


def test_answers_that_are_still_written_are_limited_for_all_workers(make, tmp_path):
    file = tmp_path / "responses.sqlite"
    first, second = (make(file=file, max_entries=10, worker=worker) for worker in ("api-0", "api-1"))
    first.put("complete", stored("complete"), owner="me")
    for store, name in ((first, "a"), (second, "b"), (first, "c")):
        assert store.begin(name, stored(name), owner="me", max_incomplete=3)
    for store in (first, second):
        assert not store.begin("d", stored("d"), owner="me", max_incomplete=3)
        assert store.get("d", owner="me") is None
    first.replace("c", stored("C"))
    assert second.begin("d", stored("d"), owner="me", max_incomplete=3)
    assert not first.begin("e", stored("e"), owner="me", max_incomplete=3)
    second.delete("b", owner="me")
    assert first.begin("e", stored("e"), owner="me", max_incomplete=3)


def test_time(make, clock):
    store = make()
    store.put("a", stored("a"), owner="me")
    clock.now += 59
    assert store.get("a", owner="me") == stored("a")
    clock.now += 1
    assert store.get("a", owner="me") is None


def test_bytes(make):
    store = make(max_bytes=1000)
    store.put("a", stored("a", 400), owner="me")
    store.put("b", stored("b", 400), owner="me")
    store.put("c", stored("c", 400), owner="me")
    assert [store.get(name, owner="me") is not None for name in "abc"] == [False, True, True]
    store.put("d", stored("d", 2000), owner="me")  # one that never fits
    assert store.get("d", owner="me") is None


def test_delete_and_cancel(make):
    store = make()
    store.put("a", stored("a"), owner="me")
    assert not store.is_cancelled("a")
    store.cancel("a")
    assert store.is_cancelled("a")
    assert store.delete("a", owner="me")
    assert not store.delete("a", owner="me")
    assert store.is_cancelled("a")
    store.cancel("a")


def test_an_answer_is_its_owners(make):
    store = make()
    store.put("a", stored("a"), owner="me")
    for owner in ("you", "", "ME", "%"):
        assert store.get("a", owner=owner) is None
        assert not store.delete("a", owner=owner)
    assert store.get("a", owner="me") == stored("a")


def test_names_are_data(make):
    store = make()
    store.put("'; drop table responses; --", stored("a"), owner="me")
    assert store.get("'; drop table responses; --", owner="me") == stored("a")
    assert store.get("%", owner="me") is None


def test_from_many_threads(make):
    store = make(max_entries=1000)

    def work(number):
        for i in range(20):
            store.put(f"{number}-{i}", stored(f"{number}-{i}"), owner="me")
            assert store.get(f"{number}-{i}", owner="me") == stored(f"{number}-{i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("7-19", owner="me") is not None


def _put_elsewhere(file):
    store = ResponseStore(max_entries=10, ttl=60, file=file, clock=lambda: 1000.0)
    store.put("there", stored("there"), owner="me")
    store.cancel("here")
    store.close()


def test_workers_share_a_file(make, tmp_path):
    file = tmp_path / "responses.sqlite"
    store = make(file=file, max_entries=10)
    store.put("here", stored("here"), owner="me")
    process = multiprocessing.get_context("spawn").Process(target=_put_elsewhere, args=(file,))
    process.start()
    process.join(timeout=PATIENCE)
    assert process.exitcode == 0
    assert store.get("there", owner="me") == stored("there")
    assert store.is_cancelled("here")


def test_workers_begin_with_a_new_file_together(make, tmp_path):
    workers = 4
    together = threading.Barrier(workers)

    def open_new(file):
        together.wait(PATIENCE)
        make(file=file).put("a", stored("a"), owner="me")

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for i in range(20):
            list(pool.map(open_new, [tmp_path / str(i)] * workers))


def test_what_a_worker_leaves_unfinished_is_its_successors(make, tmp_path):
    file = tmp_path / "responses.sqlite"
    first, other = (make(file=file, max_entries=10, worker=worker) for worker in ("api-0", "api-1"))
    for name in "abc":
        first.begin(name, stored(name), owner="me", max_incomplete=10)
    other.begin("d", stored("d"), owner="me", max_incomplete=10)
    first.replace("b", stored("B"), is_complete=False)
    first.replace("c", stored("C"))
    second = make(file=file, max_entries=10, worker="api-0")
    assert second.incomplete() == {"a": stored("a"), "b": stored("B")}
    second.replace("a", stored("failed"))
    assert second.incomplete() == {"b": stored("B")}
    assert other.incomplete() == {"d": stored("d")}
