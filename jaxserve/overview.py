"""`jaxserve models`: the table of families, what a model needs, and what fits into memory. No device is touched."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.sizing import GPU_MEMORY_RESERVE
from jaxserve.errors import OutOfMemory
from jaxserve.gpus import GPUS
from jaxserve.layers.cache import KV_DTYPES, hold_in, parts_of
from jaxserve.layers.decoder import UnrotatedConfig
from jaxserve.layers.layouts import abstract_params, read_whole, rounded_to, schemes_of, shard_bytes, with_schemes
from jaxserve.layers.params import Params
from jaxserve.layers.rope import Rope
from jaxserve.loading.builtin import resolve_model
from jaxserve.loading.huggingface import DTYPES, resolve_dtype
from jaxserve.loading.multimodal import TEXT_OF, WRAPPERS
from jaxserve.loading.weights import load_config, naming_config, stored_specs
from jaxserve.models import FAMILIES
from jaxserve.models.family import Family
from jaxserve.planning.sizes import declare
from jaxserve.quantization.scheme import SCHEMES
from jaxserve.tables import aligned, size_text

HEADS, WINDOWS, POSITIONS, OTHER = "KV heads", "windows", "positions", "options"

# How a field of a family's Config appears in the table: column, word. Fields that every family has are left out.
# Fields that are None by default count only for families that list them in `Family.features`, next to features that all
# of their checkpoints have without a field.
FEATURES = {
    "num_kv_heads": (HEADS, "grouped"),
    "latent_heads": (HEADS, "latent"),
    "sliding_window": (WINDOWS, "all layers"),
    "sliding_windows": (WINDOWS, "by layer"),
    "rope": (POSITIONS, "rotary"),
    "local_rope": (POSITIONS, "local rotary"),
    "alibi_slopes": (POSITIONS, "ALiBi"),
    "routing": (OTHER, "experts"),
    "shared_expert_size": (OTHER, "shared expert"),
    "use_parallel_residual": (OTHER, "parallel blocks"),
    "use_qk_norm": (OTHER, "QK norm"),
    "qk_layernorm": (OTHER, "QK norm"),
    "logit_soft_cap": (OTHER, "logit cap"),
    "logit_scale": (OTHER, "scaled logits"),
    "logits_scaling": (OTHER, "scaled logits"),
    "swiglu_limit": (OTHER, "clamped SwiGLU"),
}
BYTES_PER_MILLISECOND = GPUS["h200"].sustained_bandwidth / 1e3
NOT_16_BITS = "there are kernels for bfloat16 and float16 only (--dtype)"
ALL_CODES = "with --no-dequantize"

_ABSENT = {HEADS: "one a query head", WINDOWS: "-", POSITIONS: "none", OTHER: "-"}


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
    words[OTHER] += [name for name in family.features if name not in FEATURES]
    fields = [field.name for field in dataclasses.fields(family.Config) if field.init and field.default is not None]
    for name in (*fields, *family.features):
        if name in FEATURES:
            column, word = FEATURES[name]
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
    usable_memory: int
    """Bytes that the engine may use, of those of the device."""
    step_bytes: int
    """Bytes that steps need besides weights and KV: slots, states of requests, temporaries."""
    kv_memory: int
    """Bytes that weights, steps and a reserve leave for KV; negative if they do not fit."""
    max_context: int
    """Length of the longest request that fits alone, with some room for steps, at most `context`; 0 if none does."""
    max_batch: int
    """Number of requests of `context` tokens that fit together."""
    paths: tuple[str, ...]
    """How the layers of each kind of step run on an H100 or H200, and the reasons against faster paths."""
    programs: tuple[str, ...]
    """The programs that are compiled for those steps, in the order in which they are with `--warmup background`."""


def needs(config: EngineConfig, *, memory: int) -> Needs:
    """Return what an engine with these options needs of a Hopper GPU of `memory` bytes: its sizes are those that
    `jaxserve plan` computes.

    dtype "auto" is the checkpoint's own. Of a model of the hub only the config is downloaded, except for GGUF files,
    which are downloaded whole. Raises CheckpointError, and ConfigError for a number of devices over which the model
    cannot be split.
    """
    fields = load_config(resolve_model(config.model, revision=config.revision, with_weights=False))
    with naming_config(config.model):
        if resolve_dtype(config.dtype, fields, is_cpu=False).itemsize != 2:
            config = dataclasses.replace(config, kernels="xla")  # an engine has to be told so
    engine = declare(config, dataclasses.replace(GPUS["h200"], memory=memory), to_compile=False)
    plan, sizing, (path, fields, family, model_config, *_) = engine.plan, engine.sizing, engine.plan.checkpoint
    builder, model, held, mesh = plan.builder, plan.builder.model, plan.specs, plan.builder.model.mesh
    specs = family.param_specs(model_config)

    def bytes_of(specs: Params, dtype: np.dtype = model.dtype) -> int:
        return sum(map(shard_bytes, jax.tree.leaves(abstract_params(specs, dtype=dtype, mesh=mesh))))

    def most_of(specs: Params, dtype: np.dtype = model.dtype) -> int:
        """Return the bytes on a device of the stage that has the most."""
        return max(bytes_of(stage.own(specs, model_config), dtype) for stage in builder.models)

    codes = stored_specs(path, specs, dtype=model.dtype, quantization=None)
    more = {} if schemes_of(codes).keys() == schemes_of(held).keys() else {ALL_CODES: codes}
    rounded = {
        name: with_schemes(specs, rounded_to(specs, scheme), dtype=model.dtype) for name, scheme in SCHEMES.items()
    }
    routing = getattr(model_config, "routing", None)
    read_fraction = 1.0 if routing is None else routing.num_experts_per_token / routing.num_experts
    step_bytes, context = builder.expected_step_memory, builder.spec.max_model_len
    kv_memory = engine.free - sizing.weight_bytes - step_bytes - GPU_MEMORY_RESERVE
    try:
        max_batch = sizing.needs.num_requests(engine.num_blocks, num_tokens=context)
    except OutOfMemory:
        max_batch = 0
    per_block = max(each.bytes_per_block // each.mesh.size for each in builder.models)
    windows = model.layout.windows
    return Needs(
        model_type=_model_type(fields),
        layers=_layers(hold_in(family.kv_specs(model_config), KV_DTYPES.get(builder.spec.kv_cache_dtype))),
        positions=_positions(model_config),
        is_tied="lm_head" not in specs,
        num_devices=plan.devices.mesh.size,
        num_parameters=sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs)),
        weight_bytes={name: most_of(specs, np.dtype(kind)) for name, kind in DTYPES.items()},
        held_bytes=sizing.weight_bytes,
        codes_bytes=most_of(codes),
        rounded_bytes={name: most_of(specs) for name, specs in rounded.items()},
        floors={
            name: _bytes_read(specs, bytes_of, read_fraction) / BYTES_PER_MILLISECOND
            for name, specs in ({"as held": held} | more | rounded).items()
        },
        dtype=str(model.dtype),
        kv_dtype=str(model.kv_dtype),
        block_size=model.block_size,
        kv_bytes_per_token={
            window: windows.count(window) * per_block // model.block_size for window in dict.fromkeys(windows)
        },
        context=context,
        usable_memory=engine.free,
        step_bytes=step_bytes,
        kv_memory=kv_memory,
        max_context=0 if kv_memory < 0 else sizing.longest_context(engine.free, step_bytes),
        max_batch=max_batch,
        paths=tuple(builder.describe_paths())
        if model.has_kernels
        else (f"plain XLA, by --kernels xla: {NOT_16_BITS}",),
        programs=tuple(map(str, builder.order())),
    )


def _model_type(fields: dict[str, Any]) -> str:
    """Return the model type, and that of the whole model if only its text is served."""
    own, whole = fields["model_type"], fields.get(TEXT_OF)
    return own if whole is None else f"{whole}, text only, by {own}"


def _bytes_read(specs: Params, bytes_of: Callable[[Params], int], read_fraction: float) -> float:
    """Return the bytes of weights that a token reads: of an embedding a row, of experts those that it is routed to."""
    used = read_whole(specs)
    experts: Params = {str(i): spec for i, spec in enumerate(jax.tree.leaves(used)) if "experts" in spec.axes}
    return bytes_of(used) - (1 - read_fraction) * bytes_of(experts)


def _layers(kv_specs: tuple[Any, ...]) -> str:
    """Describe what the layers keep, such as "4 with full attention, 2 with a state; 1 KV head of 256 dimensions"."""
    parts = [part for spec in kv_specs for part in parts_of(spec)]
    windows = collections.Counter("state" if part.keeps_state else part.sliding_window for part in parts)
    names = {None: "full attention", "state": "a state"}
    spans = [f"{count} with {names.get(window, f'a window of {window}')}" for window, count in windows.items()]
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
    rows = [["model_type", HEADS, WINDOWS, POSITIONS, OTHER, "serves"]]
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
                f"{time:.3g} ms {f'in {name}' if name in found.rounded_bytes else name}"
                for name, time in found.floors.items()
            ),
        ],
        ["KV", f"{_kv(found)} in {found.kv_dtype}"],
        ["context", f"{found.context:,} tokens at most"],
    ]
    room = (
        f"of {size_text(found.usable_memory)} that may be used, steps take {size_text(found.step_bytes)} "
        f"and a reserve {size_text(GPU_MEMORY_RESERVE)}"
    )
    if found.kv_memory < 0:
        rows.append(
            ["fits", f"no: {room}; with the weights in {found.dtype} that is {size_text(-found.kv_memory)} too much"]
        )
    else:
        rows += [
            ["fits", f"yes: {room}; the weights in {found.dtype} leave {size_text(found.kv_memory)} for the KV cache"],
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
