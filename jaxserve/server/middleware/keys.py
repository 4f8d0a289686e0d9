"""API keys from flags, files and the environment, kept as digests."""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError

API_KEY_VARIABLE = "JAXSERVE_API_KEY"
ADMIN_KEY_VARIABLE = "JAXSERVE_ADMIN_API_KEY"


class Keys:
    """A set of keys that can only be compared with. False when there are none."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, authorization: bytes) -> str | None:
        """Return a name for the owner of this key, if the Authorization header is `Bearer` and one of the keys.

        The time this takes reveals nothing about the keys: digests have equal lengths, and all of them are compared.
        """
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex() if any(matches) and scheme.lower() == b"bearer" else None


def client_keys(config: ServerConfig) -> Keys:
    """Return the keys for clients. Raises ConfigError."""
    return _read("api_key", config.api_key, config.api_key_file, API_KEY_VARIABLE)


def admin_keys(config: ServerConfig) -> Keys:
    """Return the keys for the admin routes. Raises ConfigError."""
    return _read("admin_api_key", config.admin_api_key, config.admin_api_key_file, ADMIN_KEY_VARIABLE)


def _read(name: str, given: Sequence[str], file: str | None, variable: str) -> Keys:
    """Return all keys of the flag, the file (one per line) and the variable (one).

    A named source without a key is an error: the server would be open to everyone.
    """
    keys = list(given)
    if any(not key.strip() for key in keys):
        raise ConfigError(f"{name} must not be empty")
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {name}_file {file}: {error}") from error
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise ConfigError(f"{name}_file {file} has no key in it")
        keys += in_file
    if variable in os.environ:
        if not os.environ[variable].strip():
            raise ConfigError(f"{variable} is set, but empty")
        keys.append(os.environ[variable].strip())
    return Keys(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
