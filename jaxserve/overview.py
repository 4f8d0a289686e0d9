"""`jaxserve models`: the table of families, what a model needs, and what fits into memory. No device is touched."""

import collections
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jaxserve.config import DType, EngineConfig, KVCacheDType
from jaxserve.execution.kv_cache import block_bytes, slot_bytes
from jaxserve.execution.kv_layout import kv_layout
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.spec import ON_GPU, StepSpec
from jaxserve.gpus import GPUS
from jaxserve.layers.cache import KV_DTYPES, hold_in
from jaxserve.layers.decoder import UnrotatedConfig
from jaxserve.layers.held import why_not_held
from jaxserve.layers.layouts import abstract_params, shard_bytes
from jaxserve.layers.params import Params
from jaxserve.layers.rope import Rope
from jaxserve.layers.schemes import rounded_to, schemes_of, with_rounded_activations, with_schemes
from jaxserve.layers.stages import Stage, with_stages
from jaxserve.loading.builtin import resolve_model
from jaxserve.loading.huggingface import DTYPES, resolve_dtype
from jaxserve.loading.multimodal import TEXT_OF, WRAPPERS
from jaxserve.loading.quantization_files import resolve_kv_cache_dtype
from jaxserve.loading.weights import load_config, naming_config, stored_specs
from jaxserve.models import FAMILIES, get_family
from jaxserve.models.family import Family
from jaxserve.quantization.scheme import SCHEMES, Scheme
from jaxserve.scheduling.block_needs import BlockNeeds
from jaxserve.tables import aligned, size_text

HEADS, WINDOWS, POSITIONS, HEAD, OTHER = "KV heads", "windows", "positions", "LM head", "options"

# How a field of a family's Config appears in the table: column, word. Fields that every family has are left out.
# Features that all checkpoints of a family have, without a field, are listed in `Family.features`.
FEATURES = {
    "num_kv_heads": (HEADS, "grouped"),
    "latent_heads": (HEADS, "latent"),
    "sliding_window": (WINDOWS, "all layers"),
    "sliding_windows": (WINDOWS, "by layer"),
    "rope": (POSITIONS, "rotary"),
    "local_rope": (POSITIONS, "local rotary"),
    "alibi_slopes": (POSITIONS, "ALiBi"),
    "tie_word_embeddings": (HEAD, "tied or own"),
    "routing": (OTHER, "experts"),
    "shared_expert_size": (OTHER, "shared expert"),
    "use_parallel_residual": (OTHER, "parallel blocks"),
    "use_qk_norm": (OTHER, "QK norm"),
    "qk_layernorm": (OTHER, "QK norm"),
    "attention_soft_cap": (OTHER, "attention cap"),
    "logit_soft_cap": (OTHER, "logit cap"),
    "logit_scale": (OTHER, "scaled logits"),
    "logits_scaling": (OTHER, "scaled logits"),
    "swiglu_limit": (OTHER, "clamped SwiGLU"),
}
BYTES_PER_MILLISECOND = GPUS["h200"].sustained_bandwidth / 1e3
MAX_CHUNK = 8192
"""Default token budget of a step on a GPU. All tokens of a step's chunk are in every window while it runs."""

MAX_ROWS = 256
"""Default number of requests that run at once on a GPU."""

ALL_CODES = "with --no-dequantize"

_ABSENT = {HEADS: "one a query head", WINDOWS: "-", POSITIONS: "none", HEAD: "as declared", OTHER: "-"}


def families() -> list[dict[str, str]]:
    """Return a row per family: its `model_type`, the checkpoints that it serves, and the features of its config. Model
    types of which the text alone is served come last.
    """
    rows = [{"model_type": name} | _features(family) for name, family in FAMILIES.items()]
    return rows + [
        {"model_type": name}
        | dict.fromkeys(_ABSENT, "")
        | {"serves": f"text only, by {wrapper.family} or as {wrapper.key} says"}
        for name, wrapper in WRAPPERS.items()
    ]


def _features(family: Family) -> dict[str, str]:
    words: dict[str, list[str]] = collections.defaultdict(list)
    words[OTHER] += family.features
    for field in dataclasses.fields(family.Config):
        if field.name in FEATURES and field.init:
            column, word = FEATURES[field.name]
            words[column].append(word)
    if issubclass(family.Config, UnrotatedConfig) and not words[POSITIONS]:
        words[POSITIONS].append("learned")
    row = {column: ", ".join(dict.fromkeys(words[column])) or absent for column, absent in _ABSENT.items()}
    return row | {"serves": (family.doc or "").split("(")[0].split(":")[0].strip().rstrip(",.")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Sizes and memory needs of one model. Bytes are per device, of the stage that needs most."""

    model_type: str
    layers: str
    positions: str
    is_tied: bool
    num_parameters: int
    """Parameters of the whole model."""
    num_devices: int
    weight_bytes: dict[str, int]
    """Bytes of the weights, by dtype."""
    dtype: str
    kv_dtype: str
    """Dtype of the KV cache; one of 8 bits has a scale for each token and head."""
    block_size: int
    """Tokens per block: windows are rounded up to whole blocks."""
    kv_bytes_per_token: dict[int | None, int]
    """Bytes per token in all layers with the same window (None: without one), while the token is in it."""
    context: int
    """The model's context length in tokens."""
    held_bytes: int
    """Weight bytes in `dtype` with the codes that an H100 or H200 holds as the checkpoint has them."""
    codes_bytes: int
    """Weight bytes with all codes that can be held, as with `--no-dequantize`."""
    rounded_bytes: dict[str, int]
    """Weight bytes by what `--quantization` may round matrices to, others being in `dtype`."""
    floors: dict[str, float]
    """Milliseconds that an H200 needs to read the weights of a token, as held and as rounded."""
    kv_memory: int
    """Bytes that weights in `dtype` leave for KV; negative if they do not fit."""
    max_context: int
    """Length of the longest request that fits alone, at most `context`; 0 if the weights do not fit."""
    max_batch: int
    """Number of requests of `context` tokens that fit together."""
    paths: tuple[str, ...]
    """How the layers of each kind of step run on an H100 or H200, and the reasons against faster paths."""
    programs: tuple[str, ...]
    """The programs that are compiled for those steps, in the order in which they are with `--warmup background`."""


def needs(
    model: str,
    *,
    revision: str | None = None,
    memory: int,
    dtype: DType = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    block_size: int = EngineConfig().block_size,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Needs:
    """Return what a model, given by any name that `serve` takes, needs of `memory` bytes per device for weights and KV.

    dtype "auto" is the checkpoint's own. Temporaries of a step are not counted. Of a model of the hub only the config
    is downloaded, except for GGUF files, which are downloaded whole. Raises CheckpointError, and ConfigError for a
    number of devices over which the model cannot be split.
    """
    # validates them
    EngineConfig(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size)
    mesh = AbstractMesh((tensor_parallel_size,), ("tensor",), axis_types=(AxisType.Explicit,))
    stages = [Stage(index, pipeline_parallel_size) for index in range(pipeline_parallel_size)]
    path = resolve_model(model, revision=revision, with_weights=False)
    fields = load_config(path)
    kv_cache_dtype = resolve_kv_cache_dtype(kv_cache_dtype, path, fields)
    with naming_config(path):
        family = get_family(fields)
        config = family.Config.from_hf(fields)
        served = resolve_dtype(dtype, fields, is_cpu=False)
    specs, kv_specs = family.param_specs(config), hold_in(family.kv_specs(config), KV_DTYPES.get(kv_cache_dtype))

    def bytes_of(specs: Params, dtype: np.dtype = served) -> int:
        return sum(map(shard_bytes, jax.tree.leaves(abstract_params(specs, dtype=dtype, mesh=mesh))))

    def bytes_of_stage(stage: Stage, specs: Params, dtype: np.dtype = served) -> int:
        return bytes_of(stage.own(specs, is_tied=config.tie_word_embeddings), dtype)

    def most_of(specs: Params, dtype: np.dtype = served) -> int:
        return max(bytes_of_stage(stage, specs, dtype) for stage in stages)

    held = _held_on_gpu(pathlib.Path(path), specs, dtype=served, mesh=mesh)
    codes = stored_specs(path, specs, dtype=served, quantization=None)
    more = {} if schemes_of(codes).keys() == schemes_of(held).keys() else {ALL_CODES: codes}
    rounded = {name: with_schemes(specs, rounded_to(specs, scheme), dtype=served) for name, scheme in SCHEMES.items()}
    routing = getattr(config, "routing", None)
    read_fraction = 1.0 if routing is None else routing.num_experts_per_token / routing.num_experts
    context = config.max_position_embeddings
    layout = kv_layout(kv_specs, max_model_len=context)
    pools = {"dtype": served, "mesh": mesh}
    blocks = BlockNeeds(windows=layout.windows, block_size=block_size, max_chunk=MAX_CHUNK)

    def room_of(stage: Stage) -> tuple[int, int, int]:
        """Return the bytes of a block, the bytes for blocks, and the number of blocks."""
        own = [pool for pool in layout.pools_of(stage.span(config.num_layers)) if pool is not None]
        per_block = block_bytes(own, block_size=block_size, **pools) // tensor_parallel_size
        num_states = MAX_ROWS + EngineConfig.max_cached_states
        left = memory - bytes_of_stage(stage, held) - slot_bytes(own, num_slots=num_states, **pools)
        return per_block, left, max(0, left) // per_block if per_block else MAX_ROWS * blocks.peak(context)

    per_block = max(room_of(stage)[0] for stage in stages)
    kv_memory, num_blocks = (min(room_of(stage)[index] for stage in stages) for index in (1, 2))
    sizes = {"block_size": block_size, "context": context, "kv_cache_dtype": kv_cache_dtype}
    mesh = with_stages(mesh, pipeline_parallel_size)
    steps = _steps(fields, schemes_of(held), dtype=str(served), mesh=mesh, **sizes)
    return Needs(
        model_type=_model_type(fields),
        layers=_layers(kv_specs),
        positions=_positions(config),
        is_tied="lm_head" not in specs,
        num_devices=tensor_parallel_size * pipeline_parallel_size,
        num_parameters=sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs)),
        weight_bytes={name: most_of(specs, np.dtype(kind)) for name, kind in DTYPES.items()},
        held_bytes=most_of(held),
        codes_bytes=most_of(codes),
        rounded_bytes={name: most_of(specs) for name, specs in rounded.items()},
        floors={
            name: _bytes_read(specs, bytes_of, read_fraction) / BYTES_PER_MILLISECOND
            for name, specs in ({"as held": held} | more | rounded).items()
        },
        dtype=str(served),
        kv_dtype=str(KV_DTYPES.get(kv_cache_dtype, served)),
        block_size=block_size,
        kv_bytes_per_token={
            window: layout.windows.count(window) * per_block // block_size for window in dict.fromkeys(layout.windows)
        },
        context=context,
        kv_memory=kv_memory,
        max_context=blocks.longest(num_blocks, limit=context),
        max_batch=blocks.num_requests(num_blocks, num_tokens=context),
        paths=tuple(steps.describe_paths()),
        programs=tuple(map(str, steps.order())),
    )


def _model_type(fields: dict[str, Any]) -> str:
    """Return the model type, and that of the whole model if only its text is served."""
    own, whole = fields["model_type"], fields.get(TEXT_OF)
    return own if whole is None else f"{whole}, text only, by {own}"


def _held_on_gpu(path: pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: AbstractMesh) -> Params:
    """Return `specs` with the schemes of weights that a Hopper GPU holds as codes, if the weights are there too."""
    policy = functools.partial(why_not_held, dtype=dtype, kernels="sm90", is_cpu=False, mesh=mesh)
    return with_rounded_activations(
        stored_specs(path, specs, dtype=dtype, quantization=None, why_not_held=policy), {"fp8"}, kernels="sm90"
    )


def _bytes_read(specs: Params, bytes_of: Callable[[Params], int], read_fraction: float) -> float:
    """Return the bytes of weights that a token reads: of an embedding a row, of experts those that it is routed to."""
    used = {name: spec for name, spec in specs.items() if name != "embed" or "lm_head" not in specs}
    experts: Params = {str(i): spec for i, spec in enumerate(jax.tree.leaves(used)) if "experts" in spec.axes}
    return bytes_of(used) - (1 - read_fraction) * bytes_of(experts)


def _steps(
    fields: dict[str, Any],
    schemes: dict[str, Scheme],
    *,
    dtype: str,
    block_size: int,
    context: int,
    kv_cache_dtype: str,
    mesh: AbstractMesh,
) -> StepBuilder:
    """Return what builds the steps that `serve` would compile on Hopper GPUs without further options."""
    spec = StepSpec(
        model=fields,
        dtype=dtype,
        kernels="sm90",
        block_size=block_size,
        max_model_len=context,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=MAX_CHUNK,
        traits=ON_GPU,
        has_peers=True,
        schemes=schemes,
        kv_cache_dtype=kv_cache_dtype,
    )
    return StepBuilder(spec, mesh)


def _layers(kv_specs: tuple[Any, ...]) -> str:
    """Describe what the layers keep, such as "4 full, 22 with a window of 512; KV heads: 1 of 256"."""
    windows = collections.Counter("state" if spec.keeps_state else spec.sliding_window for spec in kv_specs)
    names = {None: "full", "state": "with a state"}
    spans = [f"{count} {names.get(window, f'with a window of {window}')}" for window, count in windows.items()]
    kept = dict.fromkeys(spec.describe() for spec in kv_specs)
    return f"{', '.join(spans)}; {', '.join(kept)}"


def _positions(config: Any) -> str:
    """Describe the position encoding of a family's Config, such as "rope: base 10000, 8 dimensions of a head"."""

    def describe(rope: Rope) -> str:
        scaling = "" if rope.scaling is None else f", {type(rope.scaling).__name__.removesuffix('Scaling')} scaling"
        reach = f" to {rope.max_context:,} tokens at most" if rope.max_context > config.max_position_embeddings else ""
        return f"base {rope.theta:g}, {rope.head_dim} dimensions of a head{scaling}{reach}"

    ropes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    found = [f"{name}: {describe(rope)}" for name, rope in ropes.items() if isinstance(rope, Rope)]
    if getattr(config, "alibi_slopes", None):
        found.append("ALiBi")
    return "; ".join(found) or ("learned" if isinstance(config, UnrotatedConfig) else "none")


def families_text() -> str:
    """Format the table of families."""
    rows = [["model_type", HEADS, WINDOWS, POSITIONS, HEAD, OTHER, "serves"]]
    rows += [[row[name] for name in rows[0]] for row in families()]
    return aligned(rows)


def needs_text(
    model: str, found: Needs, *, memory: int, here: Sequence[list[str]] = (), more: Sequence[list[str]] = ()
) -> str:
    """Format what `needs` has found, one line per fact, between what is known of this machine and further facts, as
    titles and texts.
    """
    weights = ", ".join(f"{size_text(size)} in {name}" for name, size in found.weight_bytes.items())
    rows = [
        ["model", f"{model} ({found.model_type})"],
        *here,
        [
            "on a GPU",
            f"with {size_text(memory)} (--memory; default: an H200's), in {found.dtype} (--dtype; default: the "
            "checkpoint's):",
        ],
        ["layers", found.layers],
        ["positions", found.positions],
        ["LM head", "tied to the embedding" if found.is_tied else "its own"],
        ["parameters", f"{found.num_parameters:,}"],
        *([["devices", f"{found.num_devices}; bytes are of each"]] if found.num_devices > 1 else []),
        ["weights", weights],
        ["  quantized", ", ".join(f"{size_text(size)} in {name}" for name, size in found.rounded_bytes.items())],
        *_codes_rows(found),
        [
            "  read time",
            "an H200 reads them for one token in "
            + ", ".join(
                f"{time:.2f} ms {f'in {name}' if name in found.rounded_bytes else name}"
                for name, time in found.floors.items()
            ),
        ],
        ["KV", f"{_kv(found)} in {found.kv_dtype}"],
        ["context", f"{found.context:,} tokens at most"],
    ]
    if found.kv_memory < 0:
        lacking = f"{size_text(-found.kv_memory)} more than {size_text(memory)}"
        rows.append(["fits", f"no: the weights alone need {lacking} in {found.dtype}"])
    else:
        rows += [
            ["fits", f"yes: the weights in {found.dtype} leave {size_text(found.kv_memory)} for the KV cache"],
            ["  alone", f"a request of {found.max_context:,} tokens"],
            ["  at once", f"{found.max_batch:,} requests of {found.context:,} tokens"],
        ]
    rows += [["on H100/H200" if index == 0 else "", line] for index, line in enumerate(found.paths)]
    rows += [["compiled" if index == 0 else "", line] for index, line in enumerate(found.programs)]
    return aligned([*rows, *more])


def _codes_rows(found: Needs) -> list[list[str]]:
    """Say what the weights take as codes of the checkpoint, if it has any."""
    if found.codes_bytes == found.weight_bytes[found.dtype]:
        return []
    held, everywhere = size_text(found.held_bytes), f"{size_text(found.codes_bytes)} {ALL_CODES}"
    text = f"{held} in {found.dtype} and the checkpoint's codes"
    return [["  as codes", text if found.codes_bytes == found.held_bytes else f"{text}, {everywhere}"]]


def _kv(found: Needs) -> str:
    """Format bytes of KV: "8,192 bytes a token, 45,056 more in a window of 512, rounded up to blocks of 16 tokens"."""
    whole = found.kv_bytes_per_token.get(None, 0)
    windows = [
        f"{size:,} more in a window of {window:,}, rounded up to blocks of {found.block_size} tokens"
        for window, size in found.kv_bytes_per_token.items()
        if window is not None
    ]
    return ", ".join([f"{whole:,} bytes a token", *windows])
