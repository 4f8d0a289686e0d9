"""Downloads that go on in another process, from a hub on this machine: nothing is sent twice, nothing gets mixed up."""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from depths import quick_first
from fake_hub import Repo, running_hub
from hf_xet import XetSession  # pyright: ignore[reportAttributeAccessIssue] (it has no stubs)
from huggingface_hub.utils import WeakFileLock
from waiting import PATIENCE, wait_until

from jaxserve.errors import CheckpointError
from jaxserve.loading import partial_files
from jaxserve.loading.builtin import resolve_model

OLD, NEW = "a" * 40, "b" * 40
REPO, FILE = "org/whole", "model.safetensors"
CHUNK = 2**14
OLD_WEIGHTS, WEIGHTS = (bytes([value]) * 3 + b"weights" * 30_000 for value in (1, 2))
ETAG = hashlib.sha256(WEIGHTS).hexdigest()
KILLED = f"""
import os, signal, time
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}
time.sleep = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # what follows a broken connection
from jaxserve.loading.builtin import resolve_model
resolve_model("{REPO}", progress=False)
"""
"""A process that is killed in the middle of a download."""


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def server(monkeypatch, cache, tmp_path):
    monkeypatch.chdir(tmp_path)
    with running_hub(monkeypatch, cache) as server:
        commits = {OLD: {"config.json": b"{}", FILE: OLD_WEIGHTS}, NEW: {"config.json": b"{}", FILE: WEIGHTS}}
        server.repos[REPO] = Repo(commits, {"main": NEW})
        yield server


def content():
    return (pathlib.Path(resolve_model(REPO, progress=False)) / FILE).read_bytes()


def parts(cache):
    return sorted(cache.rglob("*.partial"))


def ranges(server):
    return [span for name, span in server.downloads() if name == FILE]


def start_and_kill(server, cache, **environment):
    """Begin a download and kill it when three and a half chunks have arrived."""
    server.cuts[FILE] = [3 * CHUNK + CHUNK // 2]
    environment |= os.environ | {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    process = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    server.requests.clear()


def test_the_next_process_goes_on_where_a_killed_one_was(server, cache):
    start_and_kill(server, cache)
    [part] = parts(cache)
    assert part.read_bytes() == WEIGHTS[: 3 * CHUNK]
    assert partial_files.partial_bytes(REPO, FILE) == 3 * CHUNK
    assert content() == WEIGHTS
    assert ranges(server) == [f"bytes={3 * CHUNK}-"]
    assert not parts(cache)


@pytest.mark.slow
def test_a_part_that_another_process_completes_meanwhile_counts_nothing(server, cache):
    start_and_kill(server, cache)
    [part] = parts(cache)
    part.with_name(part.name.replace(ETAG, "gone")).symlink_to("nothing")  # listed, and not there any more
    assert partial_files.partial_bytes(REPO, FILE) == 3 * CHUNK
    assert content() == WEIGHTS


@pytest.mark.slow
def test_a_file_that_has_changed_starts_over(server, cache):
    server.repos[REPO].refs["main"] = OLD
    start_and_kill(server, cache)
    server.repos[REPO].refs["main"] = NEW
    assert content() == WEIGHTS
    assert ranges(server) == [""]
    assert not parts(cache)


@pytest.mark.parametrize("damage", quick_first([bytes(CHUNK), bytes(2 * len(WEIGHTS)), bytes(len(WEIGHTS))]))
def test_a_damaged_part_starts_over(server, cache, damage):
    start_and_kill(server, cache)
    parts(cache)[0].write_bytes(damage)
    assert content() == WEIGHTS
    assert ranges(server)[0] == ""


@pytest.mark.slow
def test_a_server_without_ranges_starts_over(server, cache):
    start_and_kill(server, cache)
    server.has_ranges = False
    assert content() == WEIGHTS


def test_one_waits_for_what_another_downloads(server, cache):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lock = cache / ".locks" / "models--org--whole" / f"{ETAG}.lock"
        lock.parent.mkdir(parents=True)
        with WeakFileLock(lock):
            waiting = pool.submit(content)
            wait_until(lambda: ("HEAD", f"/{REPO}/resolve/{NEW}/{FILE}", None) in server.requests)
            blob = cache / "models--org--whole" / "blobs" / ETAG
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(WEIGHTS)
        assert waiting.result() == WEIGHTS
    assert ranges(server) == []


def test_many_at_once_download_a_file_once(server):
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(found.result() == WEIGHTS for found in [pool.submit(content) for _ in range(6)])
    assert ranges(server) == [""]


def test_one_failure_ends_the_others_and_leaves_their_parts(server, cache, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between trials
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
    server.cuts[FILE] = [2 * CHUNK] + [0] * 20
    with pytest.raises(CheckpointError, match=r"cannot download org/whole.* from http"):
        content()
    assert [part.stat().st_size for part in parts(cache)] == [2 * CHUNK]


def test_a_failure_does_not_wait_for_what_another_downloads(server, cache, monkeypatch):
    monkeypatch.setattr(partial_files, "LOCK_TRIAL", 0.1)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between trials
    index = {"weight_map": {"x": FILE, "y": "other.safetensors"}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    server.repos[REPO].commits[NEW] = files | {FILE: WEIGHTS, "other.safetensors": WEIGHTS[1:]}
    server.cuts["other.safetensors"] = [0] * 20
    lock = cache / ".locks" / "models--org--whole" / f"{ETAG}.lock"
    lock.parent.mkdir(parents=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with WeakFileLock(lock):
            failure = pool.submit(content).exception(PATIENCE)
        assert isinstance(failure, CheckpointError)


def test_xet_goes_on_too(server, cache, tmp_path, monkeypatch):
    (tmp_path / "weights").write_bytes(WEIGHTS)
    (tmp_path / "xet").mkdir()
    server.xet_store = f"local://{tmp_path}/xet"
    with XetSession().new_upload_commit(endpoint=server.xet_store) as commit:
        upload = commit.start_upload_file(str(tmp_path / "weights"))
    server.xet[FILE] = upload.result().xet_info.hash
    start_and_kill(server, cache, HF_HUB_DISABLE_XET="1")
    [part] = parts(cache)
    mark = b"the part"
    part.write_bytes(mark + part.read_bytes()[len(mark) :])
    monkeypatch.setattr(partial_files, "_has_digest", lambda *_: True)
    assert content() == mark + WEIGHTS[len(mark) :]
    assert ranges(server) == []


def test_a_failure_ends_what_xet_would_try_for_minutes(server, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between trials
    index = {"weight_map": {"x": FILE, "y": "other.safetensors"}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    server.repos[REPO].commits[NEW] = files | {FILE: WEIGHTS, "other.safetensors": WEIGHTS[1:]}
    server.xet[FILE], server.xet_store = "d1" * 32, "http://127.0.0.1:9"
    server.cuts["other.safetensors"] = [0] * 20
    with pytest.raises(CheckpointError, match=r"cannot download org/whole"):
        resolve_model(REPO, progress=False)
