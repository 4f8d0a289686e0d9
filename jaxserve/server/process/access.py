"""Check who may use a server before anything is started: read keys and certificates, and warn if there are no keys."""

import ipaddress
import logging

from jaxserve.config import ServerConfig
from jaxserve.server.middleware.keys import admin_keys, client_keys
from jaxserve.server.process.tls import ssl_context

logger = logging.getLogger(__name__)


def check_access(config: ServerConfig) -> None:
    """Read all keys and certificates, and warn about a server that is reachable from other machines without a key.

    Raises ConfigError.
    """
    admin_keys(config)
    keys = client_keys(config)
    ssl_context(config)
    if not keys and not is_loopback(config.host):
        logger.warning("anyone who can reach %s may use this server: give it an --api-key", config.host)


def is_loopback(host: str) -> bool:
    """Return true if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
