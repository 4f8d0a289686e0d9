"""Resumable downloads of large files of the hub: a process that is killed leaves what it has to the next one. No jax.

`huggingface_hub` discards a partial file. Here it is kept among the cache's blobs, named after the ETag of the whole
file, and continued from its end, by HTTP or by Xet; once complete it is renamed to the blob that the library then
finds.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterable
from typing import Any

MAX_THREADS = 8
"""Maximum number of files fetched at the same time, as in `huggingface_hub`."""

LOCK_TRIAL = 1.0
"""Seconds between checks if a wait for another process's lock is still needed."""


def partial_bytes(repo: str, file: str) -> int:
    """Return how many bytes of an incomplete file are in the cache."""
    total = 0
    for path in _folder(repo).glob(f"{_prefix(file)}*.partial"):
        with contextlib.suppress(FileNotFoundError):  # another process has just completed it
            total += path.stat().st_size
    return total


def fetch(repo: str, files: Iterable[str], *, commit: str, progress: bool) -> None:
    """Put the contents of `files` among the blobs of the cache, where `snapshot_download` finds them.

    Raises what `huggingface_hub` and `hf_xet` raise; what has arrived by then is kept for the next call. Files for
    which the server gives no size or ETag are left to the library.
    """
    from tqdm import tqdm

    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "disable": not progress}
    with (
        tqdm(total=0, desc="downloading weights", **options) as bar,
        concurrent.futures.ThreadPoolExecutor(MAX_THREADS) as pool,
    ):
        transfer = _Transfer(bar)
        try:
            tasks = [pool.submit(_fetch_file, repo, file, commit, transfer) for file in files]
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        except BaseException:
            transfer.stop()  # the pool waits for its threads
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Transfer:
    """State common to the threads of one call: the progress bar, and a signal to stop."""

    def __init__(self, bar: Any):
        self.bar = bar
        self._stopped = threading.Event()
        self._xet: Any = None
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Stop every thread at once; Xet would retry for minutes."""
        with self._lock:
            self._stopped.set()
            if self._xet is not None:
                self._xet.sigint_abort()

    def check(self) -> None:
        """Raise InterruptedError after `stop`."""
        if self._stopped.is_set():
            raise InterruptedError("the download has been ended")

    def xet(self) -> Any:
        """Return the Xet session of this call."""
        from hf_xet import XetSession  # pyright: ignore[reportAttributeAccessIssue] (it has no stubs)

        with self._lock:
            self.check()
            self._xet = self._xet or XetSession()
            return self._xet


def _fetch_file(repo: str, file: str, commit: str, transfer: _Transfer) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repo, file, revision=commit, endpoint=constants.ENDPOINT)
    found = get_hf_file_metadata(url, headers=build_hf_headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    if found.etag is None or found.size is None:
        return
    blob = _folder(repo) / found.etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{_prefix(file)}{found.etag}.partial")
    lock = _lock(repo, found.etag)
    lock.parent.mkdir(parents=True, exist_ok=True)
    _drop_others(repo, file, part)
    with contextlib.ExitStack() as stack:
        _acquire(lock, transfer, stack)
        if blob.exists():
            return
        if part.exists() and part.stat().st_size > found.size:
            part.unlink()
        is_resumed = part.exists() and part.stat().st_size > 0
        _complete(part, url, found, transfer)
        # after a crash of the machine the file may contain anything
        if is_resumed and not _has_digest(part, found.etag):
            transfer.bar.total -= found.size
            transfer.bar.update(-found.size)
            part.unlink()
            _complete(part, url, found, transfer)
        part.replace(blob)


def _acquire(lock: pathlib.Path, transfer: _Transfer, stack: contextlib.ExitStack) -> None:
    """Wait for one of the library's locks, unless the transfer stops first: another process may hold it for hours."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    while True:
        transfer.check()
        with contextlib.suppress(Timeout):
            stack.enter_context(WeakFileLock(lock, timeout=LOCK_TRIAL))
            return


def _complete(part: pathlib.Path, url: str, found: Any, transfer: _Transfer) -> None:
    """Append the missing rest to a file. If locks do not work, two processes doing so write the same bytes."""
    from huggingface_hub import constants

    by_xet = found.xet_file_data is not None and not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet")

    part.touch(mode=0o666)
    with _PartialFile(io.FileIO(part, "r+")) as file:
        start = file.seek(0, os.SEEK_END)
        file.report_to(transfer)
        transfer.bar.total += found.size
        transfer.bar.update(start)
        if by_xet:
            _append_by_xet(file, start, found, transfer)
        else:
            _append_by_http(file, start, url, found)


def _append_by_http(file: io.BufferedRandom, start: int, url: str, found: Any) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers()
    if urllib.parse.urlsplit(found.location).netloc != urllib.parse.urlsplit(url).netloc:
        headers.pop("authorization", None)  # the address is signed, and its host must not see the token
    http_get(found.location, file, resume_size=start, headers=headers, expected_size=found.size, tqdm_class=no_bar())


def _append_by_xet(file: io.BufferedRandom, start: int, found: Any, transfer: _Transfer) -> None:
    from hf_xet import XetFileInfo  # pyright: ignore[reportAttributeAccessIssue] (it has no stubs)
    from huggingface_hub.utils import build_hf_headers

    if start == found.size:
        return
    source = XetFileInfo(found.xet_file_data.file_hash, found.size)
    try:
        group = transfer.xet().new_download_stream_group(
            token_refresh_url=found.xet_file_data.refresh_route, token_refresh_headers=build_hf_headers()
        )
        with group:
            for piece in group.download_stream(source, start=start):
                file.write(piece)
    except RuntimeError as error:
        raise OSError(f"Xet: {error}") from error
    if file.tell() != found.size:
        raise OSError(f"{found.size} bytes were announced, and {file.tell()} arrived")


class _PartialFile(io.BufferedRandom):
    """A file that reports writes to a progress bar, flushes them at once, and refuses them after `stop`."""

    def report_to(self, transfer: _Transfer) -> None:
        self._transfer = transfer

    def write(self, data: Any) -> int:
        self._transfer.check()
        self._transfer.bar.update(len(data))
        count = super().write(data)
        self.flush()
        return count


def _drop_others(repo: str, file: str, part: pathlib.Path) -> None:
    """Remove partial files of other versions of the file, unless a process is using them."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    for other in part.parent.glob(f"{_prefix(file)}*.partial"):
        if other == part:
            continue
        etag = other.name.removeprefix(_prefix(file)).removesuffix(".partial")
        try:
            with WeakFileLock(_lock(repo, etag), timeout=0.1):
                other.unlink(missing_ok=True)
        except Timeout:
            pass


def _has_digest(part: pathlib.Path, etag: str) -> bool:
    """Return true if a file matches its ETag: the SHA-256 for large files; others cannot be checked."""
    if not re.fullmatch("[0-9a-f]{64}", etag):
        return True
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == etag


@functools.cache
def no_bar() -> Any:
    """Return the class of a progress bar that shows nothing."""
    from tqdm.asyncio import tqdm  # half the cost of `import jaxserve.cli`

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return NoBar


def _prefix(file: str) -> str:
    return f"{hashlib.sha256(file.encode()).hexdigest()[:16]}."


def _folder(repo: str) -> pathlib.Path:
    from huggingface_hub import constants

    return pathlib.Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"


def _lock(repo: str, etag: str) -> pathlib.Path:
    from huggingface_hub import constants

    return pathlib.Path(constants.HF_HUB_CACHE) / ".locks" / f"models--{repo.replace('/', '--')}" / f"{etag}.lock"
