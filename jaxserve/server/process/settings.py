"""What the parent and its API workers agree on."""

import msgspec

from jaxserve.config import ServerConfig

ENGINE_DIED = 3
"""The exit code that tells the parent that the engine is dead, in whatever way."""

FLUSH_TIMEOUT = 2
"""Seconds for the last bytes of answers to reach their clients."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The parent's settings for a worker.

    `name` is the engine's name for this process, new with each start; `worker` identifies the worker across restarts;
    `listener` is a file descriptor; `seed` is that of requests without one. Only one worker `tells` (logs) what is the
    same for all. `engines` are the folders of the engines that run or start, by their numbers below `num_engines`. With
    `opens_when_told` it waits for the others, and reports first that it is ready, then that it serves. `log_name` is in
    its log lines, where several workers write some.
    """

    server: ServerConfig
    name: str
    worker: str
    tells: bool
    folder: str
    engines: dict[int, str]
    num_engines: int
    listener: int
    tokenizer: str
    model_path: str
    seed: int
    metrics_file: str
    opens_when_told: bool
    log_name: str | None = None
