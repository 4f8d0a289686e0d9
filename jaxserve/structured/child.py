"""A process that checks untrusted grammars, and may crash doing so: `python -m jaxserve.structured.child`.

Jobs are read from the standard input and results written to the standard output, each preceded by its length in four
bytes. The process ends at the end of its input.
"""

import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import arguments_schema, make_grammar
from jaxserve.structured.wire import AnswerJob, Broken, Job, Made, Refused, Result

MEMORY_LIMIT = 1536 * 2**20
"""Limit of the address space in bytes, of which the stack for compiling takes 256 MiB and the interpreter some 100
MiB.
"""

NICENESS = 5
"""Lower priority than the server and the engine, which have callers that wait for each token."""


def main(args: Sequence[str]) -> None:
    """Process jobs, each within `args[0]` seconds, until the input ends."""
    (seconds,) = map(float, args)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, meant for the parent
    jobs, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+b") as nothing:  # a compiler panic shows in the job's result, or as the end of the process
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    decoder = msgspec.msgpack.Decoder(Job)
    make_grammar(StructuredOutputs(json_object=True))  # the first compilation loads what all need
    while head := jobs.read(4):
        job = decoder.decode(jobs.read(int.from_bytes(head)))
        signal.setitimer(signal.ITIMER_REAL, seconds)  # in case the parent is gone by then
        result = msgspec.msgpack.encode(_run(job))
        signal.setitimer(signal.ITIMER_REAL, 0)
        results.write(len(result).to_bytes(4) + result)


def _run(job: Job) -> Result:
    try:
        if isinstance(job, AnswerJob):
            left_out = None if job.is_strict else []
            text = make_grammar(job.constraint, is_closed=job.is_closed, left_out=left_out)
            return Made(text, left_out or [])
        made, all_left_out = [], []
        for param, schema, is_strict in job.schemas:
            left_out = None if is_strict else []
            made.append(arguments_schema(schema, param=param, options=job.options, left_out=left_out))
            all_left_out += left_out or []
        return Made(f"[{','.join(made)}]", all_left_out)
    except InvalidRequest as error:
        return Refused(error.message, error.param or job.param, error.code)
    except MemoryError:
        return Refused(f"{job.param}: it takes too much memory to compile", job.param, "unsupported_grammar")
    except Exception:  # a bug of ours: the requester gets the error, and the process goes on
        return Broken(traceback.format_exc())


if __name__ == "__main__":
    main(sys.argv[1:])
