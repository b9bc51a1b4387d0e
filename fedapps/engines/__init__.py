"""How a run is carried out: grids, Flower's own engine, several runs side by side."""

import socket

ENGINES = ("ray", "flower", "in-process")
CONNECT_SECONDS = 5.0


def check_engine_name(engine: str) -> None:
    """Raise ValueError for an unknown engine."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")


def check_address(address: str) -> None:
    """Raise ValueError if no process listens there, since Ray would wait for minutes. Ray itself
    resolves "auto"."""
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"--ray-address is {address!r}: {error}; it is host:port of a Ray cluster's head "
            '(ray start --head), or "auto"'
        ) from error
