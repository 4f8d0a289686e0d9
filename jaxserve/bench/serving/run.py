"""`jaxserve bench serve`, from its options to the report."""

import contextlib
import dataclasses
import datetime
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import uvloop
from tqdm import tqdm

from jaxserve.bench.serving.arrivals import arrival_times
from jaxserve.bench.serving.client import Client, Outcome, ServedModel, request_body
from jaxserve.bench.serving.load import LoadResult, run_load
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.plots import save_plots
from jaxserve.bench.serving.prompts import PromptMaker
from jaxserve.bench.serving.summary import Summary, parse_slos, per_request, report, summarize
from jaxserve.bench.serving.workloads import Call, fit, read_workload
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.loading.builtin import resolve_tokenizer
from jaxserve.tokenizer import Tokenizer


class ServingRun(NamedTuple):
    """The summary of a run, and the load that it summarizes."""

    summary: Summary
    result: LoadResult
    model: str
    exact_length: bool


def run(options: ServingOptions, *, goodput: Sequence[str]) -> int:
    """Run the load, print the report and write the requested files. Return 0, or 1 if a request failed.

    Raises InvalidRequest if an option is invalid, the server cannot be reached or a file cannot be read.
    """
    slos = parse_slos(goodput)
    measured = uvloop.run(measure(options, slos=slos))
    summary = measured.summary
    print(report(summary))
    if not measured.exact_length:
        print("\nOutputs are as long as the model wants: ignore_eos was not asked for, or the server does not take it.")
    if options.save_json is not None:
        pathlib.Path(options.save_json).write_bytes(_json(options, measured))
    if options.save_plot is not None:
        title = f"{measured.model}, {options.workload}: {summary.num_completed} of {summary.num_requests} requests"
        save_plots(measured.result, pathlib.Path(options.save_plot), title=title)
    return int(summary.num_failed > 0)


async def measure(options: ServingOptions, *, slos: dict[str, float]) -> ServingRun:
    """Query the server's models, warm it up, and run the load."""
    options = dataclasses.replace(options, api_key=options.api_key or os.environ.get("OPENAI_API_KEY"))
    async with Client(options) as client:
        served = await _choose(client, options.model)
        tokenizer = _load_tokenizer(options, served)
        wanted = read_workload(options, tokenizer)
        calls = _fitted(options, wanted, served, tokenizer)
        maker = _prompt_maker(options, tokenizer)

        def body(call: Call, exact_length: bool) -> bytes:
            return request_body(
                options,
                model=served.id,
                prompt=maker.prompt(call),
                output_len=call.output_len,
                exact_length=exact_length,
            )

        exact_length = await _warm_up(client, options, lambda exact: body(calls[0], exact))
        arrivals = arrival_times(calls, rate=options.request_rate, burstiness=options.burstiness, seed=options.seed)
        with tqdm(total=len(calls), unit="req", disable=not options.progress, file=sys.stderr) as bar:
            num_failed = 0

            def show(num_running: int, ended: Outcome | None) -> None:
                nonlocal num_failed
                if ended is not None:
                    num_failed += ended.kind is not None
                    bar.set_postfix(running=num_running, failed=num_failed, refresh=False)
                    bar.update()

            result = await run_load(
                client,
                arrivals,
                lambda index: body(calls[index], exact_length),
                max_concurrency=options.max_concurrency,
                duration=options.duration,
                on_change=show,
            )
    for outcome in result.outcomes:
        if not outcome.is_counted:
            outcome.num_prompt_tokens = calls[outcome.index].num_prompt_tokens
    num_shortened = sum(calls[outcome.index] is not wanted[outcome.index] for outcome in result.outcomes)
    summary = summarize(result, slos=slos, num_shortened=num_shortened)
    return ServingRun(summary, result, served.id, exact_length)


async def _choose(client: Client, name: str | None) -> ServedModel:
    """Return the model of that name, or the first one. If the server has no /v1/models, the name is taken on trust."""
    models = await client.models()
    if models is None and name is not None:
        return ServedModel(name)
    if not models:
        raise InvalidRequest("the server has no models", param="url")
    for model in models:
        if name is None or model.id == name:
            return model
    names = ", ".join(model.id for model in models[:10])
    raise InvalidRequest(f"the server has no model {name!r}, but {names}", param="model")


def _load_tokenizer(options: ServingOptions, served: ServedModel) -> Tokenizer | None:
    """Load the named tokenizer, or that of the served model if it is available on this machine."""
    if options.tokenizer is not None:
        return Tokenizer.load(resolve_tokenizer(options.tokenizer))
    if options.vocab_size is None:
        for name in dict.fromkeys([served.root, served.id]):
            with contextlib.suppress(CheckpointError):
                if name:
                    return Tokenizer.load(resolve_tokenizer(name, is_offline=True))
    return None


def _fitted(options: ServingOptions, calls: list[Call], served: ServedModel, tokenizer: Tokenizer | None) -> list[Call]:
    """Cut the calls to the context length, if it is known. Calls that fit are returned as the same objects."""
    max_model_len = options.max_model_len or served.max_model_len
    if max_model_len is None:
        return calls
    reserve = 0
    if options.endpoint == "chat" and tokenizer is not None and tokenizer.has_chat_template:
        empty = tokenizer.render_chat_template([{"role": "user", "content": ""}])
        reserve = len(tokenizer.encode(empty, add_special_tokens=False))
    return [fit(call, max_model_len, tokenizer, reserve=reserve) for call in calls]


def _prompt_maker(options: ServingOptions, tokenizer: Tokenizer | None) -> PromptMaker:
    if tokenizer is None and not options.sends_ids:
        raise InvalidRequest("prompts in text need a tokenizer: name one, or send ids", param="tokenizer")
    if tokenizer is None and options.vocab_size is None:
        raise InvalidRequest("name a tokenizer, or the number of token ids to draw from", param="vocab_size")
    return PromptMaker(seed=options.seed, as_ids=options.sends_ids, tokenizer=tokenizer, vocab_size=options.vocab_size)


async def _warm_up(client: Client, options: ServingOptions, body: Callable[[bool], bytes]) -> bool:
    """Send the first call a few times before the clock starts. Return true if exact output lengths can be requested.

    A server that answers 400 or 422 with ignore_eos, and succeeds without it, does not support it. Raises
    InvalidRequest if the first request fails: all others would, too.
    """

    async def fails(exact_length: bool) -> Outcome | None:
        outcome = Outcome(index=0, due=0.0, sent=0.0)
        await client.send(body(exact_length), outcome)
        return outcome if outcome.kind is not None else None

    exact_length = options.ignore_eos is not False
    if options.num_warmups == 0 and options.ignore_eos is not None:
        return exact_length
    failure = await fails(exact_length)
    if failure is not None and options.ignore_eos is None and failure.kind in ("HTTP 400", "HTTP 422"):
        exact_length = False
        failure = await fails(exact_length)
    if failure is not None:
        raise InvalidRequest(f"the first request failed: {failure.kind}: {failure.error}", param="url")
    for _ in range(options.num_warmups - 1):
        await fails(exact_length)
    return exact_length


def _json(options: ServingOptions, measured: ServingRun) -> bytes:
    """Encode the results and the options they were measured with, except the API key."""
    asked = dataclasses.asdict(options)
    del asked["api_key"]
    content = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": measured.model,
        "exact_length": measured.exact_length,
        "options": asked,
        "summary": measured.summary,
    }
    if options.per_request:
        content["requests"] = per_request(measured.result.outcomes, measured.result.start)
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"
