"""When a certificate expires, read off its bytes."""

import base64
from datetime import datetime, timezone

import pytest

from lb.validity import not_after


def der(tag: int, *parts: bytes) -> bytes:
    """A DER element; a long one has its length in several bytes."""
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def certificate(end: bytes, *, version: bytes = der(0xA0, der(2, b"\2")), pad: int = 0) -> str:
    """The fields up to the validity, and something behind it, as PEM."""
    signed = der(
        0x30,
        version,
        der(2, b"\x12\x34"),  # serial number
        der(0x30, der(6, b"\x2a\x86")),  # algorithm
        der(0x30, bytes(pad)),  # issuer
        der(0x30, der(0x17, b"200101000000Z"), end),
        der(0x30, b"subject"),
    )
    body = base64.encodebytes(der(0x30, signed, der(0x30))).decode()
    return f"-----BEGIN CERTIFICATE-----\n{body}-----END CERTIFICATE-----\n"


def unix(year: int) -> float:
    return datetime(year, 12, 31, 23, 59, 58, tzinfo=timezone.utc).timestamp()


@pytest.mark.parametrize(
    ("end", "year"),
    [
        (der(0x17, b"491231235958Z"), 2049),
        (der(0x17, b"991231235958Z"), 1999),
        (der(0x18, b"20501231235958Z"), 2050),
    ],
)
@pytest.mark.parametrize("version", [b"", der(0xA0, der(2, b"\2"))])
@pytest.mark.parametrize("pad", [0, 200, 70_000])
def test_the_end_is_found(end: bytes, year: int, version: bytes, pad: int) -> None:
    assert not_after(certificate(end, version=version, pad=pad)) == unix(year)


def test_the_first_certificate_of_a_chain_counts() -> None:
    leaf = certificate(der(0x17, b"301231235958Z"))
    ca = certificate(der(0x17, b"401231235958Z"))
    key = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
    assert not_after(key + "some text\n" + leaf + ca) == unix(2030)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nno base64!\n-----END CERTIFICATE-----\n",
        certificate(der(0x17, b"tomorrow")),
        certificate(der(0x18, b"\xff\xff")),
    ],
)
def test_what_is_no_certificate(text: str) -> None:
    with pytest.raises(ValueError):
        not_after(text)
