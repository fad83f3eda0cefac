"""HTTP server of the viewer: local connections only unless a token is set, only a run's own
files, only our scripts."""

from __future__ import annotations

import hmac
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from turnwright.display.text import single_line
from turnwright.errors import UsageError
from turnwright.records.run_dir import to_json
from turnwright_view.web import pages
from turnwright_view.web.index import PAGE, TableFilter, TrajectoryIndex

HOSTS = ("127.0.0.1", "localhost")
MIN_TOKEN = 16  # minimum characters of a token; shorter ones could be guessed
COOKIE = "turnwright_view"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MEDIA = re.compile(r"/media/(\d{1,2})/([0-9a-f]{64})\.png")
_Answer = tuple[HTTPStatus, str, bytes]


class ViewerServer:
    """Serves one run, or two for comparison.

    On loopback without a token, requests must name this server as their host, which
    blocks DNS rebinding. With a token, every request must carry it in a cookie, which
    the address `/?token=...` sets.
    """

    def __init__(
        self, runs: Sequence[Path], port: int = 0, *, host: str = HOSTS[0], token: str = ""
    ) -> None:
        """Listen, by default on a free port; another `host` than loopback needs a token of at least
        `MIN_TOKEN` characters."""
        if host not in HOSTS and not token:
            raise UsageError(
                f"--host {host} allows other machines, so the viewer needs a token: set "
                f"TURNWRIGHT_VIEW_TOKEN to at least {MIN_TOKEN} characters, or leave --host out "
                "and forward a port (docs/viewer.md)"
            )
        if token and (len(token) < MIN_TOKEN or quote(token, safe="") != token):
            needs = f"at least {MIN_TOKEN} characters, all of them letters, digits or _.-~"
            raise UsageError(f"TURNWRIGHT_VIEW_TOKEN must have {needs}")
        self.stores = [TrajectoryIndex(path) for path in runs]
        try:
            self._http = _Http((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{host} port {port} is unavailable ({reason}); choose another with --host or "
                "--port"
            ) from error
        self._http.daemon_threads = True
        self._http.stores = self.stores  # type: ignore[attr-defined]
        self._http.token = token  # type: ignore[attr-defined]
        self.port = int(self._http.server_address[1])
        self.url = f"http://{host}:{self.port}/" + (f"?token={token}" if token else "")
        for store in self.stores:
            store.start()

    def run(self) -> None:
        """Serve until `close`."""
        self._http.serve_forever(poll_interval=0.2)

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(target=self.run, name="viewer", daemon=True).start()

    def close(self) -> None:
        """Stop serving and release port and files."""
        self._http.shutdown()
        self.release()

    def release(self) -> None:
        """Release port and files when nothing is being served."""
        self._http.server_close()
        for store in self.stores:
            store.close()


class _Http(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected browsers, and print any other error in one line."""
        error = sys.exception()
        if not isinstance(error, (ConnectionError, TimeoutError)):
            print(single_line(f"viewer: {type(error).__name__}: {error}", 400), file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server_version = "turnwright"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer a request, or return an error status with a short reason."""
        with ExitStack() as stack:
            for store in self.server.stores:  # type: ignore[attr-defined]
                stack.enter_context(store.paused())
            status, kind, body = self._answer()
        self.send_response(status)
        if status is HTTPStatus.SEE_OTHER:
            # Removes the token from the address, and so from the browser's history.
            self.send_header(
                "Set-Cookie", f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            )
            self.send_header("Location", "/")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses contain the user's searches."""

    def _answer(self) -> _Answer:
        try:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            if self._token and parts.path == "/" and _same(query.get("token", ""), self._token):
                return _error(HTTPStatus.SEE_OTHER, "")
            if not self._own():
                why = (
                    "open the address that turnwright view printed, with its token"
                    if self._token
                    else "wrong host"
                )
                return _error(HTTPStatus.FORBIDDEN, f"access denied: {why}")
            found = self._find(parts.path, query)
        except (KeyError, ValueError, IndexError):
            return _error(HTTPStatus.BAD_REQUEST, "invalid request")
        except OSError as error:
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"cannot be read: {error.strerror}")
        except (
            Exception
        ) as error:  # files of a run may hold anything; the browser still gets its answer
            why = single_line(f"cannot be displayed: {type(error).__name__}: {error}", 400)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, why)
        return found or _error(HTTPStatus.NOT_FOUND, "not found")

    @property
    def _token(self) -> str:
        return str(self.server.token)  # type: ignore[attr-defined]

    def _own(self) -> bool:
        if self._token:
            pairs = (
                pair.strip().partition("=")
                for pair in (self.headers.get("Cookie") or "").split(";")
            )
            return any(name == COOKIE and _same(value, self._token) for name, _, value in pairs)
        port = self.server.server_address[1]  # type: ignore[index]
        return (self.headers.get("Host") or "").lower() in {f"{host}:{port}" for host in HOSTS}

    def _find(self, path: str, query: dict[str, str]) -> _Answer | None:
        stores: list[TrajectoryIndex] = self.server.stores  # type: ignore[attr-defined]
        if path in pages.SERVED:
            kind, text = pages.SERVED[path]()
            return HTTPStatus.OK, kind, text.encode()
        if (media := _MEDIA.fullmatch(path)) is not None:
            file = stores[int(media[1])].path / "media" / f"{media[2]}.png"
            if file.is_symlink() or not file.is_file():
                return None
            return HTTPStatus.OK, "image/png", file.read_bytes()
        if path == "/api/runs":
            names = [pages.name_of(store) for store in stores]
            return _json({"runs": len(stores), "names": names, "glossary": pages.glossary()})
        if not query.get("run", "0").isdigit():
            raise ValueError(query["run"])
        store = stores[int(query.get("run", "0"))]
        if path == "/api/overview":
            return _json(pages.overview(store, int(query.get("since", "0"))))
        if path == "/api/facets":
            return _json({"name": pages.name_of(store), "facets": pages.facets(store)})
        if path == "/api/list":
            start, limit = (
                max(0, int(query.get("start", "0"))),
                max(1, min(int(query.get("most", PAGE)), 1000)),
            )
            newest, worst = (query.get(name) == "1" for name in ("newest", "worst"))
            found = store.find(filter_of(query), start, limit, newest, worst)
            found["rows"] = [pages.listed(row) for row in found["rows"]]
            return _json(
                found | {"count": len(store.entries), "read": store.read, "size": store.size}
            )
        if path == "/api/trajectory":
            entry = store.entry(int(query["at"]))
            return None if entry is None else _json(pages.trajectory(store, *entry))
        return None


def filter_of(query: dict[str, str]) -> TableFilter:
    """Return the filter in a query; a ValueError for bounds that are not numbers."""

    def bounds(name: str) -> tuple[float | None, float | None]:
        low, high = (query.get(f"{name}_{end}", "") for end in ("min", "max"))
        return float(low) if low else None, float(high) if high else None

    words = {
        name: query.get(name, "") for name in ("phase", "stop", "error", "tool", "task", "text")
    }
    return TableFilter(step=bounds("step"), reward=bounds("reward"), turns=bounds("turns"), **words)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _json(value: Any) -> _Answer:
    return HTTPStatus.OK, "application/json", to_json(pages.escape_json(value))


def _error(status: HTTPStatus, why: str) -> _Answer:
    return status, "text/plain; charset=utf-8", why.encode()
