"""Options of other types than they are declared with, as callers in Python without a type checker give them."""

import json
import subprocess
import sys

# In a process of its own: here calls are checked against their annotations before any code of ours runs.
SCRIPT = """
import json, pathlib, sys
import numpy as np
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.errors import ConfigError
for call in json.load(sys.stdin):
    try:
        exec(call)
        print()
    except ConfigError as error:
        print(error)
"""
CALLS = [
    ("EngineConfig(max_model_len='128')", "max_model_len must be an integer or 'auto', got '128'"),
    ("EngineConfig(max_model_len='8k')", "max_model_len must be an integer or 'auto', got '8k'"),
    ("EngineConfig(max_model_len=True)", "max_model_len must be an integer or 'auto', got True"),
    ("EngineConfig(max_model_len=0)", "max_model_len must be at least 1, or 'auto', got 0"),
    ("EngineConfig(max_model_len=-2)", "max_model_len must be at least 1, or 'auto', got -2"),
    ("EngineConfig(max_num_seqs=2**31)", "max_num_seqs must be in [1, 2147483647], got 2147483648"),
    ("EngineConfig(max_num_batched_tokens=10**30)", "max_num_batched_tokens must be in [1, 2147483647], got 1000"),
    ("EngineConfig(seed=None)", "seed must be an integer, got None"),
    ("EngineConfig(tensor_parallel_size=1.5)", "tensor_parallel_size must be an integer, got 1.5"),
    ("EngineConfig(pipeline_parallel_size=0)", "pipeline_parallel_size must be at least 1, got 0"),
    (
        "EngineConfig(pipeline_parallel_size=2, speculative_config={'method': 'ngram', 'num_speculative_tokens': 2})",
        "speculative_config: stages of a pipeline verify no drafts, leave pipeline_parallel_size out",
    ),
    ("EngineConfig(gpu_memory_utilization='0.9')", "gpu_memory_utilization must be a number, got '0.9'"),
    ("EngineConfig(warmup='no')", "warmup must be one of background, full, none, got 'no'"),
    ("EngineConfig(model='')", "model must not be empty"),
    ("EngineConfig(tokenizer='')", "tokenizer must not be empty"),
    ("EngineConfig(revision='')", "revision must not be empty"),
    ("ServerConfig(served_model_name=[''])", "served_model_name[0] must not be empty"),
    ("ServerConfig(profile_dir='')", "profile_dir must not be empty"),
    ("EngineConfig(model=3)", "model must be a text, got 3"),
    ("EngineConfig(dtype=np.float32)", "dtype must be one of auto, float32, float, bfloat16, float16, half,"),
    ("ServerConfig(port='8000')", "port must be an integer, got '8000'"),
    ("ServerConfig(api_key='key')", "api_key must be a list of texts, got 'key'"),
    ("ServerConfig(api_key=['key', 5])", "api_key[1] must be a text, got 5"),
    # All at once.
    (
        "EngineConfig(seed=None, block_size='x')",
        "seed must be an integer, got None; block_size must be an integer, got 'x'",
    ),
    (
        "EngineConfig(max_num_waiting=0, block_size=3)",
        "max_num_waiting must be at least 1, got 0; block_size must be a power of two",
    ),
    ("ServerConfig(response_ttl=0)", "response_ttl must be more than 0, got 0.0"),
    ("ServerConfig(shutdown_timeout=-1, root_path='x')", "shutdown_timeout must be at least 0.0, got -1.0; root_path"),
    (
        "EngineConfig(block_size=3, max_num_seqs=0)",
        "max_num_seqs must be in [1, 2147483647], got 0; block_size must be a power",
    ),
    (
        "ServerConfig(port=-1, api_workers=0)",
        "port must be in [0, 65535], got -1; api_workers must be in [1, 64], got 0",
    ),
    ("EngineConfig(hf_overrides='{}')", "hf_overrides must be a dict, got '{}'"),
    (
        "EngineConfig(kv_cache_dtype='fp4')",
        "kv_cache_dtype must be one of auto, bfloat16, float16, float32, fp8, fp8_e4m3, fp8_e5m2, int8, got 'fp4'",
    ),
    ("EngineConfig(override_generation_config={'do_sample': 1})", "override_generation_config: do_sample is not read,"),
    ("EngineConfig(model=pathlib.Path('a'), max_model_len=np.int32(8), gpu_memory_utilization=1)", ""),
    ("assert type(EngineConfig(seed=np.int64(8)).seed) is int", ""),
    ("assert EngineConfig(overlap=np.False_, block_size=np.uint8(8)).overlap is False", ""),
    ("assert EngineConfig(tokenizer=pathlib.Path('a')).tokenizer == 'a'", ""),
]
"""What is called, and how the error begins; none where it is accepted."""


def test_an_option_of_another_type_is_named():
    calls = json.dumps([call for call, _ in CALLS])
    result = subprocess.run([sys.executable, "-c", SCRIPT], input=calls, capture_output=True, text=True, check=True)
    for (call, complaint), printed in zip(CALLS, result.stdout.splitlines(), strict=True):
        assert printed.startswith(complaint), call
        assert bool(printed) == bool(complaint), call
