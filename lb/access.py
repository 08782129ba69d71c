"""Who may change something through the admin port: its token, and what keeps web pages out."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lb.certificates import describe, stamp_of
from lb.logs import Log

LONGEST_TOKEN = 4096
_TOKEN = re.compile(rb"[!-~]+")  # what a header's value can hold in one word


class Token:
    """The token of `--admin-token-file`; never logged, never shown."""

    def __init__(self, path: str, log: Log) -> None:
        """Raises OSError for a file that cannot be read, ValueError for one that holds no token."""
        self._path = path
        self._log = log
        self._stamp = stamp_of(path)
        self._token = self._read()

    def fits(self, authorization: str) -> bool:
        """Does the header bring the token? How long it takes tells none of the token's characters."""
        scheme, _, given = authorization.partition(" ")
        token = given.strip().encode("utf-8", "surrogateescape")
        return hmac.compare_digest(token, self._token) and scheme.lower() == "bearer"

    def reload(self) -> None:
        """Read the file again; a bad one changes nothing, and is told."""
        self._stamp = stamp_of(self._path)
        try:
            self._token = self._read()
        except (OSError, ValueError) as error:
            self._log.error("admin.token_reload_failed", cause=why(error), file=self._path)
        else:
            self._log.info("admin.token_reloaded", file=self._path)

    def reload_if_changed(self) -> None:
        """Read the file again if it is not what it was."""
        if stamp_of(self._path) != self._stamp:
            self.reload()

    def _read(self) -> bytes:
        with Path(self._path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(LONGEST_TOKEN + 1).strip()
        if not token:
            raise ValueError("it is empty")
        if len(token) > LONGEST_TOKEN or not _TOKEN.fullmatch(token):
            raise ValueError(
                f"it holds no token: one word of at most {LONGEST_TOKEN} ASCII characters"
            )
        # Kubernetes mounts secrets this way, in a container of their own: not a fault.
        if mode & stat.S_IROTH:
            self._log.warning("admin.token_exposed", file=self._path, mode=f"{mode:04o}")
        return token


def why(error: OSError | ValueError) -> str:
    """Why the file of the token cannot be used, in one line."""
    return str(error) if isinstance(error, ValueError) else describe(error)


@dataclass(frozen=True)
class Refusal:
    """What a request that may change nothing is told."""

    status: int
    text: str


def refusal(
    *,
    token: Token | None,
    loopback: bool,
    hosts: Sequence[str],
    authorization: str | None,
    from_browser: bool,
) -> Refusal | None:
    """Why this request may change nothing, or None: it may.

    `loopback`: whether the admin port listens on loopback addresses alone; `hosts`: the values of
    the Host header; `from_browser`: whether it has a header that only browsers send.
    """
    if from_browser:
        # There is no form here: only a page of somebody else would ask.
        return Refusal(403, "a web page may not do this")
    if token is not None:
        if authorization is None or not token.fits(authorization):
            return Refusal(
                401, "the token of --admin-token-file is needed: Authorization: Bearer TOKEN"
            )
        return None
    if not loopback:
        return Refusal(
            403,
            "the admin port is not on a loopback address alone, so this needs a token: "
            "see --admin-token-file; SIGTERM drains too",
        )
    if not all(map(_is_own_host, hosts)):
        # A name that anybody can let point here (DNS rebinding) is how pages elsewhere reach us.
        return Refusal(403, "the Host header must be an IP address or localhost")
    return None


def is_loopback(address: str) -> bool:
    """Is the address that a socket is bound to reached from this machine alone?"""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_own_host(host: str) -> bool:
    """Is it an address or localhost, with a port or without?"""
    name = re.sub(r":[0-9]*$", "", host).lower()
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True
