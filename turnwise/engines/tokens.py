"""Tokens of servers on this machine: kept where their user alone reads them, so that this user's clients can send them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from turnwise.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def path_of(port: int) -> Path:
    """The file that holds the token of the server on a port."""
    return Path.home() / ".cache" / "turnwise" / "serve" / str(port)


def publish(port: int, token: str) -> None:
    """Write a server's token to its file, which nobody but this user can read.

    Raises:
        ConfigError: when it cannot be written.
    """
    path = path_of(port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{port}-{os.getpid()}")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the server's token cannot be written there ({error.strerror}); set TURNWISE_SERVE_TOKEN, which callers "
            "then have to send"
        ) from error


def withdraw(port: int, token: str) -> None:
    """Delete the file of a server that ends, unless another one's token stands in it by now."""
    with suppress(OSError):
        if path_of(port).read_text() == token:
            path_of(port).unlink()


def found(url: str) -> str:
    """The token of the server at a URL on this machine; empty where there is none that this user wrote."""
    parts = urlsplit(url)
    if parts.hostname not in LOOPBACK or parts.port is None:
        return ""
    try:
        with path_of(parts.port).open() as file:
            facts = os.fstat(file.fileno())
            return file.read(1000).strip() if facts.st_uid == os.getuid() and not facts.st_mode & 0o077 else ""
    except (OSError, ValueError):
        return ""
