"""Keys and certificates of a small federation, by the `cryptography` library."""

import ipaddress
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedapps.common.new_files import create, make_folder

AUTHORITY = "fedapps authority"
SERVER = "fedapps superlink"  # subject of a certificate for a name that a subject cannot hold
MAX_SUBJECT = 64  # characters of a common name; https://www.rfc-editor.org/rfc/rfc5280#appendix-A.1
REQUEST = ".csr"  # ending of a request
MAX_REQUEST = 1 << 16  # bytes; one has about 500
NODE_NAME = r"node-\d{1,6}"
DAYS = 825  # validity of a certificate: the longest that common TLS clients accept


def make_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A SuperNode's key pair, `path` and `path`.pub, as ``ssh-keygen -t ecdsa -b 384`` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_key(path, key, pem.PrivateFormat.OpenSSH)
    with create(path.with_suffix(".pub")) as file:
        file.write(_public_line(key.public_key()))
    return key


def _public_line(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(pem.Encoding.OpenSSH, pem.PublicFormat.OpenSSH) + b"\n"


def make_request(folder: Path, node: str) -> Path:
    """Make the node's key pair below `folder`, and the request that an operator signs (PKCS #10,
    RFC 2986): the node's name and public key, signed with its private key. Returns its path.

    Raises ValueError if the node has a key, or for a name that is none."""
    if not re.fullmatch(NODE_NAME, node):
        raise ValueError(f"--request is {node!r}; it must be a node's name, such as node-0")
    key_file = folder / "keys" / node
    if key_file.exists() or key_file.is_symlink():
        raise ValueError(f"{key_file} exists; send its request again, or remove it for a new key")
    key = make_node_key(key_file)
    builder = x509.CertificateSigningRequestBuilder(_common_name(node))
    request = folder / f"{node}{REQUEST}"
    with create(request) as file:
        file.write(builder.sign(key, hashes.SHA384()).public_bytes(pem.Encoding.PEM))
    return request


def read_request(file: Path) -> tuple[str, bytes]:
    """The node's name in a request, and its public key as a line of OpenSSH. Raises ValueError for
    a file that is none, and unless its sender holds the private key."""
    with file.open("rb") as opened:
        content = opened.read(MAX_REQUEST)
    try:
        request = x509.load_pem_x509_csr(content)
        key = request.public_key()
        signed = request.is_signature_valid
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{file} is no request of `fedapps deploy --request`: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError(f"{file} has another kind of key than `fedapps deploy --request` makes")
    if not signed:
        raise ValueError(f"{file} is not signed with the private key of its public key")
    if len(names) != 1:
        raise ValueError(f"{file} names {len(names)} nodes; it must be one")
    return str(names[0].value), _public_line(key)


def make_certificates(folder: Path, host: str) -> None:
    """``ca.crt``, ``ca.key``, and ``server.pem``, ``server.key`` for `host`, an address or a name
    in ASCII."""
    ca_key = ec.generate_private_key(ec.SECP384R1())
    key = ec.generate_private_key(ec.SECP384R1())
    # TLS clients compare an address and a name with different kinds of entries.
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    names = x509.SubjectAlternativeName([alternative])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    root = certificate(AUTHORITY, ca_key, ca_key)
    subject = host if len(host) <= MAX_SUBJECT else SERVER  # clients read the names alone
    server = certificate(subject, key, ca_key, names, usage)
    for file, cert, private in (("ca.crt", root, ca_key), ("server.pem", server, key)):
        write_key((folder / file).with_suffix(".key"), private, pem.PrivateFormat.PKCS8)
        with create(folder / file) as target:
            target.write(cert.public_bytes(pem.Encoding.PEM))


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
    is_authority = key is ca_key
    public = key.public_key()
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        _common_name(AUTHORITY), _common_name(subject), public, x509.random_serial_number()
    )
    # Other machines' clocks may be behind this one's.
    builder = builder.not_valid_before(now - timedelta(hours=1))
    builder = builder.not_valid_after(now + timedelta(days=DAYS))
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(is_authority, path_length=None)
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(usage, critical=True)
    subject_id = x509.SubjectKeyIdentifier.from_public_key(public)
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    for extension in (subject_id, authority_id, *extensions):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(ca_key, hashes.SHA384())


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def write_key(path: Path, key: ec.EllipticCurvePrivateKey, form: pem.PrivateFormat) -> None:
    """Write a private key to a new file that only its owner may ever read."""
    make_folder(path.parent)
    # Created with its rights: between `open` and a later `chmod` others could read it.
    with create(path, 0o600) as file:
        file.write(key.private_bytes(pem.Encoding.PEM, form, pem.NoEncryption()))
