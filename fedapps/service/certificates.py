"""Keys and certificates of a small federation, by the `cryptography` library."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 825  # that a certificate is valid: the most that common TLS clients accept
PEM = serialization.Encoding.PEM
OPENSSH = serialization.Encoding.OpenSSH


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def make_node_key(path: Path) -> None:
    """A SuperNode's key pair, `path` and `path`.pub, as ``ssh-keygen -t ecdsa -b 384`` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = serialization.PrivateFormat.OpenSSH
    write_secret(path, key.private_bytes(PEM, private, serialization.NoEncryption()))
    public = key.public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


def make_certificates(folder: Path, host: str) -> None:
    """``ca.crt``, ``ca.key``, and ``server.pem``, ``server.key`` for `host`, a name or address."""
    authority, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer, subject = _name("fedapps authority"), _name(host)
    root = _certificate(issuer, issuer, authority.public_key(), authority.public_key(), ca=True)
    server = _certificate(subject, issuer, key.public_key(), authority.public_key(), ca=False)
    server = server.add_extension(x509.SubjectAlternativeName([_place(host)]), critical=False)
    server = server.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, builder, secret in (("ca.crt", root, authority), ("server.pem", server, key)):
        signed = builder.sign(authority, hashes.SHA384())
        (folder / name).write_bytes(signed.public_bytes(PEM))
        file = folder / name.replace(".crt", ".key").replace(".pem", ".key")
        private = serialization.PrivateFormat.PKCS8
        write_secret(file, secret.private_bytes(PEM, private, serialization.NoEncryption()))


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    *,
    ca: bool,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not ca, content_commitment=False, key_encipherment=False,
                data_encipherment=False, key_agreement=not ca, key_cert_sign=ca, crl_sign=ca,
                encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
    )  # fmt: skip


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _place(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
