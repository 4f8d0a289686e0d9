"""`jaxserve bench load`: time and host memory for loading a generated checkpoint as safetensors, GGUF and a store.

Each kind is loaded several times in a process of its own; the files are in the page cache. The first load of a process
is reported separately: it pays for memory that the kernel has to provide first (in a virtual machine, perhaps from its
host), which later loads reuse.
"""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import msgspec

from jaxserve.bench.report import table
from jaxserve.bench.shapes import LLAMA_100M, write_config
from jaxserve.config import DType
from jaxserve.errors import ConfigError

SHAPE: dict[str, Any] = LLAMA_100M | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
"""The width of a Llama with a billion parameters; layers are added until the checkpoint has the requested size."""


class Load(msgspec.Struct, kw_only=True):
    """The measurements of one process: seconds of each load in order, and memory in bytes.

    `peak` is all memory used besides the weights, `largest` the size of the largest weight.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    peak: int
    largest: int

    def row(self) -> list[str]:
        """Format the first and best wall time, the best CPU time, the peak and its limit in MiB."""
        later = slice(1 if len(self.seconds) > 1 else 0, None)
        return [
            f"{self.seconds[0]:.2f}",
            f"{min(self.seconds[later]):.2f}",
            f"{min(self.cpu_seconds[later]):.2f}",
            f"{self.peak / 2**20:.0f}",
            f"{(3 * self.largest + 2**30) / 2**20:.0f}",
        ]


def run(size: int, *, stored: DType, dtype: DType, folder: pathlib.Path | None, num_runs: int, with_orbax: bool) -> str:
    """Load a checkpoint of about `size` bytes stored as `stored`, a store made of it, and a similar GGUF file, as
    `dtype`.

    With `with_orbax`, Orbax restores the store too. The files are written to `folder`, by default the directory for
    temporary files, and removed again. Returns the report. Raises ConfigError.
    """
    from jaxserve.convert import convert

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is no directory")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        original, gguf, store = (pathlib.Path(name) / part for part in ("original", "model.gguf", "store"))
        original.mkdir()
        generate(original, size=size, dtype=stored)
        kinds = {f"safetensors, {stored}": ("load", original), f"store, {dtype}": ("load", store)}
        if with_orbax:
            kinds["the same by Orbax"] = ("restore", store)
        kinds["GGUF, Q8_0"] = ("load", gguf)
        started = time.perf_counter()
        convert(str(original), store, dtype=dtype, progress=False)
        converted = time.perf_counter() - started
        generate_gguf(gguf, original)
        rows = [
            [label, f"{_bytes_below(path) / 2**30:.2f}", *_in_a_process(way, path, dtype, num_runs).row()]
            for label, (way, path) in kinds.items()
        ]
    header = ["loaded from", "GiB", "first s", "best s", "best CPU s", "peak MiB beside them", "limit MiB"]
    return f"as {dtype}, {num_runs} times each; the store took {converted:.1f} s to make\n\n" + table(header, rows)


def generate(folder: pathlib.Path, *, size: int, dtype: str) -> None:
    """Write a model directory with about `size` bytes of random weights, one file per layer."""
    import jax
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jaxserve.models import get_family

    family = get_family(SHAPE)
    number_type = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def num_bytes(num_layers: int) -> int:
        specs = family.param_specs(family.config(SHAPE | {"num_hidden_layers": num_layers}))
        values = sum(int(np.prod(spec.shape)) for spec in jax.tree.leaves(specs))
        return values * number_type.itemsize

    one, two = num_bytes(1), num_bytes(2)
    config = SHAPE | {"num_hidden_layers": max(1, round((size - one) / (two - one)) + 1), "dtype": dtype}
    write_config(folder, config)
    specs = family.param_specs(family.config(config))
    block = np.random.default_rng(0).standard_normal(2**20, np.float32).astype(number_type)
    shards = [specs["layers"][index] for index in range(len(specs["layers"]))]
    shards.append({name: spec for name, spec in specs.items() if name != "layers"})
    shard_of = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        tensors = {
            name: np.resize(block, shape)
            for spec in jax.tree.leaves(shard)
            for name, shape in zip(spec.source, spec.source_shapes, strict=True)
        }
        save_file(tensors, folder / file)
        shard_of |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))


def generate_gguf(path: pathlib.Path, model: pathlib.Path) -> None:
    """Write a GGUF file with the shapes of `model`, a directory written by `generate`; matrices are stored as Q8_0."""
    import gguf
    import jax
    import numpy as np

    from jaxserve.loading.gguf_names import gguf_name
    from jaxserve.loading.huggingface import load_config
    from jaxserve.models import get_family

    fields = load_config(model)
    family = get_family(fields)
    config = family.config(fields)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "</s>"])
    row = np.random.default_rng(0).standard_normal((1, 2**20), np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(row, kind).ravel()
    specs = jax.tree.leaves(family.param_specs(config))
    shapes = {
        gguf_name(name, "llama"): shape
        for spec in specs
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }
    values, size = gguf.GGML_QUANT_SIZES[kind]
    stored = {name: (*shape[:-1], shape[-1] // values * size) for name, shape in shapes.items() if len(shape) > 1}
    for name, shape in shapes.items():
        if name in stored:
            writer.add_tensor_info(name, stored[name], np.dtype(np.uint8), int(np.prod(stored[name])), raw_dtype=kind)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        whole = np.resize(blocks, stored[name]) if name in stored else np.ones(shape, np.float32)
        writer.write_tensor_data(whole)
    writer.close()


def _in_a_process(way: str, path: pathlib.Path, dtype: DType, num_runs: int) -> Load:
    command = [sys.executable, "-m", "jaxserve.bench.load", way, str(path), dtype, str(num_runs)]
    return msgspec.json.decode(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout, type=Load)


def _bytes_below(path: pathlib.Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _measure(way: str, path: str, dtype: DType, num_runs: int) -> Load:
    """Load `num_runs` times and record time and memory.

    On a CPU the weights are in host memory too, and are subtracted from the peak. Pages of mapped files do not count.
    """
    import jax

    from jaxserve.layers.layouts import num_bytes
    from jaxserve.loading.huggingface import resolve_dtype
    from jaxserve.loading.weights import load_config, load_weights
    from jaxserve.models import get_family

    fields = load_config(path)
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    served = resolve_dtype(dtype, fields, is_cpu=True)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    weights = num_bytes(specs, dtype=served) if mesh.devices.flat[0].platform == "cpu" else 0
    load = functools.partial(load_weights, progress=False) if way == "load" else _restore
    found = Load(seconds=[], cpu_seconds=[], peak=0, largest=0)
    for _ in range(num_runs):
        before = _anonymous_memory()
        with _Watch() as watch:
            started, cpu_started = time.perf_counter(), time.process_time()
            params = load(path, specs, dtype=served, mesh=mesh)
            found.seconds.append(time.perf_counter() - started)
            found.cpu_seconds.append(time.process_time() - cpu_started)
        found.peak = max(found.peak, watch.peak - before - weights)
        found.largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
        del params
    return found


def _restore(path: str, specs: Any, *, dtype: Any, mesh: Any) -> Any:
    """Restore a store by Orbax, as `load_weights` would."""
    import jax
    import orbax.checkpoint as ocp

    from jaxserve.layers.layouts import abstract_params

    target = abstract_params(specs, dtype=dtype, mesh=mesh)
    arguments = ocp.args.PyTreeRestore(item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return jax.block_until_ready(checkpointer.restore(pathlib.Path(path) / "weights", args=arguments))


class _Watch:
    """Context manager that records the process's peak memory in bytes, sampled 500 times a second."""

    def __enter__(self) -> "_Watch":
        self.peak, self._is_over = _anonymous_memory(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, _anonymous_memory())


def _anonymous_memory() -> int:
    """Return the bytes of this process that are not backed by files (Linux)."""
    fields = dict(line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].removesuffix("kB")) * 1024


if __name__ == "__main__":
    way, path, dtype, num_runs = sys.argv[1:]
    print(msgspec.json.encode(_measure(way, path, msgspec.convert(dtype, DType), int(num_runs))).decode())
