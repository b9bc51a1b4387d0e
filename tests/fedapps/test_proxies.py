"""Processes of this machine reach each other past the user's proxy, and other hosts through it."""

import os

import httpx
import pytest
from small_runs import DEAD_PROXY

from fedapps.common.proxies import without_proxy
from fedapps.engines import flower

OURS = ["http://127.0.0.1:5", "http://localhost:5", "https://[::1]:5", "http://127.0.0.2:5",
        "https://xn--bcher-kva.example:5", "http://[fd00::1]:5"]  # fmt: skip
HOSTS = ("127.0.0.2", "xn--bcher-kva.example", "fd00::1")
USERS = {
    "none": {},
    "small letters": {"no_proxy": "in.example"},
    "capitals": {"NO_PROXY": "in.example, 10.0.0.0/8"},
    "an empty one hides capitals": {"no_proxy": "", "NO_PROXY": "*"},
    "entries that httpx refuses": {"no_proxy": "[::1]:80,fd00::/8,bücher.example,in.example"},
}
PROXY = "http://127.0.0.1:9"


@pytest.fixture
def variables(monkeypatch):
    """Sets the variables of a user, and of nobody else."""

    def put(values):
        for name in list(os.environ):
            if name.lower().endswith("_proxy"):
                monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_own_hosts_are_reached_past_the_proxy_and_others_through_it(user, name, variables):
    both = {name: PROXY, name.replace("http", "https").replace("HTTP", "HTTPS"): PROXY}
    variables(without_proxy(USERS[user] | both, *HOSTS))
    client = httpx.Client()
    direct = [client._transport_for_url(httpx.URL(url)) is client._transport for url in OURS]
    assert direct == [True] * len(OURS)
    through = client._transport_for_url(httpx.URL("http://out.example")) is not client._transport
    assert through
    excepted = client._transport_for_url(httpx.URL("http://in.example")) is client._transport
    assert excepted == ("in.example" in str(USERS[user]))


def test_a_proxy_that_flower_cannot_read_is_left_out(variables):
    """httpx raises ImportError for SOCKS, and ValueError for other schemes."""
    variables(without_proxy({"ALL_PROXY": "socks5://127.0.0.1:9", "http_proxy": "127.0.0.1:9"}))
    assert set(httpx.Client()._mounts) and "ALL_PROXY" not in os.environ


def test_grpc_reads_its_own_exceptions():
    given = {"grpc_proxy": PROXY, "no_grpc_proxy": "a.example", "no_proxy": "b.example"}
    environment = without_proxy(given, "127.0.0.2")
    assert environment["no_grpc_proxy"] == "127.0.0.1,::1,localhost,127.0.0.2,a.example"
    assert environment["no_proxy"] == "127.0.0.1,::1,localhost,127.0.0.2,b.example"


def test_flowers_processes_get_this_environment(variables, tmp_path):
    variables(DEAD_PROXY)
    expected = "127.0.0.1,::1,localhost,10.0.0.0/8"
    for environment in (flower.environment(tmp_path), flower.Flwr(tmp_path, "there").env):
        assert environment["no_proxy"] == environment["NO_PROXY"] == expected
        assert environment["http_proxy"] == DEAD_PROXY["http_proxy"]
