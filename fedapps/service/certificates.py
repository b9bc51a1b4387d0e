"""Keys and certificates of a small federation, by the `cryptography` library."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY = "fedapps authority"
DAYS = 825  # validity of a certificate: the longest that common TLS clients accept


def make_node_key(path: Path) -> None:
    """A SuperNode's key pair, `path` and `path`.pub, as ``ssh-keygen -t ecdsa -b 384`` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_key(path, key, pem.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(pem.Encoding.OpenSSH, pem.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


def make_certificates(folder: Path, host: str) -> None:
    """``ca.crt``, ``ca.key``, and ``server.pem``, ``server.key`` for `host`, a name or address."""
    ca_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    names, usage = x509.SubjectAlternativeName([alternative]), ExtendedKeyUsageOID.SERVER_AUTH
    root = certificate(AUTHORITY, ca_key, ca_key)
    server = certificate(host, key, ca_key, names, x509.ExtendedKeyUsage([usage]))
    for file, cert, private in (("ca.crt", root, ca_key), ("server.pem", server, key)):
        write_key((folder / file).with_suffix(".key"), private, pem.PrivateFormat.PKCS8)
        (folder / file).write_bytes(cert.public_bytes(pem.Encoding.PEM))


def check_valid(path: Path) -> None:
    """Raise RuntimeError if the certificate at `path` has expired, or is not valid yet."""
    cert = x509.load_pem_x509_certificate(path.read_bytes())
    start, end = cert.not_valid_before_utc, cert.not_valid_after_utc
    if not start <= datetime.now(UTC) <= end:
        raise RuntimeError(
            f"{path} is valid from {start:%Y-%m-%d} to {end:%Y-%m-%d}, so every node would refuse "
            "it; make a new deployment, or replace it"
        )


def certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    """A certificate of `key`, signed with `ca_key`; an authority's if they are the same."""
    ca, public, now = key is ca_key, key.public_key(), datetime.now(UTC)
    issuer, name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
                    for text in (AUTHORITY, subject))  # fmt: skip
    builder = x509.CertificateBuilder(issuer, name, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1))
    builder = builder.not_valid_after(now + timedelta(days=DAYS))
    usage = x509.KeyUsage(  # digital_signature, …, key_agreement, key_cert_sign, crl_sign, …
        not ca, False, False, False, not ca, ca, ca, False, False
    )
    for extension in (x509.BasicConstraints(ca, path_length=None), usage):
        builder = builder.add_extension(extension, critical=True)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    for other in (x509.SubjectKeyIdentifier.from_public_key(public), authority, *extensions):
        builder = builder.add_extension(other, critical=False)
    return builder.sign(ca_key, hashes.SHA384())


def write_key(path: Path, key: ec.EllipticCurvePrivateKey, form: pem.PrivateFormat) -> None:
    """Write a private key to a new file that only its owner may ever read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(pem.Encoding.PEM, form, pem.NoEncryption()))
