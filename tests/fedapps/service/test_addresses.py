"""The SuperLink of a deployment at other addresses than 127.0.0.1, and one that does not start."""

import json
import shlex
import socket
import tomllib

import pytest
from cryptography import x509
from small_runs import DEAD_PROXY, invoke

from fedapps.common.addresses import connection_error, read_host, with_port
from fedapps.service.deploy import SUPERLINK, Deployment, plan

LONG = ".".join(["node" * 5] * 4)  # 83 characters


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.2", "127.0.0.2"),
        ("[::1]", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("Node.Example.", "node.example"),
        ("my_node", "my_node"),
        ("Bücher.example", "xn--bcher-kva.example"),
        (LONG, LONG),
    ],
)
def test_a_host_is_an_address_or_a_name_in_ascii(text, host):
    assert read_host(text) == host


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.0.0.0", "no address that nodes can connect to"),
        ("::", "no address that nodes can connect to"),
        ("fe80::1%eth0", "no address that nodes can connect to"),
        ("node:9092", "without a port"),
        ("http://node", "neither an address nor a name"),
        ("", "neither an address nor a name"),
        ("a" * 64, "neither an address nor a name"),
        ("straße.example", "several forms"),
    ],
)
def test_another_host_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        read_host(text)


@pytest.mark.parametrize("host", ["::1", "xn--bcher-kva.example", LONG])
def test_what_is_written_holds_the_address(host, tmp_path):
    """Scripts, Flower's configuration and the certificate; a subject holds 64 characters."""
    deployment = plan(tmp_path, 1, tls=True, host=host, data=None)
    deployment.write()
    address = f"[::1]:{deployment.port}" if host == "::1" else f"{host}:{deployment.port}"
    config = tomllib.loads((tmp_path / "home" / "config.toml").read_text())
    assert config["superlink"]["deployment"]["address"] == address
    node = shlex.split((tmp_path / "start-node-0.sh").read_text())
    assert node[node.index("--superlink") + 1] == address
    superlink = shlex.split((tmp_path / "start-superlink.sh").read_text())
    assert superlink[superlink.index("--host") + 1] == host
    assert f"no_proxy=127.0.0.1,::1,localhost,{host},${{no_proxy-$NO_PROXY}}" in superlink
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if host == "::1":
        assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["::1"]
    else:
        assert names.get_values_for_type(x509.DNSName) == [host]
    (subject,) = certificate.subject
    assert subject.value == ("fedapps superlink" if host == LONG else host)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_the_configured_address_is_probed(host):
    """A port of 127.0.0.2 that listens is closed at 127.0.0.1."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server:
        port = server.getsockname()[1]
        assert connection_error(host, port) == ""
    assert f"{with_port(host, port)}: [Errno" in connection_error(host, port)


def test_a_deployment_starts_at_another_address_behind_a_proxy(tmp_path, monkeypatch):
    """Nothing listens at the proxy. A second SuperLink on the port is told so, and ended."""
    for name, value in DEAD_PROXY.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "d"
    try:
        said = invoke("deploy", folder, "--nodes", 1, "--host", "127.0.0.2", "--start",
                      "--only", SUPERLINK).output  # fmt: skip
        assert f"{SUPERLINK}: alive" in said
        first = Deployment.read(folder)
        second = plan(tmp_path / "e", 1, tls=False, host="127.0.0.2", data=None)
        second.write()
        file = second.folder / "deployment.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"port": first.port}))
        script = second.folder / "start-superlink.sh"
        script.write_text(script.read_text().replace(str(second.port), str(first.port)))
        (tmp_path / "e" / "log").mkdir()
        (tmp_path / "e" / "log" / "superlink.log").write_text("ValueError: of an earlier start\n")
        monkeypatch.setattr(Deployment, "_ask", never)
        said = invoke("deploy", second.folder, "--start", code=2).output
        assert (
            "the SuperLink did not start: [Errno 98]" in said and "address already in use" in said
        )
        assert not second.alive(SUPERLINK) and not second.alive("node-0")
    finally:
        invoke("deploy", folder, "--stop")


def never(deployment):
    """The first SuperLink would answer in place of the second one."""
    raise RuntimeError("no answer")


def test_more_nodes_than_fit_are_named_before_they_start(tmp_path, monkeypatch):
    """Forty nodes take 40 · 0.5 GB; the SuperLink is none of them."""
    deployment = plan(tmp_path, 40, tls=False, host="127.0.0.1", data=None)
    monkeypatch.setattr("fedapps.service.deploy.memory_left", lambda: 6_400_000_000)
    warning = deployment.memory_warning([SUPERLINK, *deployment.nodes])
    assert warning.startswith(
        "40 nodes that answer at once take about 20.0 GB, and 6.4 GB are left"
    )
    assert not deployment.memory_warning([SUPERLINK, *deployment.nodes[:12]])
