"""First program inside a program's sandbox: it writes the files, relays the proxy's port to its
socket, and runs the command.

It uses only the standard library. It has the rights of the command, so nothing outside relies on
what it does.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

# Importing typing takes a tenth of a program's start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

RELAY_ENDED = "the relay to the endpoint ended:"
"""Beginning of the line with the reason why a program ended with its relay."""
_CHUNK = 1 << 16
_LATER = (
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ENOSPC,
)
"""Errors of connecting that end when other connections do."""
_PAUSE_S = 0.05
"""Seconds without accepting connections after an error that others must end to mend."""
_OTHER_FILES = 16
"""Descriptors of this process that are no connections: standard streams, the listener, the
selector, those of starting."""


def main() -> None:
    """Run the command of `order.json` and end with its status."""
    with open("order.json") as file:
        order = json.load(file)

    for name in ("order.json", "main.py"):
        os.unlink(name)
    for folder in (order["work"], order["home"]):
        os.makedirs(folder)
    for name, content in order["files"].items():
        path = os.path.join(order["work"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))

    listener = socket.create_server(("127.0.0.1", order["port"]), backlog=128)
    threading.Thread(target=_relay_or_end, args=(listener, order["socket"]), daemon=True).start()

    try:
        process = subprocess.Popen(
            order["command"], cwd=order["work"], env=order["env"], stdin=subprocess.DEVNULL
        )
    except OSError as error:
        sys.exit(f"the program {order['command'][0]!r:.80} cannot be started: {error.strerror}")
    status = process.wait()
    sys.stdout.flush()
    os._exit(status if status >= 0 else 128 - status)


def _relay_or_end(listener: socket.socket, path: str) -> None:
    """Relay until the program ends.

    Without its endpoint the episode is no episode, so the program ends with the relay.
    """
    try:
        Relay(listener, path, _connections_allowed()).run()
    except BaseException as error:
        print(f"{RELAY_ENDED} {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        # A status that no program's own can be mistaken for.
        os.kill(os.getpid(), signal.SIGABRT)


def _connections_allowed() -> int:
    """Return how many connections fit in the limit on open files, at two for each beside this
    process's own."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, (files - _OTHER_FILES) // 2)


class Relay:
    """Passes bytes between connections of the program and the proxy's socket, in one thread.

    Above `most` connections further ones wait in the listener's queue until one of them ends.
    """

    def __init__(self, listener: socket.socket, path: str, most: int) -> None:
        self._listener = listener
        self._path = path
        self._most = most
        self._selector = selectors.DefaultSelector()
        self._connections = 0
        self._waiting: socket.socket | None = None
        """Accepted connection for which the proxy has no room yet."""
        self._next_at = 0.0
        """Time before which no connection is accepted, after an error."""
        listener.setblocking(False)

    def run(self) -> None:
        """Relay for good."""
        accepting = False
        while True:
            now = time.monotonic()
            if self._waiting is not None and now >= self._next_at:
                self._connect()

            has_room = self._waiting is None and self._connections < self._most
            wanted = has_room and now >= self._next_at
            if wanted and not accepting:
                self._selector.register(self._listener, selectors.EVENT_READ)
            elif accepting and not wanted:
                self._selector.unregister(self._listener)
            accepting = wanted

            pause = max(0.0, self._next_at - now)
            for key, _ in self._selector.select(pause or None):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    key.data.work()

    def _accept(self) -> None:
        try:
            self._waiting, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # No descriptor or no memory is left: there may be when other connections have ended.
            self._next_at = time.monotonic() + _PAUSE_S
            return
        self._connect()

    def _connect(self) -> None:
        """Connect what was accepted to the proxy, now or later.

        Where the proxy is gone, the episode is over, and the connection is closed.
        """
        inner = self._waiting
        self._waiting = None
        assert inner is not None
        outer = None
        try:
            outer = socket.socket(socket.AF_UNIX)
            outer.setblocking(False)
            outer.connect(self._path)
            connection = _Connection(inner, outer, self._selector, self._ended)
        except OSError as error:
            if outer is not None:
                outer.close()
            if error.errno in _LATER:
                self._waiting = inner
                self._next_at = time.monotonic() + _PAUSE_S
            else:
                inner.close()
            return

        self._connections += 1
        connection.work()

    def _ended(self) -> None:
        self._connections -= 1


class _Connection:
    """Two sockets, each of which gets what the other one sends; `ended` is called when both are
    closed."""

    def __init__(
        self,
        inner: socket.socket,
        outer: socket.socket,
        selector: selectors.BaseSelector,
        ended: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._ended = ended
        self._pipes = [_Pipe(inner, outer), _Pipe(outer, inner)]
        self._registered: dict[socket.socket, int] = {}
        self._closed = False
        for end in (inner, outer):
            end.setblocking(False)

    def work(self) -> None:
        """Move what can be moved; close both sockets when nothing more comes from either."""
        # The other socket's event of the same round may have closed it.
        if self._closed:
            return
        for pipe in self._pipes:
            pipe.move()
        if all(pipe.closed for pipe in self._pipes):
            self._close()
        else:
            self._register()

    def _register(self) -> None:
        """Wait for what each socket is needed for: to read where there is room, to write where
        something waits."""
        for pipe, back in (self._pipes, self._pipes[::-1]):
            events = 0
            if pipe.reads:
                events |= selectors.EVENT_READ
            if back.held:
                events |= selectors.EVENT_WRITE

            before = self._registered.get(pipe.source, 0)
            if events == before:
                continue
            if not before:
                self._selector.register(pipe.source, events, self)
            elif not events:
                self._selector.unregister(pipe.source)
            else:
                self._selector.modify(pipe.source, events, self)
            self._registered[pipe.source] = events

    def _close(self) -> None:
        self._closed = True
        for end, events in self._registered.items():
            if events:
                self._selector.unregister(end)
        for pipe in self._pipes:
            pipe.source.close()
        self._ended()


class _Pipe:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.held = b""
        """What was read and not yet written."""
        self.closed = False
        self._at_end = False

    @property
    def reads(self) -> bool:
        """Whether more can be read."""
        return not self.held and not self._at_end

    def move(self) -> None:
        """Read and write once, without waiting; pass on the end of the source.

        An error ends this direction only: what a server answered before it
        closed its side still arrives.
        """
        try:
            if self.reads:
                self.held = self.source.recv(_CHUNK)
                self._at_end = not self.held
            if self.held:
                self.held = self.held[self.sink.send(self.held) :]
        except BlockingIOError:
            pass
        except OSError:
            self.held = b""
            self._at_end = True

        if self._at_end and not self.held and not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
