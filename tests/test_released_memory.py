"""The compiled programs of closed engines are released: a program may open one engine after another."""

import subprocess
import sys

import pytest
import tiny_model
from waiting import PATIENCE

SCRIPT = """
import sys
import jax
from jaxserve import LLM, SamplingParams

counts = []
for number in range(4):
    with LLM(sys.argv[1], load_format="dummy", warmup="none", progress=False, max_num_seqs=2 + number) as llm:
        llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)
    counts.append(len(jax.devices()[0].client.live_executables()))  # though `llm` is still there
print(*counts)
"""


@pytest.mark.slow
def test_programs_end_with_their_engine(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tiny_model.write(tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    first, *others = map(int, result.stdout.split())
    assert others == [first] * 3, result.stderr
