"""Certificates and keys of a federation: who the server is, and which devices may take part.

    keys/ca.pem  ca.key              the federation's own authority
    keys/server.pem  server.key      the server's certificate, signed by it
    keys/NAME/NAME.key  ca.pem       for the device NAME: its private key, and what to trust
    keys/NAME.pub                    its public key, which the server registers

A device needs its own folder and nothing else; `ca.key` and `server.key` stay on the server.
Certificates end on a day, keys do not: see `make`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CURVE = ec.SECP384R1()  # one of those that Flower takes
DAYS = 365  # that certificates last, unless asked for otherwise
MOST_DAYS = 36500
SOON = timedelta(days=30)  # before their end: time to renew them
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server itself reaches it by these

RENEW = "to renew: delete ca.* and server.* of the server's keys, then federate-keys again"

Key = ec.EllipticCurvePrivateKey


def make(
    folder: Path, addresses: Iterable[str], devices: Iterable[str], days: int | None = None
) -> list[Path]:
    """Make what is not there yet; the paths of what was made.

    Called again with more devices it makes keys for those; another address needs another folder.
    Where `ca.*` and `server.*` were deleted it makes new ones, which last so many days, and every
    device's folder gets the new `ca.pem`; the devices' keys stay.
    """
    addresses, devices = list(addresses), list(devices)
    if days is not None and not 1 <= days <= MOST_DAYS:
        raise ValueError(f"certificates last 1 to {MOST_DAYS} days, not {days}")
    for name in devices:
        if name != Path(name).name or name.startswith(".") or name in ("", "ca", "server"):
            raise ValueError(f"{name!r} cannot be the name of a device")
    names = [_general_name(address) for address in addresses]
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    if not (folder / "ca.pem").exists():
        made += make_server(folder, addresses, days or DAYS)
        made += [hand_out(folder, path.stem) for path in sorted(folder.glob("*.pub"))]
    elif days is not None:
        raise ValueError(f"the certificates in {folder} are there already, and {told(folder)}")
    elif missing := [a for a, n in zip(addresses, names, strict=True) if n not in known(folder)]:
        raise ValueError(
            f"the certificate in {folder} is not for {', '.join(missing)}: another --out for others"
        )
    for name in devices:
        if not (folder / f"{name}.pub").exists():
            made += make_device(folder, name)
    return made


def ends(path: Path) -> datetime:
    """When a certificate ends."""
    return _read(path).not_valid_after_utc


def told(folder: Path) -> str:
    """When the certificates of a server end, and that it is time to renew them where it is."""
    end = ends(folder / "server.pem")
    soon = datetime.now(timezone.utc) > end - SOON
    return f"end on {end:%Y-%m-%d}" + (f"; {RENEW}" if soon else "")


def check(path: Path) -> None:
    """Refuse a certificate that has ended: nobody would trust it."""
    end = ends(path)
    if datetime.now(timezone.utc) > end:
        raise ValueError(f"the certificate {path} ended on {end:%Y-%m-%d}; {RENEW}")


def known(folder: Path) -> list[x509.GeneralName]:
    """The addresses that the server's certificate is for."""
    found = _read(folder / "server.pem")
    return list(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is no certificate") from None


def make_server(folder: Path, addresses: list[str], days: int) -> list[Path]:
    """An authority of our own, and a certificate of it for a server at these addresses."""
    if not addresses:
        raise ValueError("at which address do devices reach the server? --address")
    authority, own = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    name = _name("gradfilter federation")
    root = _certificate(name, name, authority, authority, days, authority=True)
    names = x509.SubjectAlternativeName(
        [_general_name(a) for a in dict.fromkeys([*addresses, *ALWAYS])]
    )
    leaf = _certificate(_name(addresses[0]), name, own, authority, days, names=names)
    return [
        _secret(folder / "ca.key", authority),
        _public(folder / "ca.pem", root.public_bytes(serialization.Encoding.PEM)),
        _secret(folder / "server.key", own),
        _public(folder / "server.pem", leaf.public_bytes(serialization.Encoding.PEM)),
    ]


def make_device(folder: Path, name: str) -> list[Path]:
    """A key pair for a device, in the form in which Flower reads it."""
    key = ec.generate_private_key(CURVE)
    place = folder / name
    place.mkdir(exist_ok=True)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    secret = serialization.PrivateFormat.OpenSSH
    return [
        _secret(place / f"{name}.key", key, secret),
        hand_out(folder, name),
        _public(folder / f"{name}.pub", public + b"\n"),
    ]


def hand_out(folder: Path, name: str) -> Path:
    """What a device is to trust, in its folder, which may have been moved to the device."""
    (folder / name).mkdir(exist_ok=True)
    return _public(folder / name / "ca.pem", (folder / "ca.pem").read_bytes())


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: Key,
    signer: Key,
    days: int,
    *,
    authority: bool = False,
    names: x509.SubjectAlternativeName | None = None,
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of small devices are not exact
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(_usage(authority), critical=True)
    )
    if names:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _usage(authority: bool) -> x509.KeyUsage:
    """An authority signs certificates, a server proves who it is."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
              "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        **dict.fromkeys(others, False),
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        if not re.fullmatch(r"[\w*.-]+", address):
            raise ValueError(f"{address!r} is no address: a host name or an IP address") from None
        return x509.DNSName(address)


def _secret(path: Path, key: Key, form=serialization.PrivateFormat.PKCS8) -> Path:
    """A private key that only its owner can read."""
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
    return path


def _public(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
