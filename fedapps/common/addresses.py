"""Addresses and names of machines, as they are configured, probed and written."""

import ipaddress
import re
import socket

LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")  # between two dots of a name
MAX_NAME = 253  # characters; https://www.rfc-editor.org/rfc/rfc1035#section-2.3.4
PROBE_SECONDS = 1.0


def read_host(text: str) -> str:
    """An address without brackets, or a name in ASCII ("xn--…" for an international one).

    Raises ValueError for anything else, and for an address at which no other machine can be
    reached, such as 0.0.0.0."""
    host = text.strip().removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _ascii_name(text)
    if address.is_unspecified or "%" in host:
        raise ValueError(
            f"{text!r} is no address that nodes can connect to; name an address of this machine, "
            "or a name that leads to it"
        )
    return str(address)


def with_port(host: str, port: int) -> str:
    """``host:port``, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connection_error(host: str, port: int) -> str:
    """Why no process accepts connections there, "" if one does."""
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except OSError as error:
        return f"{with_port(host, port)}: {error}"
    return ""


def _ascii_name(name: str) -> str:
    """The form of a name that DNS and certificates hold. Raises ValueError for no name."""
    try:
        given = name.removesuffix(".").lower()
        ascii_name = given.encode("idna").decode("ascii")
        same = given.isascii() or ascii_name.encode("ascii").decode("idna") == given
    except UnicodeError:  # e.g. a label that is too long
        ascii_name = ""
        same = False
    labels = ascii_name.split(".")
    if len(ascii_name) > MAX_NAME or not all(LABEL.fullmatch(label) for label in labels):
        raise ValueError(
            f"{name!r} is neither an address nor a name of a machine; write it without a port, "
            "such as 192.168.1.5, ::1 or node.example.org"
        )
    if not same:  # Python's encoder replaces ß and ς, which names have been able to hold since 2010
        raise ValueError(f"{name!r} has several forms in ASCII; write the one you mean, xn--…")
    return ascii_name
