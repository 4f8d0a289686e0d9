"""TLS of the listening socket: the server's certificate, and those that clients must show."""

import ssl

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError


def ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context of HTTPS connections; None: plain HTTP. Raises ConfigError."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A password would be asked for at the terminal, by every process.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse_password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"TLS: {error.strerror or error}") from error
    return context


def _refuse_password() -> str:
    raise ConfigError("TLS: the private key is encrypted; give one that needs no password")
