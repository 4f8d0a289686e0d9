"""Optional OpenTelemetry tracing: one span per request, with its latencies.

Nothing of it is imported before `start_tracing`. Attributes are named as in vLLM's spans.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider


@dataclasses.dataclass(frozen=True)
class Times:
    """Latencies of one HTTP request over all its prompts and sequences, in seconds; None if a phase was not reached."""

    queue: float | None
    prefill: float | None
    decode: float | None
    prompt_tokens: int
    output_tokens: int


class Tracing:
    """Sends spans to a collector. `record` adds to the span of the request that the current task serves."""

    def __init__(self, provider: "TracerProvider"):
        from opentelemetry import propagate, trace

        self._provider = provider
        self._tracer = provider.get_tracer("jaxserve")
        self._trace = trace
        self._propagate = propagate

    def record(self, times: Times) -> None:
        """Record the request's latencies."""
        attributes: Mapping[str, float | None] = {
            "gen_ai.latency.time_in_queue": times.queue,
            "gen_ai.latency.time_in_model_prefill": times.prefill,
            "gen_ai.latency.time_in_model_decode": times.decode,
            "gen_ai.usage.prompt_tokens": times.prompt_tokens,
            "gen_ai.usage.completion_tokens": times.output_tokens,
        }
        known = {name: value for name, value in attributes.items() if value is not None}
        self._trace.get_current_span().set_attributes(known)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, route: str | None) -> None:
        """Serve a request by `app` in a span of its own, which continues the client's trace if it has sent one.

        `route` is the template of its path, None if there is none: span names must have few distinct values.
        """
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracer.start_as_current_span(
            scope["method"] if route is None else f"{scope['method']} {route}",
            context=self._propagate.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "gen_ai.request.id": scope["request_id"],
                **({} if route is None else {"http.route": route}),
            },
        ) as span:

            async def traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await app(scope, receive, traced)

    def close(self) -> None:
        """Send pending spans."""
        self._provider.shutdown()


class Traces:
    """Middleware that makes a span for every request but those to `quiet_paths`."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing, routes: Sequence[Route], quiet_paths: frozenset[str]):
        self._app = app
        self._routes = routes
        self._tracing = tracing
        self._quiet_paths = quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["path"] in self._quiet_paths:
            await self._app(scope, receive, send)
        else:
            found = (route.path_format for route in self._routes if route.matches(scope)[0] is not Match.NONE)
            await self._tracing.serve(self._app, scope, receive, send, route=next(found, None))


def start_tracing(endpoint: str) -> Tracing:
    """Start sending spans to the collector at this URL (OTLP over HTTP). Raises ConfigError if OpenTelemetry is not
    installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry: install jaxserve[otel]") from error
    return Tracing(provider_of([BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))]))


def provider_of(processors: "Sequence[SpanProcessor]") -> "TracerProvider":
    """Return a provider that sends spans of a service named jaxserve to these processors."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
    for processor in processors:
        provider.add_span_processor(processor)
    return provider
