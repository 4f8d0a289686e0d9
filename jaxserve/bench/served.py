"""A server of this package as a process of its own, for benchmarks that load it over HTTP."""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

from jaxserve.errors import StartupError

POLL_SECONDS = 0.02


@contextlib.contextmanager
def served(arguments: Sequence[str], *, log: pathlib.Path, python: str = sys.executable) -> Iterator[str]:
    """Run `jaxserve serve` with these arguments, its output in a file. The value is its address, once it is ready.

    Raises StartupError, with what was logged, if it ends before.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as output:
        command = [python, "-m", "jaxserve", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _is_ready(url):
            if server.poll() is not None:
                raise StartupError(f"the server has ended:\n{log.read_text()}")
            time.sleep(POLL_SECONDS)
        yield url
    finally:
        server.terminate()
        server.wait()


def write_tokenizer(folder: pathlib.Path, vocab_size: int) -> None:
    """Write a tokenizer in which each token of a vocabulary is a text of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"Ġ{index}" for index in range(len(alphabet), vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except (urllib.error.URLError, OSError):
        return False
