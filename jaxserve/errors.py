"""Every exception that jaxserve raises on purpose.

    JaxserveError
    ├── InvalidRequest        the caller's error: names the parameter; HTTP 400
    │   ├── ContextLengthExceeded   prompt + max_tokens over the context length; 400
    │   ├── NotFound                names something that does not exist here; 404
    │   │   └── ModelNotFound           an unknown model name
    │   ├── UnsupportedMediaType    the body is not declared as JSON; 415
    │   └── CapacityExceeded        can never fit into the KV cache of this engine; 400
    ├── Unavailable           try again later; HTTP 503
    │   ├── QueueFull               the waiting queue is at its limit; 429 with Retry-After
    │   ├── Draining                the server is shutting down; 503
    │   └── EngineDead              the engine loop has died; 503
    ├── RequestFailed         the engine could not finish one request (NaN guard); HTTP 500
    │   └── RequestTimeout          it took longer than the server allows; 504
    └── StartupError          nothing can be served; the CLI prints it as one line and exits 1
        ├── ConfigError             an invalid engine option
        ├── CheckpointError         a model directory that cannot be read
        └── OutOfMemory             weights or KV cache do not fit the device

`InvalidRequest` is also a `ValueError`, so callers of the Python API can catch what they expect.
"""


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose."""

    status = 500
    type = "internal_error"
    code: str | None = "internal_error"


class InvalidRequest(JaxserveError, ValueError):
    """A request that can never succeed as it is. `param` names the offending field, `code` is machine-readable."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output are longer than the model's context.

    Clients recognize this error by the phrases "maximum context length" and `context_length_exceeded` in its text.
    `lengths` are the tokens of the prompt (at least), of the output (0 if the prompt alone is too long) and of the
    context, where they are known.
    """

    lengths: tuple[int, int, int] | None = None

    @classmethod
    def beyond(
        cls, max_model_len: int, requested: str, *, param: str, lengths: tuple[int, int] | None = None
    ) -> "ContextLengthExceeded":
        """Return the error; `requested` says what is longer than `max_model_len` tokens, as the end of a sentence.
        `lengths` are the tokens of the prompt and of the output.
        """
        code = "context_length_exceeded"
        message = f"This model's maximum context length is {max_model_len} tokens. However, {requested} ({code})"
        error = cls(message, param=param, code=code)
        error.lengths = None if lengths is None else (*lengths, max_model_len)
        return error


class CapacityExceeded(InvalidRequest):
    """A request that needs more KV blocks than the engine owns, so that waiting would never help."""


class NotFound(InvalidRequest):
    """The request names something that does not exist here."""

    status = 404
    type = "not_found_error"


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""


class UnsupportedMediaType(InvalidRequest):
    """The body of the request has a media type that is not supported."""

    status = 415


class Unavailable(JaxserveError):
    """The request is valid, but cannot be taken now."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"


class QueueFull(Unavailable):
    """The waiting queue is at its limit. `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class Draining(Unavailable):
    """The server is finishing its running requests and takes no new ones."""


class EngineDead(Unavailable):
    """The engine loop has ended with an error; nothing it held will finish."""


class RequestFailed(JaxserveError):
    """One request could not be finished; the others go on."""

    code = "request_failed"


class RequestTimeout(RequestFailed):
    """A request has taken longer than the server allows."""

    status = 504
    type = "timeout_error"


class StartupError(JaxserveError):
    """The server or engine cannot start. The message is one line for a person."""


class ConfigError(StartupError):
    """An engine option, or a combination of options, that is invalid."""


class CheckpointError(StartupError):
    """A model directory that is missing, incomplete or of an unknown format."""


class OutOfMemory(StartupError):
    """Weights or KV cache do not fit into the device's memory."""
