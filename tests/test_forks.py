"""os.fork() in a program with an open LLM: the child may end, and close its copy, but not use it."""

import subprocess
import sys

import pytest
import tiny_model
from waiting import PATIENCE

SCRIPT = """
import gc, os, sys, warnings
from jaxserve import LLM, SamplingParams
from tqdm import tqdm

warnings.simplefilter("ignore")  # Python's and jax's, of forks
llm = LLM(sys.argv[1], load_format="dummy", warmup="none", progress=False)
params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
stream = llm.stream("abc", SamplingParams(max_tokens=900, ignore_eos=True))
other = llm.stream("abc", params)  # which has not begun
next(stream)  # the engine's thread is busy, and holds its lock now and then
bar = tqdm.get_lock()
bar.acquire()  # as threads do that show how far they are

def forget():
    global llm, stream
    del llm, stream
    gc.collect()

ACTS = {
    "end": lambda: None,
    "close": lambda: llm.close(),
    "forget": forget,
    "generate": lambda: llm.generate("abc", params),
    "chat": lambda: llm.chat([{"role": "user", "content": "abc"}], params, chat_template="{{ messages[0].content }}"),
    "embed": lambda: llm.embed("abc"),
    "stats": lambda: llm.stats(),
    "next": lambda: next(stream),
    "next of another": lambda: next(other),
    "start": lambda: LLM(sys.argv[1], load_format="dummy", warmup="none", progress=False),
}
for number, (name, act) in enumerate(ACTS.items(), 1):
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        sys.exit(number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != number:
        print(f"{name}: exit code {code}", flush=True)
print(len(list(stream)), "more tokens", len(llm.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids))
llm.close()
"""
USES = ("generate", "chat", "embed", "stats", "next", "next of another", "start")


@pytest.mark.slow
def test_children_of_a_program_with_an_open_llm(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tiny_model.write(tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    *of_children, of_parent = result.stdout.splitlines()
    assert of_parent == "899 more tokens 4", result.stderr
    assert len(of_children) == len(USES)
    for use, line in zip(USES, of_children, strict=True):
        assert line.startswith(f"{use}: EngineDead: this process is a copy, made by os.fork")
    assert result.stderr == ""
    assert result.returncode == 0
