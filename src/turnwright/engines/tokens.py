"""Tokens of local servers: stored where only their user can read them, for that user's clients.

Here a token is the secret that a server asks of its clients, not an id of a text.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from turnwright.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def path_of(port: int) -> Path:
    """Return the file that holds the token of the server on a port."""
    return Path.home() / ".cache" / "turnwright" / "serve" / str(port)


def publish(port: int, token: str) -> None:
    """Write a server's token to a file that only this user can read.

    Raises `ConfigError` when it cannot be written.
    """
    path = path_of(port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The file is made with its final mode and then renamed: nobody can open it in between.
        draft = path.with_name(f".{port}-{os.getpid()}")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: could not write the server's token ({error.strerror}); set "
            "TURNWRIGHT_SERVE_TOKEN, which clients must send"
        ) from error


def withdraw(port: int, token: str) -> None:
    """Delete the token file of an ending server, unless it holds another server's token by now."""
    path = path_of(port)
    with suppress(OSError):
        if path.read_text() == token:
            path.unlink()


def lookup(url: str) -> str:
    """Return the token of a server at a local URL; empty when this user wrote none."""
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK or parts.port is None:
        return ""
    try:
        with path_of(parts.port).open() as file:
            status = os.fstat(file.fileno())
            others_have_access = status.st_mode & 0o077
            if status.st_uid != os.getuid() or others_have_access:
                return ""
            return file.read(1000).strip()
    except (OSError, ValueError):
        return ""
