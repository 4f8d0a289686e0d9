"""The requests of a load: random mixes, sonnets, ShareGPT conversations, Azure and Mooncake traces.

Files are given by path; none is part of this project. Prompts are only described here: `prompts` turns the descriptions
into tokens or text.
"""

import csv
import datetime
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.bench.serving.options import ServingOptions
from jaxserve.errors import InvalidRequest
from jaxserve.tokenizer import Tokenizer

MOONCAKE_BLOCK = 512  # tokens represented by one hash id of a Mooncake trace
SHARED, OWN, BLOCK = 0, 1, 2  # first number of a segment's key
_SONNET_INSTRUCTION = "Pick as many lines as you can from these poem lines:\n"
_DEFAULT_REQUESTS, _DEFAULT_OUTPUT = 100, 128


class Segment(NamedTuple):
    """A run of random tokens. Equal keys give equal tokens: a shorter segment is a prefix of a longer one."""

    key: tuple[int, int]
    num_tokens: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load. `arrival` is in seconds after the start, if the workload specifies it."""

    prompt: str | tuple[Segment, ...]
    num_prompt_tokens: int
    output_len: int
    arrival: float | None = None


def read_workload(options: ServingOptions, tokenizer: Tokenizer | None) -> list[Call]:
    """Return all calls of the workload that `options` describes. Raises InvalidRequest that names the option or the
    line.
    """
    if options.workload == "random":
        calls = random_calls(options)
    elif options.workload in ("azure", "mooncake"):
        read = azure_calls if options.workload == "azure" else mooncake_calls
        calls = read(_path(options), speed=options.trace_speed, length_scale=options.length_scale)
        if options.output_len is not None:
            calls = [msgspec.structs.replace(call, output_len=options.output_len) for call in calls]
        calls = calls[: options.num_requests]
    elif tokenizer is None:
        raise InvalidRequest(f"the workload {options.workload} counts tokens: name a tokenizer", param="tokenizer")
    else:
        calls = (sonnet_calls if options.workload == "sonnet" else sharegpt_calls)(options, tokenizer)
    if not calls:
        raise InvalidRequest(f"{options.file} holds no requests", param="file")
    return calls


def random_calls(options: ServingOptions) -> list[Call]:
    """Make prompts of random tokens after a common prefix; lengths are uniform in (1 -+ range_ratio) times the mean."""
    rng = np.random.default_rng([options.seed, SHARED])
    ratio = options.range_ratio

    def lengths(mean: int) -> list[int]:
        low, high = max(1, round(mean * (1 - ratio))), round(mean * (1 + ratio))
        return rng.integers(low, high, size=options.num_requests or _DEFAULT_REQUESTS, endpoint=True).tolist()

    prefix = options.prefix_len
    own_lengths = lengths(options.input_len - prefix)
    output_lengths = lengths(options.output_len or _DEFAULT_OUTPUT)
    return [
        Call(
            prompt=(Segment((SHARED, 0), prefix), Segment((OWN, number), own)),
            num_prompt_tokens=prefix + own,
            output_len=output_len,
        )
        for number, (own, output_len) in enumerate(zip(own_lengths, output_lengths, strict=True))
    ]


def azure_calls(path: pathlib.Path, *, speed: float = 1.0, length_scale: float = 1.0) -> list[Call]:
    """Read the times and lengths of an Azure LLM inference trace (TIMESTAMP, ContextTokens, GeneratedTokens)."""

    def parse(lines: Iterator[str]) -> Iterator[tuple[float, Call]]:
        for number, row in enumerate(csv.DictReader(lines)):
            num_prompt = _scaled(int(row["ContextTokens"]), length_scale)
            yield (
                datetime.datetime.fromisoformat(row["TIMESTAMP"]).timestamp(),
                Call(
                    prompt=(Segment((OWN, number), num_prompt),),
                    num_prompt_tokens=num_prompt,
                    output_len=_scaled(int(row["GeneratedTokens"]), length_scale),
                ),
            )

    return _timed(_read_lines(path, parse), speed)


def mooncake_calls(path: pathlib.Path, *, speed: float = 1.0, length_scale: float = 1.0) -> list[Call]:
    """Read a Mooncake trace (timestamp in ms, input_length, output_length, hash_ids); equal ids are equal token
    blocks.
    """
    block = _scaled(MOONCAKE_BLOCK, length_scale)

    def parse(lines: Iterator[str]) -> Iterator[tuple[float, Call]]:
        for line in lines:
            row = json.loads(line)
            ids = row["hash_ids"]
            left = min(_scaled(int(row["input_length"]), length_scale), block * len(ids))  # both are rounded
            segments = []
            for hash_id in ids:
                segments.append(Segment((BLOCK, int(hash_id)), min(block, left)))
                left -= segments[-1].num_tokens
            yield (
                row["timestamp"] / 1000,
                Call(
                    prompt=tuple(segment for segment in segments if segment.num_tokens),
                    num_prompt_tokens=sum(segment.num_tokens for segment in segments),
                    output_len=_scaled(int(row["output_length"]), length_scale),
                ),
            )

    return _timed(_read_lines(path, parse), speed)


def sonnet_calls(options: ServingOptions, tokenizer: Tokenizer) -> list[Call]:
    """Make prompts of poem lines, up to `input_len` tokens and at least one line; all begin with the same lines, of up
    to `prefix_len` tokens.

    The instruction and the lines are tokenized one by one, so the whole may have a few tokens fewer.
    """
    lines = [line + "\n" for line in _read_text(_path(options)).splitlines() if line.strip()]
    if not lines:
        return []
    counts = [len(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    start = len(tokenizer.encode(_SONNET_INSTRUCTION))
    shared, num_shared = _take(range(len(lines)), counts, options.prefix_len - start)
    rng = np.random.default_rng([options.seed, SHARED])
    calls = []
    for _ in range(options.num_requests or _DEFAULT_REQUESTS):
        wanted = options.input_len - start - num_shared
        drawn, _ = _take(rng.integers(len(lines), size=max(1, wanted)).tolist(), counts, wanted)
        chosen = [*shared, *drawn] or [0]
        text = _SONNET_INSTRUCTION + "".join(lines[index] for index in chosen)
        output_len = options.output_len or _DEFAULT_OUTPUT
        calls.append(Call(prompt=text, num_prompt_tokens=len(tokenizer.encode(text)), output_len=output_len))
    return calls


def sharegpt_calls(options: ServingOptions, tokenizer: Tokenizer) -> list[Call]:
    """Return first questions of conversations in random order, each with the token count of its answer as output
    length.

    The format is a JSON list of {"conversations": [{"from", "value"}, ...]}. Conversations that do not begin with a
    question and an answer are skipped.
    """
    path = _path(options)
    try:
        turns = [[turn["value"] for turn in entry["conversations"][:2]] for entry in json.loads(_read_text(path))]
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} is not in ShareGPT's format: {type(error).__name__}: {error}"
        raise InvalidRequest(message, param="file") from error
    pairs = [pair for pair in turns if len(pair) == 2 and all(isinstance(text, str) and text for text in pair)]
    order = np.random.default_rng([options.seed, SHARED]).permutation(len(pairs))
    calls = []
    for index in order[: options.num_requests or _DEFAULT_REQUESTS]:
        question, answer = pairs[index]
        output_len = options.output_len or len(tokenizer.encode(answer, add_special_tokens=False)) or 1
        num_prompt = len(tokenizer.encode(question))
        calls.append(Call(prompt=question, num_prompt_tokens=num_prompt, output_len=output_len))
    return calls


def fit(call: Call, max_model_len: int, tokenizer: Tokenizer | None, *, reserve: int = 0) -> Call:
    """Cut a call to a context of `max_model_len` tokens, of which `reserve` are taken by the chat template.

    If a call is too long, its output is cut to at most half the context, then the end of its prompt to what is left.
    Raises InvalidRequest if nothing would be left.
    """
    room = max_model_len - reserve
    if call.num_prompt_tokens + call.output_len <= room:
        return call
    output_len = min(call.output_len, room // 2)
    left = min(call.num_prompt_tokens, room - output_len)
    if output_len < 1 or left < 1:
        raise InvalidRequest(f"a context of {max_model_len} tokens is too short", param="max_model_len")
    if isinstance(call.prompt, str):
        assert tokenizer is not None  # a text of known length was made with one
        num_special = len(tokenizer.encode(""))
        ids = tokenizer.encode(call.prompt, add_special_tokens=False)[: max(1, left - num_special)]
        return msgspec.structs.replace(
            call, prompt=tokenizer.decode(ids), num_prompt_tokens=left, output_len=output_len
        )
    segments, num_taken = [], 0
    for segment in call.prompt:
        num_tokens = min(segment.num_tokens, left - num_taken)
        segments.append(Segment(segment.key, num_tokens))
        num_taken += num_tokens
    prompt = tuple(segment for segment in segments if segment.num_tokens)
    return msgspec.structs.replace(call, prompt=prompt, num_prompt_tokens=left, output_len=output_len)


def _take(indices: range | list[int], counts: list[int], limit: int) -> tuple[list[int], int]:
    """Return the first lines whose tokens stay within `limit`, and their number of tokens."""
    taken, total = [], 0
    for index in indices:
        if total + counts[index] > limit:
            break
        taken.append(index)
        total += counts[index]
    return taken, total


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _timed(rows: list[tuple[float, Call]], speed: float) -> list[Call]:
    """Sort calls by time, with the first at 0."""
    rows = sorted(rows, key=lambda row: row[0])
    return [msgspec.structs.replace(call, arrival=(time - rows[0][0]) / speed) for time, call in rows]


def _path(options: ServingOptions) -> pathlib.Path:
    assert options.file is not None  # ServingOptions checks this
    return pathlib.Path(options.file)


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", param="file") from error


def _read_lines[T](path: pathlib.Path, parse: Callable[[Iterator[str]], Iterator[T]]) -> list[T]:
    """Return what `parse` makes of the lines of a file. Raises InvalidRequest with the number of the line that
    failed.
    """
    number = 0

    def numbered() -> Iterator[str]:
        nonlocal number
        for number, line in enumerate(_read_text(path).splitlines(), 1):  # noqa: B007
            if line.strip():
                yield line

    try:
        return list(parse(numbered()))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{path}, line {number}: {type(error).__name__}: {error}", param="file") from error
