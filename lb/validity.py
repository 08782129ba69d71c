"""When a certificate expires.

Python's ssl module tells that of a peer's certificate only, not of one's own, and nothing else
of it is needed here: so these are the few steps to the one field (RFC 5280, section 4.1).
"""

from __future__ import annotations

import re
from base64 import b64decode
from datetime import datetime, timezone

_PEM = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]+)-----END")

_VERSION, _UTC_TIME = 0xA0, 0x17


def not_after(pem: str) -> float:
    """The Unix time at which the first certificate of a PEM file expires.

    Raises ValueError for what is no certificate.
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("no certificate")
    try:
        return _time(*_validity_end(b64decode(found[1])))
    except IndexError:
        raise ValueError("no certificate") from None


def _validity_end(der: bytes) -> tuple[int, bytes]:
    _, certificate, _ = _element(der)
    _, signed, _ = _element(certificate)
    tag, _, rest = _element(signed)
    if tag == _VERSION:
        _, _, rest = _element(rest)  # the serial number
    _, _, rest = _element(rest)  # the algorithm
    _, _, rest = _element(rest)  # the issuer
    _, validity, _ = _element(rest)
    _, _, rest = _element(validity)  # not before
    tag, value, _ = _element(rest)
    return tag, value


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first DER element, and what follows it."""
    size, start = data[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(data[2:start], "big")
    return data[0], data[start : start + size], data[start + size :]


def _time(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 50 to 99 are of the last century
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
