"""The last lines of a start: what is served, where, and a command that tries it."""

import ipaddress
import json
import logging
import shlex
import socket
from collections.abc import Sequence

from jaxserve import logs
from jaxserve.config import ServerConfig
from jaxserve.engine.client import EngineInfo
from jaxserve.server.middleware.keys import API_KEY_VARIABLE, client_keys
from jaxserve.tables import size_text

logger = logging.getLogger(__name__)


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Return the URL at which this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def curl(url: str, config: ServerConfig, *, has_chat: bool, can_generate: bool = True) -> str:
    """Return a command for a shell that asks the server at `url` something. Keys are named, not shown."""
    route, body = "v1/completions", {"prompt": "Once upon a time", "max_tokens": 64}
    if not can_generate:
        route, body = "classify", {"input": "Once upon a time"}
    elif has_chat:
        route, body = "v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    words = ["curl", *(["-g"] if "[" in url else []), f"{url}/{route}"]
    if config.ssl_certfile is not None:
        words += ["--cacert", config.ssl_certfile]
    if config.ssl_ca_certs is not None:
        words += ["--cert", "client.pem"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command = shlex.join(words)
    return command + (f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if client_keys(config) else "")


def announce(info: EngineInfo, config: ServerConfig, *, names: Sequence[str], url: str, has_chat: bool) -> None:
    """Log what is served: as lines for people or, in JSON, as fields of one object."""
    first = f"serving {' '.join(names)} at {url}/v1"
    facts = {
        "context": f"{info.max_model_len:,} tokens; "
        f"the KV cache holds {info.num_full_requests:,} such requests at once",
        "memory": f"{size_text(info.total_weight_bytes)} of weights, {size_text(info.kv_cache_bytes)} of KV cache "
        f"({info.kv_dtype}) on {info.device}",
        "playground": f"{url}{config.root_path}/",
        "try": curl(url, config, has_chat=has_chat, can_generate=info.can_generate),
    }
    lines = [first, *(f"  {name:<12}{text}" for name, text in facts.items())]
    fields = {
        "message": first,
        "models": names,
        "api": f"{url}/v1",
        "playground": facts["playground"],
        "curl": facts["try"],
        "max_model_len": info.max_model_len,
        "num_full_requests": info.num_full_requests,
        "weight_bytes": info.total_weight_bytes,
        "kv_cache_bytes": info.kv_cache_bytes,
        "device": info.device,
        "dtype": info.kv_dtype,
    }
    logger.info("%s", "\n".join(lines), extra={logs.FIELDS: fields})
