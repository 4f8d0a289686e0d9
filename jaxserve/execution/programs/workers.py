"""The processes that lower steps, seen from their parent, which starts the first of them before it imports jax."""

import contextlib
import os
import struct
import subprocess
import sys
from typing import IO

import msgspec

from jaxserve.cpus import yield_processors


class Answer(msgspec.Struct, frozen=True):
    """A message from a worker: what `StepBuilder.export` has returned or, if it failed, why."""

    exported: bytes = b""
    error: str | None = None


class WorkerFailed(Exception):
    """A step that a worker has not lowered, and why."""


class Worker:
    """A process of `lowering_worker`, which ends when its standard input does: with this process at the latest.

    Attributes:
        is_gone: whether a job has found that it has ended.
    """

    def __init__(self, *, is_background: bool = False):
        """Start the process, which waits for `prepare`. Raises OSError if that fails."""
        self.is_gone = False
        reader, writer = os.pipe()
        self._answers = open(reader, "rb")  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                [sys.executable or "", "-P", "-m", "jaxserve.execution.programs.lowering_worker", str(writer)],
                stdin=subprocess.PIPE,
                stdout=2,  # standard error: what libraries print is for people
                pass_fds=(writer,),
                start_new_session=True,  # Ctrl-C is for the parent alone
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "JAX_PLATFORMS": "cpu",
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
        except OSError:
            self._answers.close()
            raise
        finally:
            os.close(writer)
        if is_background:
            with contextlib.suppress(ProcessLookupError):
                yield_processors(self._process.pid)

    def prepare(self, settings: msgspec.Struct) -> None:
        """Tell it its `lowering.WorkerSettings`, before the first job."""
        with contextlib.suppress(OSError):  # it has ended already, which the first job will report
            write_message(self._process.stdin, settings)

    def run(self, job: msgspec.Struct) -> bytes:
        """Block until the step of a `lowering.Job` is lowered. Raises WorkerFailed."""
        try:
            write_message(self._process.stdin, job)
            answer = read_message(self._answers, Answer)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.is_gone = True
            raise WorkerFailed(f"its worker has gone ({error})") from error
        if answer is None:
            self.is_gone = True
            raise WorkerFailed("its worker has gone")
        if answer.error is not None:
            raise WorkerFailed(answer.error)
        return answer.exported

    def close(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]  # both are pipes


def write_message(pipe: IO[bytes] | None, message: msgspec.Struct) -> None:
    """Four bytes of length, and the message as msgpack."""
    assert pipe is not None
    encoded = msgspec.msgpack.encode(message)
    pipe.write(struct.pack(">I", len(encoded)) + encoded)
    pipe.flush()


def read_message[T](pipe: IO[bytes] | None, kind: type[T]) -> T | None:
    """Return the next message; None at the end."""
    assert pipe is not None
    length = pipe.read(4)
    if len(length) < 4:
        return None
    encoded = pipe.read(size := struct.unpack(">I", length)[0])
    return msgspec.msgpack.decode(encoded, type=kind) if len(encoded) == size else None
