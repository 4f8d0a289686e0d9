"""TLS of the listening socket: the server's certificate, and the authorities of clients' certificates."""

import contextlib
import ssl
from collections.abc import Iterator

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError


def ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the context of HTTPS connections, None for plain HTTP. Raises ConfigError."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    with _naming(ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile):
        # A password would be asked for at the terminal, by every process.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse_password)
    if config.ssl_ca_certs is not None:
        with _naming(ssl_ca_certs=config.ssl_ca_certs):
            context.load_verify_locations(config.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextlib.contextmanager
def _naming(**files: str | None) -> Iterator[None]:
    """Turn errors into a ConfigError with the options of the files being read: OpenSSL does not say which of two it
    was.
    """
    try:
        yield
    except OSError as error:  # ssl.SSLError is one
        named = ", ".join(f"{option} {path}" for option, path in files.items() if path is not None)
        raise ConfigError(f"TLS: {named}: {error.strerror or error}") from error


def _refuse_password() -> str:
    raise ConfigError("TLS: the private key is encrypted; give one that needs no password")
