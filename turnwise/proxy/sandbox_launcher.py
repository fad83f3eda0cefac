"""First program inside a program's sandbox: it writes the files, relays the proxy's port to its socket, and runs the command.

Uses only the standard library. It has the rights of the command, so nothing outside relies on what it does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading


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
    threading.Thread(target=_relay, args=(listener, order["socket"]), daemon=True).start()
    try:
        process = subprocess.Popen(order["command"], cwd=order["work"], env=order["env"], stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"the program {order['command'][0]!r:.80} cannot be started: {error.strerror}")
    status = process.wait()
    sys.stdout.flush()
    os._exit(status if status >= 0 else 128 - status)


def _relay(listener: socket.socket, path: str) -> None:
    while True:
        inner, _ = listener.accept()
        outer = socket.socket(socket.AF_UNIX)
        try:
            outer.connect(path)
        except OSError:  # the episode is over
            inner.close()
            continue
        for source, sink in ((inner, outer), (outer, inner)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            sink.sendall(chunk)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
