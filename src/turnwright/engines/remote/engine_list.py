"""File that lists a fleet's servers, which join and leave while runs read it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnwright.errors import UsageError


class EngineList:
    """URLs of servers in a text file, one a line.

    Empty lines and lines that start with # are comments. A missing file is an empty list. Writers
    take turns, and readers see a complete file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def urls(self) -> tuple[str, ...]:
        """Return the URLs, each once; raise `UsageError` for a line that is none."""
        urls: dict[str, None] = {}  # a set in order
        for line in self._lines():
            if line and not line.startswith("#"):
                urls[line.rstrip("/")] = None
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise UsageError(
                    f"{self.path}: {url!r:.100} is no URL; write one per line, as in "
                    "http://host:8000"
                )
        return tuple(urls)

    def add(self, url: str) -> bool:
        """Add a server; return False when the list has it."""
        url = url.rstrip("/")
        with self._locked():
            if url in self.urls():
                return False
            self._write([*self._lines(), url])
        return True

    def remove(self, url: str) -> bool:
        """Remove a server; return False when the list lacks it."""
        url = url.rstrip("/")
        with self._locked():
            if url not in self.urls():
                return False
            self._write([line for line in self._lines() if line.rstrip("/") != url])
        return True

    def _lines(self) -> list[str]:
        try:
            return [line.strip() for line in self.path.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.path}: cannot be read as a list of servers: {error}") from None

    def _write(self, lines: list[str]) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(draft, self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_name(f".{self.path.name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be written ({error.strerror}); name another file"
            ) from None
