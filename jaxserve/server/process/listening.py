"""Take the port of a server, before the engine starts."""

import socket

from jaxserve.config import ServerConfig
from jaxserve.errors import StartupError

KEEPALIVE_SECONDS = 15  # of silence on a connection before a keep-alive probe, and between probes
BACKLOG = 2048  # connections waiting to be accepted


def bind(config: ServerConfig, *, beside: socket.socket | None = None) -> socket.socket:
    """Return a socket that listens on the configured address.

    The port is taken before the engine starts, so that only one of two servers gets it, and early connections wait.
    `beside` is another socket of this server, whose port is shared. Raises StartupError.
    """
    port = config.port if beside is None else beside.getsockname()[1]
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.send_timeout * 1000))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that has vanished sends nothing
            if hasattr(socket, "TCP_KEEPIDLE"):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
            if beside is not None:  # set only now, so that another server cannot share the first one's port
                for each in (beside, listener):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(f"cannot listen on {config.host}:{port}: {reason}") from error
    return listener
