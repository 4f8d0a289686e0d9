"""`jaxserve chat`: a conversation at a terminal. A pipe brings one message a line, and gets the answers only."""

import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.errors import InvalidRequest
from jaxserve.request import CompletionOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

HELP = """\
/help          print this
/system TEXT   begin anew with this system message; without TEXT: print it
/reset         begin anew, with the same system message
/exit          end; so does the end of the input (Ctrl-D)
Ctrl-C         end an answer, or the line that is being written
"""
_MAX_HISTORY = 1000  # lines in the file


class Chat:
    """A conversation with a model, kept as messages. Commands begin with a slash."""

    def __init__(self, llm: "LLM", params: SamplingParams, *, system: str | None):
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._reset()

    def run(self) -> None:
        """Read messages and answer them until the input ends."""
        if not sys.stdin.isatty():
            for line in sys.stdin:
                if not self._handle(line.removesuffix("\n")):
                    break
            return
        print("Talk with the model. /help lists the commands, /exit ends.")
        with _line_history():
            while True:
                try:
                    line = input("> ")
                except EOFError:
                    print()
                    break
                except KeyboardInterrupt:
                    print()
                    continue
                if not self._handle(line):
                    break

    def _handle(self, line: str) -> bool:
        """Obey a command, or answer a message. Returns whether the conversation goes on."""
        command, _, text = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                print(HELP, end="")
            case "/reset" | "/clear":
                self._reset()
            case "/system" if text:
                self._system = text.strip()
                self._reset()
            case "/system":
                print(self._system or "There is no system message.")
            case _ if command.startswith("/") and command[1:].isalpha():
                print(f"There is no command {command}; /help lists them.", file=sys.stderr)
            case _:
                self._answer(line)
        return True

    def _reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _answer(self, line: str) -> None:
        """Print the model's answer. One that is interrupted stays in the conversation as far as it came."""
        self._messages.append({"role": "user", "content": line})
        reply = CompletionOutput(index=0, text="", token_ids=[])
        is_terminal = sys.stdin.isatty()
        try:
            with _interruptible() if is_terminal else contextlib.nullcontext():
                for delta in self._llm.stream_chat(self._messages, self._params):
                    print(delta.outputs[0].text, end="", flush=True)
                    reply.text += delta.outputs[0].text
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(" [stopped]", end="")
        except InvalidRequest as error:
            self._messages.pop()
            if not is_terminal:
                raise
            print(f"{error}; /reset begins anew", file=sys.stderr)
            return
        print(flush=True)
        self._messages.append({"role": "assistant", "content": reply.text})


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let each Ctrl-C raise KeyboardInterrupt, not only the first one of the command."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Let the arrow keys bring back earlier lines, those of earlier conversations too, where readline exists."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = pathlib.Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "jaxserve/chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)
