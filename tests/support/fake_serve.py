"""`jaxserve serve` over a scripted engine: a parent, an engine's process and API workers, all real and started quickly.

`python -m fake_serve FOLDER [flags of serve]`, where FOLDER has a tokenizer. Without arguments it is the engine's
process: it repeats the prompt's first character, without end if more than ENDLESS tokens are requested, and knows two
letters that make it misbehave.
"""

import asyncio
import atexit
import pathlib
import signal
import sys
import threading
import time
from typing import override

import msgspec
import tokenizers
from fake_client import FakeEngineClient, Script

from jaxserve import logs
from jaxserve.arguments import Parser
from jaxserve.config import ServerConfig
from jaxserve.engine.process import serve
from jaxserve.engine.subprocesses import Child, Parent, run_child
from jaxserve.errors import OutOfMemory, StartupError
from jaxserve.flags import add_config_flags, given
from jaxserve.server.process.supervisor import Supervisor

STEP_SECONDS = 0.02
ENDLESS = 1000
IN_STEP, STEP_OVER, START = "in-step", "step-over", "start"
"""Files in the private folder: the engine makes the first in its long step, which lasts until the second is there; the
third ends a start that hangs.
"""


class Settings(msgspec.Struct, kw_only=True):
    """`start_error`: the error with which the start fails; "crash": an exception that is not ours; "hang": it waits for
    START.
    """

    folder: str
    vocab_size: int
    dies: int
    takes_long: int
    start_error: str | None
    never_ends: bool = False


class Engine(FakeEngineClient):
    """A fake engine, of which prompts that begin with `dies` and `takes_long` make a dead and a slow one."""

    def __init__(self, settings: Settings):
        self._settings = settings
        super().__init__(self._script, vocab_size=settings.vocab_size, max_model_len=2048, step_seconds=STEP_SECONDS)

    def _script(self, request):
        if request.prompt_token_ids[0] == self._settings.dies:
            threading.Timer(0.1, self.die, ["a bug in the engine"]).start()
        is_endless = request.max_tokens > ENDLESS
        return Script(token_ids=request.prompt_token_ids[:1] * (50 if is_endless else 2048), hangs=is_endless)

    @override
    def _advance(self, entry):
        if entry.request.prompt_token_ids[0] == self._settings.takes_long:
            folder = pathlib.Path(self._settings.folder)
            (folder / IN_STEP).touch()
            while not (folder / STEP_OVER).exists():
                sum(range(100_000))  # other threads have to request their turn
        return super()._advance(entry)


def _engine(parent: Parent) -> int:
    settings = parent.settings(Settings)
    parent.folder = settings.folder
    if settings.start_error == "crash":
        raise RuntimeError("a bug")
    if settings.start_error == "hang":
        while not (pathlib.Path(settings.folder) / START).exists():
            time.sleep(0.01)
    elif settings.start_error is not None:
        raise OutOfMemory(settings.start_error)
    if settings.never_ends:
        atexit.register(threading.Event().wait)
    return serve(parent, Engine(settings), pathlib.Path(settings.folder), end_seconds=1.0)


def _parent() -> int:
    assert "jax" not in sys.modules
    logs.configure("info", in_background=True)
    parser = Parser(prog="fake_serve", usage="", description="")
    parser.add_argument("model")
    parser.add_argument("--start-error")
    parser.add_argument("--second-start-fails", action="store_true", help="an engine of several crashes then")
    parser.add_argument("--silence-limit", type=float, default=30.0)
    parser.add_argument("--never-ends", action="store_true", help="the engine's process hangs when it is to exit")
    parser.add_argument("--late-signal", action="store_true", help="SIGTERM comes when all has been done")
    add_config_flags(parser, ServerConfig)
    args = parser.parse_args()
    tokenizer = tokenizers.Tokenizer.from_file(f"{args.model}/tokenizer.json")  # quicker than our own

    async def start_engine(index: int, folder: pathlib.Path) -> Child:
        dies, takes_long = (tokenizer.token_to_id(letter) for letter in "DL")
        settings = Settings(
            folder=str(folder),
            vocab_size=tokenizer.get_vocab_size(),
            dies=dies,
            takes_long=takes_long,
            start_error="crash" if args.second_start_fails and folder.name.endswith("-1") else args.start_error,
            never_ends=args.never_ends,
        )
        name = "the engine" if config.data_parallel_size == 1 else f"engine {index}"
        return await Child.start(name, "fake_serve", settings)

    names = ServerConfig.__dataclass_fields__
    config = ServerConfig(**given(args, [*names]))
    supervisor = Supervisor(
        config,
        start_engine=start_engine,
        model_path=args.model,
        tokenizer=args.model,
        seed=0,
        silence_limit=args.silence_limit,
    )
    try:
        if args.late_signal:
            atexit.register(signal.raise_signal, signal.SIGTERM)
        return asyncio.run(supervisor.run_last())
    except StartupError as error:
        logs.flush()
        sys.stderr.write(f"jaxserve: error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(_parent() if len(sys.argv) > 1 else run_child(_engine))
