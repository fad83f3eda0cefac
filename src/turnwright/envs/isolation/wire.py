"""Messages to and from a forked process: a header, then a pickled value.

What this process sends is trusted there. What comes back is made by code of users, so that only
plain data is unpickled.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import struct
from typing import Any

import orjson

from turnwright.records.run_dir import to_json

MARK = b"twn1"
HEAD = struct.Struct("<4sQQ")
"""Header of each message: `MARK`, the number of the request, and the bytes that follow."""

REQUEST = struct.Struct("<cq")
"""A request to the fork server: its kind, and the process that it is about."""

ENDED = struct.Struct("<qi")
"""What the fork server says of a process that has ended: its id and status, as `os.waitpid` has
it."""

SETUP = struct.Struct("<Q")
"""Bytes of the pickled set-up, which is what the fork server receives first."""

_PLAIN = {
    "builtins": "bytearray complex frozenset range set slice",
    "collections": "OrderedDict",
    "datetime": "date datetime timedelta",
    "decimal": "Decimal",
}
"""Classes of plain data, by module; others come as JSON types."""


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler of messages from environment processes: Turnwright data classes and plain values,
    no code."""

    def find_class(self, module: str, name: str) -> Any:
        is_ours = module.startswith("turnwright.types.") or module == "turnwright.envs.env"
        is_plain = name in _PLAIN.get(module, "").split()
        if "." not in name and (is_ours or is_plain):
            value = super().find_class(module, name)
            if isinstance(value, type):  # a function could do anything
                return value
        raise pickle.UnpicklingError(f"{module}.{name} cannot leave the environment's process")


def restricted_loads(data: bytes) -> Any:
    """Unpickle a message from an environment process.

    Raises `pickle.UnpicklingError` for anything but plain data.
    """
    return RestrictedUnpickler(io.BytesIO(data)).load()


def picklable_value(value: Any) -> Any:
    """Return the value unchanged if `restricted_loads` accepts it, else converted to JSON types as
    in the record."""
    try:
        restricted_loads(pickle.dumps(value))
    except Exception:
        return orjson.loads(to_json(value))
    return value


def frame(number: int, data: bytes) -> bytes:
    """Return a message with its header."""
    return HEAD.pack(MARK, number, len(data)) + data


async def receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, number: int = 0) -> Any:
    """Receive the answer to a request, and drop answers to earlier ones.

    Raises:
        EOFError: when the process has ended.
        pickle.UnpicklingError: for anything but plain data.
    """
    while True:
        mark, answered, size = HEAD.unpack(await _exactly(loop, sock, HEAD.size))
        if mark != MARK or answered > number:
            raise pickle.UnpicklingError(
                "user code wrote to the socket of the environment's process; leave descriptor 3 "
                "alone"
            )

        data = await _exactly(loop, sock, size)
        if answered == number:
            return restricted_loads(data)


async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    """Receive so many bytes; raise `EOFError` where there are no more."""
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(sock, min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
