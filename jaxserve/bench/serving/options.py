"""The options of `jaxserve bench serve`: a frozen dataclass whose fields are its flags, validated once."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxserve.errors import InvalidRequest


def _option(
    default: Any, group: str, text: str, *, aliases: Sequence[str] = (), words: Mapping[str, Any] | None = None
) -> Any:
    """Declare a field that is a flag; `aliases` and `words` are names that `vllm bench serve` has for the same."""
    metadata = {"group": group, "help": text, "is_size": False, "aliases": aliases, "words": words}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """One run against one server. None means: asked from the server, or no limit. Raises InvalidRequest."""

    url: str = _option(
        "http://127.0.0.1:8000", "server", "address of the server, with or without /v1", aliases=("--base-url",)
    )
    endpoint: Literal["completions", "chat"] = _option(
        "completions",
        "server",
        "route to load",
        words={"/v1/completions": "completions", "/v1/chat/completions": "chat"},
    )
    model: str | None = _option(None, "server", "name of the model; default: the first of /v1/models")
    api_key: str | None = _option(None, "server", "bearer token; default: $OPENAI_API_KEY")
    tokenizer: str | None = _option(
        None, "server", "model directory or built-in model; default: the served model's name, where it is one here"
    )
    vocab_size: int | None = _option(None, "server", "number of token ids to draw from where there is no tokenizer")
    max_model_len: int | None = _option(None, "server", "context length; default: that of /v1/models")
    ignore_eos: bool | None = _option(
        None, "server", "ask for outputs of exactly the wanted length; default: where the server takes it"
    )
    temperature: float = _option(0.0, "server", "of every request")
    extra_body: str = _option("", "server", "JSON object of further fields of every request")

    workload: Literal["random", "sonnet", "sharegpt", "azure", "mooncake"] = _option(
        "random", "workload", "what is asked", aliases=("--dataset-name",)
    )
    file: str | None = _option(
        None, "workload", "file of sonnet, sharegpt, azure (.csv) or mooncake (.jsonl)", aliases=("--dataset-path",)
    )
    num_requests: int | None = _option(
        None, "workload", "requests; default: 100, or all of a trace", aliases=("--num-prompts",)
    )
    seed: int = _option(0, "workload", "seed of lengths, tokens, order and arrivals")
    input_len: int = _option(
        256,
        "workload",
        "prompt tokens (random, sonnet), prefix included",
        aliases=("--random-input-len", "--sonnet-input-len"),
    )
    output_len: int | None = _option(
        None,
        "workload",
        "output tokens; default: 128, or what the file says",
        aliases=("--random-output-len", "--sonnet-output-len", "--sharegpt-output-len"),
    )
    range_ratio: float = _option(
        0.0, "workload", "random: lengths vary by this share, up and down, uniformly", aliases=("--random-range-ratio",)
    )
    prefix_len: int = _option(
        0,
        "workload",
        "prompt tokens that all requests share (random, sonnet)",
        aliases=("--random-prefix-len", "--sonnet-prefix-len"),
    )
    length_scale: float = _option(1.0, "workload", "factor on all lengths of a trace, blocks of hash ids included")
    prompts: Literal["ids", "text"] | None = _option(
        None, "workload", "send token ids or text; default: ids for random and traces on completions, else text"
    )

    request_rate: float | None = _option(
        None,
        "load",
        "requests a second on average; default: a trace's own times, else all at once",
        words={"inf": None},
    )
    burstiness: float = _option(
        1.0, "load", "shape of the gamma-distributed gaps: 1 is a Poisson process, less is burstier"
    )
    trace_speed: float = _option(1.0, "load", "seconds of a trace that pass in one of ours")
    max_concurrency: int | None = _option(None, "load", "requests that run at once, at most; default: no limit")
    duration: float | None = _option(None, "load", "seconds after which nothing more is sent; default: no limit")
    num_warmups: int = _option(1, "load", "requests before the clock starts, one after the other")
    timeout: float = _option(600.0, "load", "seconds a request may take before it counts as failed")

    save_json: str | None = _option(None, "report", "file for the summary as JSON")
    per_request: bool = _option(False, "report", "each request's times in the JSON, too", aliases=("--save-detailed",))
    save_plot: str | None = _option(None, "report", "file for the plots: PNG, of load-curve SVG")
    progress: bool = _option(True, "report", "show a progress bar")

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "num_requests", "input_len", "output_len", "max_concurrency"):
            self._check(name, at_least=1)
        for name in ("seed", "prefix_len", "num_warmups", "temperature"):
            self._check(name, at_least=0)
        for name in ("request_rate", "burstiness", "trace_speed", "length_scale", "duration", "timeout"):
            self._check(name, above=0)
        if not 0 <= self.range_ratio < 1:
            raise InvalidRequest(f"range_ratio must be in [0, 1), got {self.range_ratio}", param="range_ratio")
        if self.prefix_len >= self.input_len:
            message = f"prefix_len must be less than input_len ({self.input_len}), got {self.prefix_len}"
            raise InvalidRequest(message, param="prefix_len")
        if self.workload != "random" and self.file is None:
            raise InvalidRequest(f"the workload {self.workload} needs a file", param="file")
        if self.endpoint == "chat" and self.prompts == "ids":
            raise InvalidRequest("a chat takes text, not token ids", param="prompts")
        if not self.url.startswith(("http://", "https://")):
            raise InvalidRequest(f"url must begin with http:// or https://, got {self.url!r}", param="url")
        for name in ("save_json", "save_plot"):
            if (path := getattr(self, name)) is not None and not pathlib.Path(path).absolute().parent.is_dir():
                raise InvalidRequest(f"there is no folder for {path}", param=name)
        self.extra_fields()

    @property
    def base_url(self) -> str:
        """The server's address including /v1."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def sends_ids(self) -> bool:
        """True if prompts are sent as token ids rather than text."""
        if self.prompts is not None:
            return self.prompts == "ids"
        return self.endpoint == "completions" and self.workload not in ("sonnet", "sharegpt")

    def extra_fields(self) -> dict[str, Any]:
        """Parse `extra_body`. Raises InvalidRequest if it is not a JSON object."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise InvalidRequest(f"extra_body is not JSON: {error}", param="extra_body") from error
        if not isinstance(fields, dict):
            raise InvalidRequest("extra_body must be a JSON object", param="extra_body")
        return fields

    def _check(self, name: str, *, at_least: float | None = None, above: float | None = None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if at_least is not None and not at_least <= value < math.inf:
            raise InvalidRequest(f"{name} must be at least {at_least}, got {value}", param=name)
        if above is not None and not above < value < math.inf:
            raise InvalidRequest(f"{name} must be more than {above}, got {value}", param=name)


CURVE_FIELDS = (
    *("url", "endpoint", "model", "api_key", "tokenizer", "vocab_size", "max_model_len", "temperature", "extra_body"),
    *("seed", "input_len", "output_len", "range_ratio", "prefix_len", "length_scale", "timeout"),
    *("save_json", "save_plot", "progress"),
)
"""The options that `jaxserve bench load-curve` has, too."""
