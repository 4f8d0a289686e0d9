"""A process that lowers steps for `lowering`, without a device. It ends with its standard input: with its parent.

Its argument is the descriptor of the pipe for its answers: standard output belongs to whatever prints.
"""

import gc
import os
import queue
import sys
import threading

import jax

from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.lowering import Job, WorkerSettings
from jaxserve.execution.programs.workers import Answer, read_message, write_message
from pallas_kernels.jax_internals import ask_ptxas_once, name_kernels_by_content
from pallas_kernels.layout_inference import infer_layouts_faster


def main() -> None:
    """Answer one job after the other."""
    gc.disable()  # For the few programs that it lowers: this saves a sixth of the time, for some 10 MiB per program.
    answers = open(int(sys.argv[1]), "wb")  # noqa: SIM115 - for as long as the process
    settings = read_message(sys.stdin.buffer, WorkerSettings)
    if settings is None:
        return
    for name, value in settings.jax_options.items():
        jax.config.update(name, value)
    name_kernels_by_content()
    ask_ptxas_once()
    infer_layouts_faster()
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), name="parent", daemon=True).start()
    builder = StepBuilder(settings.spec, settings.mesh.mesh())
    while True:
        job = jobs.get()
        try:
            answer = Answer(exported=builder.export(job.program, job.num_blocks))
        except Exception as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        write_message(answers, answer)


def _listen(jobs: "queue.SimpleQueue[Job]") -> None:
    while (job := read_message(sys.stdin.buffer, Job)) is not None:
        jobs.put(job)
    os._exit(0)


if __name__ == "__main__":
    main()
