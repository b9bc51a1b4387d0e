"""Nodes that make their keys themselves: the request, its signing, and what is refused."""

import shlex
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from small_runs import fedapps

from fedapps.service.certificates import read_request


@pytest.fixture
def federation(tmp_path):
    fedapps("deploy", tmp_path / "fed", "--nodes", "2", "--tls", "--own-keys")
    return tmp_path / "fed"


def private_keys(folder):
    """The files that hold a private key of a node."""
    return [f for f in folder.rglob("*") if f.is_file() and b"OPENSSH PRIVATE" in f.read_bytes()]


def test_a_nodes_private_key_stays_on_its_machine(federation, tmp_path):
    """The operator's folder gets the public key; the node's script names the private one where the
    node made it."""
    node = tmp_path / "a node"
    said = fedapps("deploy", node, "--request", "node-1")
    assert f"send {node}/node-1.csr to the operator" in said
    key = node / "keys" / "node-1"
    assert private_keys(node) == [key]
    assert key.stat().st_mode & 0o777 == 0o600

    said = fedapps("deploy", federation, "--sign", node / "node-1.csr")
    bundle = federation / "signed" / "node-1"
    assert str(bundle) in said
    assert private_keys(federation) == []
    public = federation / "keys" / "node-1.pub"
    assert public.read_bytes() == key.with_suffix(".pub").read_bytes()
    assert not (federation / "keys" / "node-0.pub").exists()
    assert (bundle / "ca.crt").read_bytes() == (federation / "tls" / "ca.crt").read_bytes()

    for file in bundle.iterdir():
        file.rename(node / file.name)
    # In the place of Flower's command: it prints its arguments.
    commands = tmp_path / "bin"
    commands.mkdir()
    printer = commands / "flower-supernode"
    printer.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    printer.chmod(0o700)
    started = subprocess.run(
        [node / "start-node-1.sh", "/my data"], capture_output=True, text=True, check=True,
        env={"PATH": f"{commands}:/usr/bin:/bin"},
    )  # fmt: skip
    words = started.stdout.splitlines()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--auth-supernode-private-key"] == str(key)
    assert options["--root-certificates"] == str(node / "ca.crt")
    assert shlex.split(options["--node-config"]) == [
        "partition-id=1", "num-partitions=2", f"state-dir={node}/state", "data-path=/my data",
    ]  # fmt: skip


def test_a_request_is_signed_again_and_another_key_is_refused(federation, tmp_path):
    fedapps("deploy", tmp_path / "one", "--request", "node-0")
    fedapps("deploy", tmp_path / "two", "--request", "node-0")
    for _ in range(2):
        fedapps("deploy", federation, "--sign", tmp_path / "one" / "node-0.csr")
    said = fedapps("deploy", federation, "--sign", tmp_path / "two" / "node-0.csr", code=2)
    assert "node-0 has another key" in said
    said = fedapps("deploy", tmp_path / "one", "--request", "node-0", code=2)
    assert "exists; send its request again" in said


def test_a_stranger_to_the_private_key_is_refused(tmp_path):
    """A request that holds another's public key: its signature does not match."""
    fedapps("deploy", tmp_path, "--request", "node-0")
    own = x509.load_pem_x509_csr((tmp_path / "node-0.csr").read_bytes())
    other = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node-0")])
    false = x509.CertificateSigningRequestBuilder(name).sign(other, hashes.SHA384())

    def encoded(key):
        return key.public_bytes(pem.Encoding.DER, pem.PublicFormat.SubjectPublicKeyInfo)

    content = false.public_bytes(pem.Encoding.DER)
    mixed = content.replace(encoded(other.public_key()), encoded(own.public_key()))
    assert mixed != content
    file = tmp_path / "false.csr"
    file.write_bytes(x509.load_der_x509_csr(mixed).public_bytes(pem.Encoding.PEM))
    with pytest.raises(ValueError, match="not signed with the private key"):
        read_request(file)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--request", "../node-0"], "it must be a node's name"),
        (["--request", "node-0", "--start"], "goes with no other option"),
        (["--own-keys"], "belong to a new deployment"),
        (["--nodes", "2", "--own-keys"], "--own-keys needs --tls"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, words, reason):
    assert reason in fedapps("deploy", tmp_path / "new", *words, code=2)
    assert not (tmp_path / "new").exists()


def test_other_files_nodes_and_deployments_are_refused(federation, tmp_path):
    fedapps("deploy", tmp_path / "node", "--request", "node-7")
    request = tmp_path / "node" / "node-7.csr"
    said = fedapps("deploy", federation, "--sign", request, code=2)
    assert "is of 'node-7'; known: node-0, node-1" in said
    said = fedapps("deploy", federation, "--sign", federation / "README.md", code=2)
    assert "is no request of" in said
    fedapps("deploy", tmp_path / "central", "--nodes", "8", "--tls")
    said = fedapps("deploy", tmp_path / "central", "--sign", request, code=2)
    assert "has keys for its nodes" in said
    said = fedapps("deploy", federation, "--start", "--only", "node-0", code=2)
    assert "starts on the machine that has its key" in said
