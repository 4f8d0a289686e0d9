"""Speculation: the engine's options of speculative decoding, in vLLM's names, checked. Plain data, no jax."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxserve.errors import ConfigError

MAX_DRAFTS = 31
"""Largest number of drafts a row: a step has a column for each and one more."""

DEFAULT_LOOKUP = 5
"""Tokens that n-gram lookup compares if neither bound is given, as in vLLM."""

MAX_LOOKUP = 32

QUANTIZATIONS = "int8", "fp8", "int4"
"""What a drafter's matrices may be rounded to."""

DEFAULT_SYNTHETIC: Mapping[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
"""The fields of drafts that are accepted by chance, if none are given."""

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
"""The methods that there are; `speculative.PROPOSERS` and `DRAFTERS` have their implementations."""

BY_CHECKPOINT = "by checkpoint"
"""The method if none is named: what kind of drafter `model` is."""

SAME = {"ngram_gpu": "ngram", "[ngram]": "ngram"} | dict.fromkeys(
    ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"
)
"""Other names of these: lookup always runs on the device, and the target's family says what its further layer is."""

PLANNED = ("eagle", "mlp_speculator", "dflash")
REFUSED = {
    "suffix": "ngram with a prompt_lookup_max of 24 drafts as well from a request's own tokens",
    "medusa": "its heads guess each token without the ones before it, and EAGLE superseded them",
    "eagle_tree": "drafts are chains here, not trees",
    "tree": "drafts are chains here, not trees",
}


class Speculation(msgspec.Struct, frozen=True):
    """What drafts tokens, how many, and for how many rows.

    Attributes:
        num_drafts: most tokens drafted for a row; 0 until the drafter's checkpoint has been asked for their number.
        drafts_by_rows: pairs of a largest number of rows and the drafts of each row up to there, ascending; steps of
            more rows have none. Empty: as is best for the device.
        model: the checkpoint that drafts, if the method needs one.
        tensor_parallel_size: number of devices over which it is to be sharded; None: the target's.
        quantization: what the drafter's matrices are rounded to while they load; None: they are as its checkpoint has
            them, or held as the model's if they are part of it.
        is_coupled: the drafter draws with the random numbers of the target, instead of the most likely token.
        acceptance_rates: if not empty, the fraction of steps in which at least 1, 2, ... drafts are accepted, by
            chance: for measurements only, the text is not the model's.
    """

    method: str
    num_drafts: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    drafts_by_rows: tuple[tuple[int, int], ...]
    acceptance_rates: tuple[float, ...] = ()
    model: str | None = None
    tensor_parallel_size: int | None = None
    quantization: str | None = None
    is_coupled: bool = False

    @property
    def widths(self) -> list[int]:
        """The numbers of tokens a row of steps that verify drafts, ascending."""
        return sorted({1 + num_drafts for _, num_drafts in self.drafts_by_rows if num_drafts})

    def up_to(self, max_tokens: int, *, step_tokens: int) -> "Speculation":
        """Return the options with drafts for steps of up to `max_tokens` tokens, unless they say for which rows: all
        drafts as long as that has room for them, then half of them, and so on.

        Rows have no drafts for which the largest step, of `step_tokens` tokens, has no room. Raises ConfigError that
        names the field if it has room for none.
        """
        by_rows, name = self.drafts_by_rows, "num_speculative_tokens_per_batch_size"
        if not by_rows:
            by_rows, name = self._halved(min(max_tokens, step_tokens), step_tokens), "num_speculative_tokens"
        fitting: list[tuple[int, int]] = []
        last = 0
        for rows, num_drafts in by_rows:
            most = min(rows, step_tokens // (1 + num_drafts)) if num_drafts else rows
            if most > last:
                fitting.append((most, num_drafts))
            if most < rows:
                fitting.append((rows, 0))
            last = rows
        if not any(num_drafts for _, num_drafts in fitting):
            raise _wrong(name, f"leaves no drafts in steps of max_num_batched_tokens ({step_tokens}) tokens")
        return msgspec.structs.replace(self, drafts_by_rows=tuple(fitting))

    def _halved(self, max_tokens: int, step_tokens: int) -> tuple[tuple[int, int], ...]:
        by_rows: dict[int, int] = {}
        num_drafts = self.num_drafts
        while num_drafts:
            if num_drafts < step_tokens:
                by_rows.setdefault(max(1, max_tokens // (1 + num_drafts)), num_drafts)
            num_drafts //= 2
        return tuple(by_rows.items())

    def min_rows(self, width: int) -> int:
        """Return the fewest rows of a step of `width` tokens a row."""
        before = itertools.takewhile(lambda entry: 1 + entry[1] != width, self.drafts_by_rows)
        return 1 + max((rows for rows, _ in before), default=0)

    def max_rows(self, width: int) -> int:
        """Return the most rows of a step of `width` tokens a row."""
        return max(rows for rows, num_drafts in self.drafts_by_rows if 1 + num_drafts == width)


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: list[float] | None = None
    draft_sample_method: str = "greedy"
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None


def parse_speculation(fields: Mapping[str, Any] | str | None, *, published: int | None = None) -> Speculation | None:
    """Return the checked options of `speculative_config`, a dict or its JSON; None if there is none. Raises ConfigError
    that names the field.

    `published` is the number of drafts that the drafter's checkpoint names, which counts if none is given.
    """
    if fields is None:
        return None
    try:
        given = msgspec.convert(json.loads(fields) if isinstance(fields, str) else dict(fields), _Fields)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"speculative_config: {error}") from None
    method = _method(given)
    num_drafts = given.num_speculative_tokens if given.num_speculative_tokens is not None else published
    is_published = num_drafts is None and method in (BY_CHECKPOINT, "eagle3")
    if given.num_speculative_tokens is None and method == "mtp":
        num_drafts = 1  # as many as there are layers for it
    if is_published:
        num_drafts = MAX_DRAFTS
    if num_drafts is None:
        raise _wrong("num_speculative_tokens", "is missing: how many tokens are drafted for a row")
    if not 1 <= num_drafts <= MAX_DRAFTS:
        raise _wrong("num_speculative_tokens", f"must be in [1, {MAX_DRAFTS}], got {num_drafts}")
    if given.draft_sample_method not in ("greedy", "probabilistic"):
        raise _wrong("draft_sample_method", f"must be greedy or probabilistic, got {given.draft_sample_method!r}")
    if given.quantization not in (None, *QUANTIZATIONS):
        raise _wrong("quantization", f"must be {', '.join(QUANTIZATIONS)} or null, got {given.quantization!r}")
    of_others = ["prompt_lookup_min", "prompt_lookup_max"]
    if method == "ngram":
        of_others = ["draft_tensor_parallel_size", "quantization"]
        if given.draft_sample_method != "greedy":
            raise _wrong("draft_sample_method", "must be greedy: n-gram lookup has no probabilities")
    for name in of_others:
        if getattr(given, name) is not None:
            raise _wrong(name, f"has no meaning for the method {method}")
    lookup_min, lookup_max = _lookup(given)
    return Speculation(
        method=method,
        num_drafts=0 if is_published else num_drafts,
        prompt_lookup_min=lookup_min,
        prompt_lookup_max=lookup_max,
        drafts_by_rows=_by_rows(given.num_speculative_tokens_per_batch_size, num_drafts),
        acceptance_rates=() if is_published else _acceptance_rates(given, num_drafts),
        model=None if method == "ngram" else given.model,
        tensor_parallel_size=given.draft_tensor_parallel_size,
        quantization=given.quantization,
        is_coupled=given.draft_sample_method == "probabilistic",
    )


def with_acceptance(fields: Mapping[str, Any] | None, length: float) -> dict[str, Any]:
    """Return the fields of `speculative_config` with which a step draws `length` tokens on average, by chance; by
    default with 4 n-gram drafts.
    """
    return dict(fields or DEFAULT_SYNTHETIC) | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
    }


def _wrong(field: str, complaint: str) -> ConfigError:
    return ConfigError(f"speculative_config: {field} {complaint}")


def _method(given: _Fields) -> str:
    method = given.method
    if method is None and given.model is not None:  # as vLLM also takes it
        method = "ngram" if given.model in ("ngram", "[ngram]") else BY_CHECKPOINT
    if method is None:
        raise _wrong("method", f"is missing: there is {', '.join(METHODS)}")
    if method == BY_CHECKPOINT:
        return method
    method = SAME.get(method, method)
    if method in REFUSED:
        raise _wrong("method", f"{method!r} is not supported: {REFUSED[method]}")
    if method in PLANNED:
        raise _wrong("method", f"{method!r} is not supported yet: there is {', '.join(METHODS)}")
    if method not in METHODS:
        raise _wrong("method", f"{method!r} is unknown: there is {', '.join(METHODS)}")
    if method == "ngram" and given.model is not None and SAME.get(given.model, given.model) != method:
        raise _wrong("model", f"is {given.model!r}, but the method {method} has no model")
    if method in ("draft_model", "eagle3") and given.model is None:
        raise _wrong("model", f"is missing: the method {method} needs a checkpoint that drafts")
    return method


def _lookup(given: _Fields) -> tuple[int, int]:
    low, high = given.prompt_lookup_min, given.prompt_lookup_max
    if low is None and high is None:
        low = high = DEFAULT_LOOKUP
    low = low if low is not None else high
    high = high if high is not None else low
    assert low is not None
    assert high is not None
    if not 1 <= low <= high:
        raise _wrong("prompt_lookup_min", f"must be in [1, prompt_lookup_max], got {low} with prompt_lookup_max {high}")
    if high > MAX_LOOKUP:
        raise _wrong("prompt_lookup_max", f"must be at most {MAX_LOOKUP}, got {high}")
    return low, high


def _by_rows(table: list[tuple[int, int, int]] | None, num_drafts: int) -> tuple[tuple[int, int], ...]:
    """Return the table by the last number of rows of each range."""
    name = "num_speculative_tokens_per_batch_size"
    if table is None:
        return ()
    last, by_rows = 0, []
    for first, end, count in table:
        if first != last + 1 or end < first:
            raise _wrong(
                name, f"must be ranges [first, last, tokens] from 1 on without gaps, got {[first, end, count]}"
            )
        if not 0 <= count <= num_drafts:
            raise _wrong(name, f"must have 0 to num_speculative_tokens ({num_drafts}) tokens, got {count}")
        by_rows.append((end, count))
        last = end
    if not any(count for _, count in by_rows):
        raise _wrong(name, "drafts nothing at any number of rows")
    return tuple(by_rows)


def _acceptance_rates(given: _Fields, num_drafts: int) -> tuple[float, ...]:
    length, rates = given.synthetic_acceptance_length, given.synthetic_acceptance_rates
    if given.rejection_sample_method == "standard":
        if length is not None or rates is not None:
            name = "synthetic_acceptance_length" if length is not None else "synthetic_acceptance_rates"
            raise _wrong(name, 'needs "rejection_sample_method": "synthetic"')
        return ()
    if given.rejection_sample_method != "synthetic":
        raise _wrong("rejection_sample_method", f"must be standard or synthetic, got {given.rejection_sample_method!r}")
    if (length is None) == (rates is None):
        raise _wrong("rejection_sample_method", "synthetic takes synthetic_acceptance_length or _rates, one of them")
    if length is not None:
        if not 1 <= length <= 1 + num_drafts:
            limit = 1 + num_drafts
            raise _wrong(
                "synthetic_acceptance_length", f"must be in [1, {limit}], num_speculative_tokens and 1: {length}"
            )
        # As even as it can be: whole drafts in each step, and one more in a fraction of them.
        return tuple(min(max(length - 1 - index, 0.0), 1.0) for index in range(num_drafts))
    assert rates is not None
    if len(rates) != num_drafts or sorted(rates, reverse=True) != rates or not all(0 <= rate <= 1 for rate in rates):
        raise _wrong(
            "synthetic_acceptance_rates", f"must be {num_drafts} numbers from 1 to 0 that do not rise: {rates}"
        )
    return tuple(rates)
