"""TLS on both sides: the data port's certificate, which may be changed while we run, and trust in replicas."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from lb.errors import EXIT_BAD_CONFIGURATION, StartError
from lb.logs import Log
from lb.settings import Settings
from lb.validity import not_after

ALPN = ["http/1.1"]


class ServerCertificate:
    """The certificate of the data port.

    `context` serves new connections with whatever was loaded last; `not_after` is the Unix time at
    which that expires.
    """

    def __init__(self, keyfile: str, certfile: str, log: Log) -> None:
        """Raises OSError (which ssl.SSLError is) or ValueError for a pair that cannot be used."""
        self._keyfile = keyfile
        self._certfile = certfile
        self._log = log
        self._stamp = self._read_stamp()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(ALPN)
        self._load(self.context)

    def reload(self) -> None:
        """Load the files again; a bad pair changes nothing, and is told."""
        self._stamp = self._read_stamp()
        try:
            # A throw-away context first: a failed load leaves a half-changed one.
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
            self._load(self.context)
        except (OSError, ValueError) as error:
            self._log.error("tls.reload_failed", cause=describe(error), certfile=self._certfile)
        else:
            self._log.info("tls.reloaded", certfile=self._certfile)

    def reload_if_changed(self) -> None:
        """Load the files again if either is not what it was."""
        if self._read_stamp() != self._stamp:
            self.reload()

    def _load(self, context: ssl.SSLContext) -> None:
        # Without a password OpenSSL would ask for one on the terminal, and wait.
        context.load_cert_chain(self._certfile, self._keyfile, password="")
        self.not_after = not_after(Path(self._certfile).read_text("ascii", "replace"))

    def _read_stamp(self) -> tuple[object, ...]:
        return tuple(stamp_of(path) for path in (self._certfile, self._keyfile))


def stamp_of(path: str) -> object:
    """What changes with the file; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a symbolic link is followed, as Kubernetes swaps those
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def describe(error: Exception) -> str:
    """Why key and certificate cannot be used, in one line."""
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "no PEM, or the key is encrypted"
        return f"key and certificate do not make a usable pair ({reason})"
    if isinstance(error, ValueError):
        return "it holds no certificate that can be read"
    return getattr(error, "strerror", None) or type(error).__name__


def describe_ca(error: OSError) -> str:
    """Why the certificates to trust cannot be used, in one line."""
    return "no certificate in it" if isinstance(error, ssl.SSLError) else describe(error)


def replica_context(*, ca: str | None, insecure: bool) -> ssl.SSLContext:
    """How `https://` replicas are trusted. Raises OSError for a bad `ca` file."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(ALPN)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def load_tls(settings: Settings, log: Log) -> tuple[ServerCertificate | None, ssl.SSLContext]:
    """The certificate for clients, if there is one, and how replicas are trusted. Raises StartError."""
    try:
        certificate = None
        if settings.tls_keyfile and settings.tls_certfile:
            certificate = ServerCertificate(settings.tls_keyfile, settings.tls_certfile, log)
    except (OSError, ValueError) as error:
        raise StartError(
            f"--tls-certfile {settings.tls_certfile}, --tls-keyfile {settings.tls_keyfile}: "
            f"{describe(error)}",
            EXIT_BAD_CONFIGURATION,
        ) from None
    try:
        context = replica_context(ca=settings.upstream_ca, insecure=settings.upstream_insecure)
    except OSError as error:
        raise StartError(
            f"--upstream-ca {settings.upstream_ca}: {describe_ca(error)}", EXIT_BAD_CONFIGURATION
        ) from None
    return certificate, context
