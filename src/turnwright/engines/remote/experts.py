"""Experts that servers routed tokens to, in the forms of vLLM and SGLang, as extras of a
generation."""

from __future__ import annotations

import ast
import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from math import prod
from typing import Any

from turnwright.engines.protocols import Request
from turnwright.engines.remote.response import Breach
from turnwright.types import ROUTES, ExpertRoutes

MAGIC = b"\x93NUMPY"
MAX_HEADER = 1024
"""Bytes of an .npy header; three dimensions take 118."""


def vllm_experts(
    encoded: Any, request: Request, sampled: int, breach: Breach
) -> Mapping[str, tuple[int, ExpertRoutes]]:
    """Convert vLLM's `routed_experts` to extras: an array [positions, layers, k] up to the last
    position fed.

    `sampled` is the number of ids the server sampled. Missing or unrequested data is ignored.
    """
    if encoded is None or ROUTES not in request.extras:
        return {}
    data = _bytes(encoded, breach)
    try:
        size, shape, start = _header(data)
        if len(shape) != 3 or len(data) - start != size * prod(shape):
            raise ValueError(f"{len(data) - start} bytes of shape {shape}")
        routes = ExpertRoutes.from_bytes(data[start:], size, shape[1], shape[2])
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise breach(
            "routed_experts", f"are not an .npy file of integers [positions, layers, k]: {error}"
        ) from error
    return _as_extras(routes, len(request.ids) + sampled - 1 - len(routes), request, breach)


def sglang_experts(
    encoded: Any, request: Request, sampled: int, breach: Breach
) -> Mapping[str, tuple[int, ExpertRoutes]]:
    """Convert SGLang's `meta_info.routed_experts` to extras: int32 [positions, layers, k], sent
    without a shape.

    The positions run from the requested one to the last one fed. Missing or unrequested data is
    ignored.
    """
    positions = len(request.ids) + sampled - 1 - request.routes_from
    if encoded is None or ROUTES not in request.extras or not positions:
        return {}
    data = _bytes(encoded, breach)
    numbers, rest = divmod(len(data), 4 * positions)
    if rest or not numbers:
        raise breach(
            "meta_info.routed_experts",
            f"are {len(data)} bytes, not int32 numbers of {positions} positions",
        )
    try:
        routes = ExpertRoutes.from_bytes(data, 4, 1, numbers)
    except ValueError as error:
        raise breach("meta_info.routed_experts", str(error)) from error
    return _as_extras(routes, request.routes_from, request, breach)


def _as_extras(
    routes: ExpertRoutes, start: int, request: Request, breach: Breach
) -> Mapping[str, tuple[int, ExpertRoutes]]:
    if not 0 <= start <= request.routes_from:
        raise breach(
            "routed_experts",
            f"start at position {start}; those from {request.routes_from} on were requested",
        )
    return {ROUTES: (start, routes)}


def _bytes(encoded: Any, breach: Breach) -> bytes:
    try:
        return b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise breach("routed_experts", f"are not base64: {error}") from error


def _header(data: bytes) -> tuple[int, tuple[int, ...], int]:
    """Parse an .npy header (numpy.lib.format); return bytes per number, shape, and data offset."""
    if data[:6] != MAGIC or len(data) < 12:
        raise ValueError("no .npy magic")
    # After magic and version comes the header's length, of two bytes in version 1 and four later.
    length_size = 2 if data[6] == 1 else 4
    header_start = 8 + length_size
    start = header_start + int.from_bytes(data[8:header_start], "little")
    if start > MAX_HEADER:
        raise ValueError(f"a header of {start} bytes")
    header = ast.literal_eval(data[header_start:start].decode("latin-1").strip())
    integers = re.fullmatch(r"[<|][iu]([1248])", header["descr"])
    shape = header["shape"]
    if integers is None or header["fortran_order"]:
        raise ValueError(f"{header!r:.100}")
    if not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{header!r:.100}")
    return int(integers[1]), shape, start
