"""A sampling parameter of two files: copies of them with three lines more, in a package that is else the same."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import jaxserve

PACKAGE = pathlib.Path(jaxserve.__file__).parent
CHANGES = {
    "sampling_params.py": {
        '    "top_p": Parameter(': '    "margin": Parameter("draw among logits this near the top; 0: all", (0,)),\n',
        "    top_p: Probability": "    margin: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.0\n",
    },
    "sampling/filters.py": {
        "def filter_logits(": """LOGIT_FILTERS = {
    **LOGIT_FILTERS, "margin": lambda x, margin: (margin <= 0) | (x >= jnp.max(x, axis=1, keepdims=True) - margin)
}


""",
    },
}
SCRIPT = """
import json
from jaxserve import LLM, SamplingParams
from jaxserve.cli import _parser
from jaxserve.server.protocol.fields import SAMPLING

llm = LLM(max_num_seqs=4, kv_cache_memory=2**24)
hot = {"temperature": 50.0, "seed": 1, "max_tokens": 8}
asked = [SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(**hot), SamplingParams(margin=1e-6, **hot)]
texts = [answer.outputs[0].token_ids for answer in llm.generate(["Once upon a time"] * 3, asked)]
flags = [flag for action in _parser().command("generate").shown() for flag in action.option_strings]
print(json.dumps([texts, flags, SAMPLING]))
"""


def lay(source, target, path=()):
    """Make links to what is in `source`, except for the files of CHANGES, which are copied with their lines."""
    target.mkdir()
    for entry in source.iterdir():
        name = "/".join((*path, entry.name))
        if name in CHANGES:
            text = entry.read_text()
            for line, added in CHANGES[name].items():
                assert text.count(f"\n{line}") == 1, line
                text = text.replace(f"\n{line}", f"\n{added}{line}")
            (target / entry.name).write_text(text)
        elif any(changed.startswith(f"{name}/") for changed in CHANGES):
            lay(entry, target / entry.name, (*path, entry.name))
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)


@pytest.mark.slow
def test_a_parameter_of_two_files_draws_and_has_a_flag_and_a_field(tmp_path):
    lay(PACKAGE, tmp_path / "jaxserve")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE.parent}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (greedy, hot, near), flags, fields = json.loads(done.stdout.splitlines()[-1])
    assert near == greedy != hot
    assert "--margin" in flags
    assert "margin" in fields
