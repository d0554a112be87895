"""Ports for launchers that want to be told one."""

import socket

from tests.helpers.pool import HOST


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port
