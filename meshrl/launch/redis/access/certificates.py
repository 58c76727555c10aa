"""Certificate of the mesh's Redis for other hosts, signed by the mesh's own authority.

The authority stays while it is valid, because joined hosts know it by its certificate. The server's
certificate is issued at each start, for the names under which it is reached then. Both outlast any
mesh: no process renews them while it runs.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshrl.common.base.files import documents
from meshrl.common.state.redis import embedded_server

VALIDITY = datetime.timedelta(days=3650)
# an authority that ends sooner is replaced at a start
RENEWAL_MARGIN = datetime.timedelta(days=365)
CLOCK_SKEW = datetime.timedelta(days=1)  # by which clocks of hosts may differ

CA_FILE, CA_KEY_FILE = embedded_server.CA_FILE_NAME, "authority-key.pem"  # in the mesh's directory
CA_COMMON_NAME = "meshrl authority"
CERTIFICATE_FILE, KEY_FILE = "redis.pem", "redis-key.pem"


def issue_certificate(directory: Path, names: Sequence[str], now: datetime.datetime) -> None:
    """Write a new certificate for these host names and IP addresses into the mesh's directory.

    Also creates an authority where none is valid for long enough. The files are for this user
    alone.
    """
    authority, authority_key = _load_or_create_ca(directory, now)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _make_builder(names[0], now)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(
            x509.SubjectAlternativeName([_to_general_name(name) for name in names]), False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False
        )
    )
    signed = builder.sign(authority_key, hashes.SHA256())
    documents.write_bytes(directory / KEY_FILE, _encode_private_key(key))
    documents.write_bytes(directory / CERTIFICATE_FILE, signed.public_bytes(Encoding.PEM))


def _load_or_create_ca(
    directory: Path, now: datetime.datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate, key = directory / CA_FILE, directory / CA_KEY_FILE
    if certificate.is_file() and key.is_file():
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = load_pem_private_key(key.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        if (
            now + RENEWAL_MARGIN < found.not_valid_after_utc
            and found.public_key() == private.public_key()
        ):
            return found, private
    private = ec.generate_private_key(ec.SECP256R1())
    ca_certificate = (
        _make_builder(CA_COMMON_NAME, now)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CA_COMMON_NAME)]))
        .public_key(private.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .add_extension(_CA_KEY_USAGE, True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), False)
        .sign(private, hashes.SHA256())
    )
    documents.write_bytes(key, _encode_private_key(private))
    documents.write_bytes(certificate, ca_certificate.public_bytes(Encoding.PEM))
    return ca_certificate, private


_CA_KEY_USAGE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _make_builder(common_name: str, now: datetime.datetime) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _to_general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
