"""HTTP server of the viewer: local connections only unless a token is set, only runs' own files,
only our scripts."""

from __future__ import annotations

import gzip
import hmac
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from turnwright.display.text import single_line
from turnwright.errors import UsageError
from turnwright.records.run_dir import to_json
from turnwright_view.web import bundle
from turnwright_view.web.episode import episode_page
from turnwright_view.web.episode_rows import key_of_address
from turnwright_view.web.index import PAGE, RunIndex
from turnwright_view.web.media import image_file
from turnwright_view.web.overview import facets, glossary, look, overview
from turnwright_view.web.search import filter_of
from turnwright_view.web.sessions import Session
from turnwright_view.web.texts import escape_json

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
}
MAX_PAGE = 1000
"""Maximum rows of one list."""

MIN_COMPRESSED = 4096
"""Bytes from which answers are compressed, where the browser takes them so."""

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M3 4h10M8 4v9M8 8.5h4" '
    'stroke="#4a86e0" stroke-width="2" fill="none" stroke-linecap="round"/></svg>'
)
_HEAD = (
    '<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/vendor.css">'
    '<link rel="stylesheet" href="/app.css">'
)
_BODY = '<script src="/vendor.js"></script><script src="/app.js"></script>'
STATIC: dict[str, tuple[str, Callable[[], str]]] = {
    "/": ("text/html; charset=utf-8", lambda: bundle.page(_HEAD, _BODY)),
    "/app.js": ("text/javascript; charset=utf-8", bundle.script),
    "/vendor.js": ("text/javascript; charset=utf-8", bundle.vendor_script),
    "/app.css": ("text/css; charset=utf-8", bundle.style),
    "/vendor.css": ("text/css; charset=utf-8", bundle.vendor_style),
    "/icon.svg": ("image/svg+xml", lambda: ICON),
}
_MEDIA = re.compile(r"/media/([^/]+)/([0-9a-f]{64})\.png")
Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """An answer to a request."""

    status: HTTPStatus
    kind: str
    body: bytes
    tag: str = ""
    """What tells it from a later one; empty where a browser must not keep it."""


class ViewerServer:
    """Serves some runs, or those below a folder.

    On loopback without a token, requests must name this server as their host, which
    blocks DNS rebinding. With a token, every request must carry it in a cookie, which
    the address `/?token=...` sets.
    """

    def __init__(
        self, paths: Sequence[Path], port: int = 0, *, host: str = HOSTS[0], token: str = ""
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
        self.session = Session(paths)
        try:
            self._http = _Http((host, port), self.session, token)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{host} port {port} is unavailable ({reason}); choose another with --host or "
                "--port"
            ) from error
        self.port = int(self._http.server_address[1])
        self.url = f"http://{host}:{self.port}/" + (f"?token={token}" if token else "")

        # Of many runs, those are indexed that somebody opens.
        runs = self.session.runs()
        if len(runs) == 1:
            self.session.index(next(iter(runs)))

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

    def __enter__(self) -> ViewerServer:
        """Serve in a thread until the body ends."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def release(self) -> None:
        """Release port and files when nothing is being served."""
        self._http.server_close()
        self.session.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], session: Session, token: str) -> None:
        self.session = session
        self.token = token
        super().__init__(address, _Handler)

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
    # Head and body leave together, at once: else each answer waits 40 ms for the browser's receipt.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Http

    def do_GET(self) -> None:
        """Answer a request, or return an error status with a short reason."""
        with self.server.session.paused():
            answer = self._answer()
            is_known = bool(answer.tag) and self.headers.get("If-None-Match") == answer.tag
            body = b"" if is_known else answer.body
            encoding = ""
            if len(body) >= MIN_COMPRESSED and self._takes_gzip(answer.kind):
                body = gzip.compress(body, 1, mtime=0)
                encoding = "gzip"

        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else answer.status)
        if answer.status is HTTPStatus.SEE_OTHER:
            # Removes the token from the address, and so from the browser's history.
            self.send_header(
                "Set-Cookie", f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            )
            self.send_header("Location", "/")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        # What has a tag is asked for again each time, and only sent if it has changed.
        self.send_header("Cache-Control", "private, no-cache" if answer.tag else "no-store")
        if answer.tag:
            self.send_header("ETag", answer.tag)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        if not is_known:
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses contain the user's searches."""

    def _takes_gzip(self, kind: str) -> bool:
        return not kind.startswith("image/") and "gzip" in self.headers.get("Accept-Encoding", "")

    def _answer(self) -> PageAnswer:
        try:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            token = self.server.token
            if token and parts.path == "/" and _same(query.get("token", ""), token):
                return _error(HTTPStatus.SEE_OTHER, "")
            if not self._is_own():
                why = "wrong host"
                if token:
                    why = "open the address that turnwright view printed, with its token"
                return _error(HTTPStatus.FORBIDDEN, f"access denied: {why}")
            known = self.headers.get("If-None-Match") or ""
            return respond(self.server.session, parts.path, query, known)
        except (KeyError, ValueError, IndexError, OverflowError):  # also integers over 64 bits
            return _error(HTTPStatus.BAD_REQUEST, "invalid request")
        except OSError as error:
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"cannot be read: {error.strerror}")
        except Exception as error:  # a run may hold anything; the browser still gets its answer
            why = single_line(f"cannot be displayed: {type(error).__name__}: {error}", 400)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, why)

    def _is_own(self) -> bool:
        """Return whether the request comes from a page of this server."""
        if self.server.token:
            for pair in (self.headers.get("Cookie") or "").split(";"):
                name, _, value = pair.strip().partition("=")
                if name == COOKIE and _same(value, self.server.token):
                    return True
            return False
        port = self.server.server_address[1]
        return (self.headers.get("Host") or "").lower() in {f"{host}:{port}" for host in HOSTS}


def respond(session: Session, path: str, query: Query, known: str = "") -> PageAnswer:
    """Answer a request whose browser has the answer tagged `known`; raise `ValueError` or
    `KeyError` for an invalid one."""
    if path in STATIC:
        kind, text = STATIC[path]
        return _tagged(kind, text().encode())
    media = _MEDIA.fullmatch(path)
    if media is not None:
        return _image(session, unquote(media[1], errors="surrogatepass"), media[2])
    if path == "/api/session":
        return _json(
            {
                "folder": session.folder,
                "live": True,
                "glossary": glossary(),
                "runs": _run_rows(session),
            }
        )
    if path == "/api/runs":
        return _tagged("application/json", _body({"runs": _run_rows(session)}))

    if path not in RUN_PAGES:
        return _error(HTTPStatus.NOT_FOUND, "not found")
    index = session.index(query.get("run", ""))
    if index is None:
        return _error(HTTPStatus.NOT_FOUND, "no such run")
    return RUN_PAGES[path](session, index, query, known)


def _run_rows(session: Session) -> list[dict[str, Any]]:
    return [row.as_json() for row in session.rows()]


def _image(session: Session, run_id: str, name: str) -> PageAnswer:
    run = session.runs().get(run_id)
    file = None if run is None else image_file(run, name)
    if file is None:
        return _error(HTTPStatus.NOT_FOUND, "not found")
    return PageAnswer(HTTPStatus.OK, "image/png", file.read_bytes())


def _run(session: Session, index: RunIndex, query: Query, known: str) -> PageAnswer:
    """Return the page of a run; nothing of it is read where nothing changed since the last time."""
    row = session.row(query["run"])
    if row is None:
        return _error(HTTPStatus.NOT_FOUND, "no such run")
    since = max(0, int(query.get("since", "0")))
    tag = _tag(repr((look(index), row.state, row.id, since)).encode())
    if tag == known:
        return PageAnswer(HTTPStatus.OK, "application/json", b"", tag)
    page = overview(index, row.id, row.name, row.state, since)
    return PageAnswer(HTTPStatus.OK, "application/json", _body(page), tag)


def _facets(session: Session, index: RunIndex, query: Query, known: str) -> PageAnswer:
    return _json(facets(index))


def _episodes(session: Session, index: RunIndex, query: Query, known: str) -> PageAnswer:
    start = max(0, int(query.get("start", "0")))
    most = max(1, min(int(query.get("most", PAGE)), MAX_PAGE))
    found = index.find(filter_of(query), query.get("sort") or "notable", start, most)
    return _json(asdict(found) | {"indexed": index.progress()})


def _episode(session: Session, index: RunIndex, query: Query, known: str) -> PageAnswer:
    key = key_of_address(query["key"])
    columns = None if key is None else index.episode(key)
    progress = index.progress()
    if columns is None and progress["read"] < progress["size"]:
        share = f"{progress['read'] / progress['size']:.0%}"
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, f"episodes are being indexed: {share}")
    if columns is None:
        return _error(HTTPStatus.NOT_FOUND, "no such episode")
    return _json(episode_page(index, columns))


RUN_PAGES: dict[str, Callable[[Session, RunIndex, Query, str], PageAnswer]] = {
    "/api/run": _run,
    "/api/facets": _facets,
    "/api/episodes": _episodes,
    "/api/episode": _episode,
}
"""What can be asked of one run."""


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _body(value: Any) -> bytes:
    return to_json(escape_json(value))


def _json(value: Any) -> PageAnswer:
    return PageAnswer(HTTPStatus.OK, "application/json", _body(value))


def _tagged(kind: str, body: bytes) -> PageAnswer:
    return PageAnswer(HTTPStatus.OK, kind, body, _tag(body))


def _tag(content: bytes) -> str:
    return f'"{blake2b(content, digest_size=12).hexdigest()}"'


def _error(status: HTTPStatus, why: str) -> PageAnswer:
    return PageAnswer(status, "text/plain; charset=utf-8", why.encode())
