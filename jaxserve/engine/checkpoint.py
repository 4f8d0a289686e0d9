"""What an engine reads of a checkpoint before it loads any weight."""

import dataclasses
import functools
import logging
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.drafter import DraftCheckpoint, read_drafter
from jaxserve.errors import ConfigError
from jaxserve.layers.cache import KV_DTYPES
from jaxserve.layers.context import Kernels
from jaxserve.layers.kv_scales import with_kv_scales
from jaxserve.layers.layouts import schemes_of, why_not_held, with_divisible_codes, with_rounded_activations
from jaxserve.layers.params import Params
from jaxserve.layers.stages import check_stages, stage_meshes
from jaxserve.loading.bounds import MAX_CONTEXT
from jaxserve.loading.builtin import resolve_names
from jaxserve.loading.classifier import read_head
from jaxserve.loading.generation_fields import log_what_is_not_followed
from jaxserve.loading.huggingface import resolve_dtype
from jaxserve.loading.json_files import eos_token_ids
from jaxserve.loading.quantization_files import resolve_kv_cache_dtype, rounds_to_integers
from jaxserve.loading.reranking import read_reranker
from jaxserve.loading.sentence_transformers import Embedder, read_embedder
from jaxserve.loading.static_scales import static_scales
from jaxserve.loading.weights import load_config, naming_config, stored_specs
from jaxserve.models import get_family, max_context
from jaxserve.models.family import Family

logger = logging.getLogger(__name__)

BEYOND_FLOAT16 = frozenset({"gemma2", "gemma3_text", "glm4"})
"""Families whose activations are too large for float16."""

WITH_STATIC_SCALES = ("fp8", "fp8_e4m3")
"""The dtypes for which checkpoints have static scales."""


class Checkpoint(NamedTuple):
    """A model on disk."""

    path: str
    fields: dict[str, Any]
    """Its config.json."""
    family: Family
    model_config: Any
    """The config as the family reads it."""
    eos: tuple[int, ...]
    max_model_len: int
    """Tokens that it is served for; with "auto", at most."""
    drafter: DraftCheckpoint = DraftCheckpoint()
    """What drafts for it."""


def read_checkpoint(config: EngineConfig, *, progress: bool) -> tuple[EngineConfig, Checkpoint]:
    """Find the checkpoint and read its config. Returns the options with names resolved to paths, too. Raises
    CheckpointError, and ConfigError for a context that the model was not made for.
    """
    config = resolve_names(config, progress=progress)
    path = config.model
    fields = load_config(path)
    with naming_config(path):
        family = get_family(fields)
        model_config = family.config(fields)
    # what is wrong there is reported now
    check_stages(config.pipeline_parallel_size, num_layers=model_config.num_layers)
    if config.enable_expert_parallel and getattr(model_config, "routing", None) is None:
        raise ConfigError("enable_expert_parallel is true, but this model has no experts: leave it out")
    read_reranker(path, fields)
    read_head(path, hidden_size=model_config.hidden_size)
    embedder = read_embedder(path, hidden_size=model_config.hidden_size)
    log_what_is_not_followed(path)
    config = dataclasses.replace(config, kv_cache_dtype=resolve_kv_cache_dtype(config.kv_cache_dtype, path, fields))
    return config, Checkpoint(
        path=path,
        fields=fields,
        family=family,
        model_config=model_config,
        eos=eos_token_ids(fields, pathlib.Path(path, "config.json")),
        max_model_len=_max_model_len(config, model_config, embedder),
        drafter=read_drafter(config, path, fields, progress=progress),
    )


def choose_dtype(config: EngineConfig, checkpoint: Checkpoint, *, is_cpu: bool, has_bfloat16: bool) -> np.dtype:
    """Return the dtype of activations, KV and weights that are not quantized.

    Where the device has no bfloat16, "auto" is float16 instead, or float32 for families with larger values. Raises
    ConfigError if the KV cache was meant to have another one.
    """
    dtype = _choose_dtype(config, checkpoint, is_cpu=is_cpu, has_bfloat16=has_bfloat16)
    if config.kv_cache_dtype not in ("auto", str(dtype), *KV_DTYPES):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, but keys and values of 16 or 32 bits have the dtype of "
            f"the activations, which is {dtype}"
        )
    return dtype


def _choose_dtype(config: EngineConfig, checkpoint: Checkpoint, *, is_cpu: bool, has_bfloat16: bool) -> np.dtype:
    with naming_config(checkpoint.path):
        dtype = resolve_dtype(config.dtype, checkpoint.fields, is_cpu=is_cpu)
    if dtype != jnp.bfloat16 or has_bfloat16:
        return dtype
    if config.dtype != "auto":
        logger.warning("this GPU has no bfloat16: XLA computes in float32, which is slow; --dtype auto avoids that")
        return dtype
    chosen = np.dtype(np.float32 if checkpoint.fields["model_type"] in BEYOND_FLOAT16 else np.float16)
    logger.warning("dtype is %s: this GPU has no bfloat16", chosen)
    return chosen


def specs_with_scales(config: EngineConfig, checkpoint: Checkpoint) -> Params:
    """Return the weights that the family declares, with the checkpoint's static scales if the KV cache is to use them.
    Raises CheckpointError for scales that are none.
    """
    specs = checkpoint.family.param_specs(checkpoint.model_config)
    if config.kv_cache_dtype not in WITH_STATIC_SCALES:
        return specs
    return with_kv_scales(specs, static_scales(checkpoint.path, specs))


def choose_weights(
    config: EngineConfig,
    path: str,
    fields: dict[str, Any],
    specs: Params,
    *,
    dtype: np.dtype,
    kernels: Kernels,
    mesh: Mesh | AbstractMesh,
    is_cpu: bool,
) -> Params:
    """Return the declared weights in the form in which the devices hold them: as values or, if a kernel multiplies by
    them, as the codes of the checkpoint at `path`, whose config.json has these fields. Raises ConfigError for a mesh
    over which they do not divide.
    """
    of_stage = stage_meshes(mesh)[0]
    by_default = functools.partial(why_not_held, dtype=dtype, kernels=kernels, is_cpu=is_cpu, mesh=of_stage)
    specs = stored_specs(
        path,
        specs,
        dtype=dtype,
        quantization=config.quantization,
        dequantizes=config.dequantize is True,
        why_not_held=by_default if config.dequantize is None else None,
    )
    wanted, specs = schemes_of(specs), with_divisible_codes(specs, of_stage)
    if lost := wanted.keys() - schemes_of(specs).keys():
        kinds = ", ".join(sorted({".".join(name.split(".")[-2:]) for name in lost}))
        reason = "on this mesh a byte of two codes, or the order of inputs, would be on two devices"
        logger.info("codes of %d matrices (%s) are held as floats: %s", len(lost), kinds, reason)
    if config.quantize_activations is not False and (kernels == "sm90" or is_cpu):
        # Sums of FP8 codes have the activations' dtype, and float16 ends at 65,504.
        codes = {"fp8"} if kernels == "sm90" and dtype != np.float16 else set()
        if config.quantize_activations and "fp8" not in codes and kernels == "sm90" and _has_fp8(specs):
            logger.warning("quantize_activations: not beside FP8 weights in float16, only in bfloat16")
        if config.quantize_activations or rounds_to_integers(fields):
            codes.add("int8")
        specs = with_rounded_activations(specs, codes, kernels=kernels)
    return specs


def _has_fp8(specs: Params) -> bool:
    return any(scheme.codes == "fp8" for scheme in schemes_of(specs).values())


def _max_model_len(config: EngineConfig, model_config: Any, embedder: Embedder) -> int:
    own = embedder.max_length
    if not isinstance(config.max_model_len, int):
        return min(model_config.max_position_embeddings, own or MAX_CONTEXT)
    limit = max_context(model_config)
    if own is not None and config.max_model_len > own:
        logger.info("max_model_len %d wins over max_seq_length %d of the embedder's files", config.max_model_len, own)
    if config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model was made for at most {limit} tokens")
    return config.max_model_len
