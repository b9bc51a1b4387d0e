"""Traffic between a machine's processes goes past the user's proxy, which is for other machines.

Flower's processes find proxies by httpx or gRPC. httpx refuses to start for some values of these
variables, also if no traffic would pass there: such values are left out."""

from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "::1", "localhost")
EXCEPTIONS = "no_proxy"  # hosts that are reached without a proxy
GRPC_EXCEPTIONS = "no_grpc_proxy"  # gRPC reads it in place of no_proxy
INTERNATIONAL = ".xn--"  # begins a part of an international name in ASCII
READ_SCHEMES = ("http", "https")  # of a proxy; httpx needs a further library for SOCKS


def without_proxy(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """The environment for processes that reach this machine and `hosts` (names or addresses)
    without a proxy. Other hosts are reached as the user's variables say."""
    changed = {}
    for name, value in environment.items():
        is_proxy = name.lower().endswith("_proxy") and not name.lower().startswith("no_")
        if not is_proxy or _readable(value):
            changed[name] = value
    # Python takes the name in small letters if both are set, even to nothing.
    exceptions = environment.get(EXCEPTIONS, environment.get(EXCEPTIONS.upper(), ""))
    changed[EXCEPTIONS] = changed[EXCEPTIONS.upper()] = _with_hosts(exceptions, hosts)
    if GRPC_EXCEPTIONS in environment:
        changed[GRPC_EXCEPTIONS] = _with_hosts(environment[GRPC_EXCEPTIONS], hosts)
    return changed


def _readable(proxy: str) -> bool:
    """Whether httpx can use the proxy; without a scheme it takes it for one of HTTP."""
    scheme, separator, _ = proxy.strip().partition("://")
    return not separator or scheme.lower() in READ_SCHEMES


def _with_hosts(exceptions: str, hosts: tuple[str, ...]) -> str:
    """A list of exceptions with this machine and `hosts` in front."""
    entries = [*LOOPBACK, *hosts]
    for host in hosts:
        if INTERNATIONAL in f".{host}":  # httpx finds such a name in this form alone
            entries.append(f"all://{host}")
    for entry in exceptions.split(","):
        host = entry.strip().strip("[]")
        if host and _is_host(host):
            entries.append(host)
    return ",".join(dict.fromkeys(entries))


def _is_host(entry: str) -> bool:
    """Whether httpx reads the entry: not a range of IPv6, a port after brackets, or a name that is
    not in ASCII."""
    is_address_with_more = entry.count(":") > 1 and bool({"/", "]"} & set(entry))
    return entry.isascii() and not is_address_with_more
