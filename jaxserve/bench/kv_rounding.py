"""`jaxserve bench kv-rounding`: how far keys and values in 8 bits move log probabilities, each apart."""

import contextlib
import dataclasses
import pathlib
import random
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.bench.report import table
from jaxserve.bench.shapes import SMALL_SHAPES, write_config
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest
from jaxserve.loading.builtin import resolve_tokenizer
from jaxserve.tokenizer import Tokenizer

DTYPES = ("fp8_e4m3", "fp8_e5m2", "int8")


def of_text(config: EngineConfig, *, text_path: pathlib.Path, num_tokens: int, outliers: Sequence[float]) -> str:
    """Return the report of a model on the first tokens of a text, in runs that fill the context.

    Raises StartupError, and InvalidRequest if the text cannot be read or has fewer than two tokens.
    """
    try:
        text = text_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {text_path}: {error}", param="text") from error
    tokenizer = Tokenizer.load(resolve_tokenizer(config.tokenizer or config.model))
    token_ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    if len(token_ids) < 2:
        raise InvalidRequest(f"{text_path} has fewer than two tokens", param="text")
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return _report(config, config.model, token_ids, bos=bos, outliers=outliers)


def of_shapes(
    config: EngineConfig, shapes: Sequence[str], *, num_tokens: int, outliers: Sequence[float]
) -> Iterator[str]:
    """Yield the report of each of `SMALL_SHAPES` with random weights, on random tokens. Raises StartupError."""
    for name in shapes:
        with tempfile.TemporaryDirectory() as folder:
            path = write_config(pathlib.Path(folder), SMALL_SHAPES[name])
            drawn = random.Random(0)
            token_ids = [drawn.randrange(SMALL_SHAPES[name]["vocab_size"]) for _ in range(num_tokens)]
            random_weights = dataclasses.replace(config, model=str(path), load_format="dummy")
            yield _report(random_weights, name, token_ids, bos=[], outliers=outliers)


def _report(config: EngineConfig, name: str, token_ids: list[int], *, bos: list[int], outliers: Sequence[float]) -> str:
    from jaxserve.engine.local import LocalEngineClient
    from jaxserve.inspect.kv_rounding import Rounding, moved_logprobs

    columns = {
        "K": Rounding(keys=True),
        "V": Rounding(values=True),
        "both": Rounding(keys=True, values=True),
        **{f"K, outliers x {factor:g}": Rounding(keys=True, outlier=factor) for factor in outliers},
    }
    roundings = [each._replace(is_static=is_static) for is_static in (False, True) for each in columns.values()]
    rows = []
    with contextlib.closing(LocalEngineClient.start(config, progress=True)) as client:
        length = min(client.info.max_model_len - len(bos), len(token_ids))
        starts = range(0, len(token_ids) - length + 1, length)  # without a last run that is shorter
        runs = [bos + token_ids[start : start + length] for start in starts]
        for dtype in DTYPES:
            moved = moved_logprobs(client.engine.runner, runs, roundings, dtype=dtype)
            cells = [f"{np.abs(each).mean():.1e} / {np.abs(each).max():.1e}" for each in moved]
            rows.append([dtype, *cells[: len(columns)]])
            rows.append([f"{dtype}, static", *cells[len(columns) :]])
    title = f"{name}: |log probability - that of float32|, mean / largest of {len(runs)} x {len(runs[0]) - 1} tokens"
    return f"{title}\n\n{table(['keys and values in', *columns], rows)}"
