"""Options of LLM, and wrong arguments of all its methods, by name; `generate` without an LLM."""

import dataclasses
import inspect
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import msgspec
import pytest
import tiny_tokenizer
from fake_client import FakeEngineClient
from waiting import PATIENCE

import jaxserve
import jaxserve.llm
from jaxserve.config import EngineConfig
from jaxserve.errors import CheckpointError, ConfigError, InvalidRequest
from jaxserve.llm import LLM
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams

# In a process of its own: here calls are checked against their annotations before any code of ours runs.
CALLS = """
import pathlib, sys
import jax, numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
import tiny_tokenizer
from fake_client import FakeEngineClient
from jaxserve.engine.frontend import Frontend
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer
tokenizer = Tokenizer.load(tiny_tokenizer.byte_level(pathlib.Path(sys.argv[1])))
llm = LLM.from_frontend(Frontend(FakeEngineClient(), tokenizer))
user = {"role": "user", "content": "hi"}
for call in sys.argv[2:]:
    try:
        eval(call)
    except Exception as error:
        print(type(error).__name__, getattr(error, "param", None), error)
    else:
        print("nothing raised")
llm.close()
"""


WRONG_ARGUMENTS = {
    "LLM(mesh='x')": "ConfigError None mesh must be a jax.sharding.Mesh of at least one device, got 'x'",
    "LLM(mesh=jax.devices())": "ConfigError None mesh must be a jax.sharding.Mesh of at least one device, got [Cpu",
    "LLM(mesh=AbstractMesh((1,), ('a',)))": "ConfigError None mesh must be a jax.sharding.Mesh of at least one device",
    "LLM(mesh=Mesh(np.zeros(0), ('a',)))": "ConfigError None mesh must be a jax.sharding.Mesh of at least one device",
    "LLM(progress='x')": "ConfigError None progress must be True or False, got 'x'",
    "LLM(compilation_cache_dir='a\\0', warmup='none')": "ConfigError None compilation_cache_dir: embedded null byte",
    "LLM(tokenizer=pathlib.Path('/nowhere'))": "CheckpointError None tokenizer: no model '/nowhere'",
    "llm.generate('a', {'n': 1})": "InvalidRequest sampling_params sampling_params must be SamplingParams, or a list",
    "llm.generate('a', ['x'])": "InvalidRequest sampling_params sampling_params must be SamplingParams, or a list of",
    "llm.stream('a', 'x')": "InvalidRequest sampling_params sampling_params must be SamplingParams, or a list of them",
    "llm.chat(user)": "InvalidRequest messages messages must be a list of dicts, or of such lists, got {'role'",
    "llm.chat(['x'])": "InvalidRequest messages messages must be a list of dicts, got 'x'",
    "llm.stream_chat('x')": "InvalidRequest messages messages must be a list of dicts, got 'x'",
    "llm.chat([user], tools=5)": "InvalidRequest tools tools must be a list of dicts, got 5",
    "llm.chat([user], chat_template_kwargs='x')": "InvalidRequest chat_template_kwargs chat_template_kwargs must be a",
    "llm.embed('a', pooling='x')": "InvalidRequest pooling pooling must be one of last, mean, cls, max, weighte",
    "llm.embed('a', dimensions=1.5)": "InvalidRequest dimensions dimensions must be an integer, got 1.5",
    "llm.embed('a', dimensions=5)": "InvalidRequest dimensions dimensions must be in [1, 4], got 5",
    "llm.embed('a', normalize=2)": "InvalidRequest normalize normalize must be True or False, got 2",
    "llm.score('a', 3)": "InvalidRequest text_2 text_2 must be a text or a list of texts, got 3",
    "llm.generate('a', use_tqdm='no')": "InvalidRequest use_tqdm use_tqdm must be True or False, got 'no'",
    "llm.chat([user], add_generation_prompt=1)": "InvalidRequest add_generation_prompt add_generation_prompt must be",
    "llm.chat([user], add_generation_promt=True)": "TypeError None chat has no option 'add_generation_promt'; did you",
    "llm.stream_chat([user], tool=[])": "TypeError None chat has no option 'tool'; did you mean 'tools'?",
    "llm.chat([user], chat_template=5)": "InvalidRequest chat_template chat_template must be a text, got 5",
    "LLM(max_model_length=5)": "TypeError None LLM has no option 'max_model_length'; did you mean 'max_model_len'?",
    "LLM(served_models=['a'])": "TypeError None LLM has no option 'served_models'",
    "LLM(hf_overrides=print)": "ConfigError None hf_overrides must be a dict, got <built-in function print>",
    "llm.embed('a', dimensions=np.int8(2), normalize=np.False_, use_tqdm=np.False_)": "nothing raised",
    "llm.generate('a', SamplingParams(max_tokens=np.uint8(2)), use_tqdm=np.True_)": "nothing raised",
}


class TestOptions:
    def test_wrong_arguments_are_named(self, tmp_path):
        environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1] / "support")}
        command = [sys.executable, "-c", CALLS, str(tmp_path), *WRONG_ARGUMENTS]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        complaints = dict(zip(WRONG_ARGUMENTS, result.stdout.splitlines(), strict=True))
        wrong = {call: got for call, got in complaints.items() if not got.startswith(WRONG_ARGUMENTS[call])}
        assert wrong == {}

    def test_every_engine_option_is_a_parameter_with_the_same_default(self):
        parameters = inspect.signature(LLM.__init__).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
        fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
        assert defaults == {"mesh": None, "progress": True} | fields

    @pytest.mark.parametrize(
        ("scheduler", "speculative_config"),
        [("static", None), ("continuous", {"method": "ngram", "num_speculative_tokens": 3})],  # never both
    )
    def test_every_option_reaches_the_engine(self, monkeypatch, tmp_path, scheduler, speculative_config):
        from jaxserve.engine.local import LocalEngineClient

        tiny_tokenizer.byte_level(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
        given = {
            "model": str(tmp_path),
            "tokenizer": str(tmp_path),
            "dtype": "bfloat16",
            "quantization": "int8",
            "max_model_len": 99,
            "load_format": "dummy",
            "hf_overrides": {"a": 1},
            "generation_config": "vllm",
            "override_generation_config": {"temperature": 0.25},
            "kv_cache_dtype": "bfloat16",
            "seed": 7,
            "block_size": 32,
            "kv_cache_memory": 12345,
            "gpu_memory_utilization": 0.5,
            "enable_prefix_caching": False,
            "max_cached_states": 4,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 77,
            "max_num_waiting": 5,
            "scheduling_policy": "priority",
            "scheduler": scheduler,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1 if speculative_config else 2,
            "enable_expert_parallel": True,
            "kernels": "xla",
            "overlap": False,
            "watchdog_timeout": 60.0,
            "dequantize": True,
            "max_logprobs": 50,
            "quantize_activations": True,
            "warmup": "none",
            "compilation_cache_dir": "",
            "speculative_config": speculative_config,
            "programs": str(tmp_path),
        }
        # A revision is of use to the hub alone: tests/loading/test_hub.py.
        assert given.keys() | {"revision"} == {field.name for field in dataclasses.fields(EngineConfig)}
        calls = []

        def fake_start(config, *, mesh=None, progress=False):
            calls.append((config, mesh, progress))
            return FakeEngineClient()

        monkeypatch.setattr(LocalEngineClient, "start", fake_start)
        mesh = jax.make_mesh((2,), ("tensor",))
        with LLM(**given, mesh=mesh, progress=False) as llm:
            assert llm.sampling_params().temperature == 0.25
        ((config, *rest),) = calls
        assert rest == [mesh, False]
        # Values of the model's files are carried out.
        assert json.loads((pathlib.Path(config.model) / "config.json").read_text()) == {"a": 1}
        done = {"hf_overrides": None, "generation_config": "auto", "override_generation_config": None}
        assert config == EngineConfig(**given | done | {"model": config.model})

    def test_bad_options_are_reported_before_anything_is_loaded(self, tmp_path):
        with pytest.raises(ConfigError, match="block_size"):
            LLM(str(tmp_path), block_size=3)
        with pytest.raises(CheckpointError, match="no model"):
            LLM(str(tmp_path / "nowhere"))
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="no tokenizer"):
            LLM(str(tmp_path))


class TestModuleGenerate:
    @pytest.fixture
    def started(self, monkeypatch, start):
        """The names of the models for which an engine has been started."""
        started = []

        def fake_llm(model, *, warmup):
            assert warmup == "none", "few of the shapes will be needed"
            started.append(model)
            return start()[0]

        monkeypatch.setattr(jaxserve.llm, "LLM", fake_llm)
        monkeypatch.setattr(jaxserve.llm, "_default_llms", jaxserve.llm._DefaultLLMs())
        return started

    def test_one_prompt_gives_one_output_and_a_list_a_list(self, started):
        output = jaxserve.generate("abc", max_tokens=4)
        assert isinstance(output, RequestOutput)
        assert str(output) == "bcbc"
        [output] = jaxserve.generate(["abc"], max_tokens=2, temperature=0)
        assert output.outputs[0].text == "bc"
        assert started == ["scribe-15m"], "the engine is kept"

    def test_one_engine_a_model(self, started):
        for model in ("a", "b", "a"):
            jaxserve.generate("abc", model=model)
        assert started == ["a", "b"]

    def test_one_engine_also_for_threads_that_come_together(self, monkeypatch, started, start):
        fake_llm = jaxserve.llm.LLM
        monkeypatch.setattr(
            jaxserve.llm, "LLM", lambda model, warmup: (time.sleep(0.05), fake_llm(model, warmup=warmup))[1]
        )
        threads = [threading.Thread(target=jaxserve.generate, args=("abc",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert started == ["scribe-15m"]

    def test_wrong_sampling_starts_no_engine(self, started):
        with pytest.raises(TypeError, match="temprature"):
            jaxserve.generate("abc", temprature=0.5)
        with pytest.raises(InvalidRequest, match="temperature"):
            jaxserve.generate("abc", temperature=-1.0)
        assert started == []

    def test_every_sampling_field_is_accepted(self, started):
        defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
        assert jaxserve.generate("abc", **defaults).finished
