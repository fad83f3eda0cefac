"""The experts that a server tells of, out of its own form: vLLM's base64 of an .npy file, SGLang's base64 of int32 numbers."""

from __future__ import annotations

import ast
import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from math import prod
from typing import Any

from turnwise.engine.base import Request
from turnwise.engine.remote.answer import ResponseErrors
from turnwise.types import ROUTES, ExpertRoutes

MAGIC = b"\x93NUMPY"
MOST_HEADER = 1024
"""Bytes of an .npy header; one of an array of three dimensions takes 118."""


def vllm_experts(given: Any, request: Request, sampled: int, breach: ResponseErrors) -> Mapping[str, tuple[int, ExpertRoutes]]:
    """`routed_experts` of vLLM, an array [positions, layers, k] up to the last position that was fed, as extras.

    Args:
        sampled: how many ids the server sampled.

    Raises:
        BackendContractError: when it is something else. One that was not asked for, or is not there, is nothing.
    """
    if given is None or ROUTES not in request.extras:
        return {}
    data = _bytes(given, breach)
    try:
        size, shape, start = _header(data)
        if len(shape) != 3 or len(data) - start != size * prod(shape):
            raise ValueError(f"{len(data) - start} bytes of shape {shape}")
        routes = ExpertRoutes.from_bytes(data[start:], size, shape[1], shape[2])
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise breach("routed_experts", f"are no .npy file of integers [positions, layers, k]: {error}") from error
    return _placed(routes, len(request.ids) + sampled - 1 - len(routes), request, breach)


def sglang_experts(
    given: Any, request: Request, sampled: int, breach: ResponseErrors
) -> Mapping[str, tuple[int, ExpertRoutes]]:
    """`meta_info.routed_experts` of SGLang, int32 [positions, layers, k] whose shape it does not tell, from the position that
    was asked for to the last that was fed; as extras.

    Raises:
        BackendContractError: when it is something else. One that was not asked for, or is not there, is nothing.
    """
    positions = len(request.ids) + sampled - 1 - request.routes_from
    if given is None or ROUTES not in request.extras or not positions:
        return {}
    data = _bytes(given, breach)
    numbers, rest = divmod(len(data), 4 * positions)
    if rest or not numbers:
        raise breach("meta_info.routed_experts", f"are {len(data)} bytes, which are no int32 numbers of {positions} positions")
    try:
        routes = ExpertRoutes.from_bytes(data, 4, 1, numbers)
    except ValueError as error:
        raise breach("meta_info.routed_experts", str(error)) from error
    return _placed(routes, request.routes_from, request, breach)


def _placed(
    routes: ExpertRoutes, start: int, request: Request, breach: ResponseErrors
) -> Mapping[str, tuple[int, ExpertRoutes]]:
    if not 0 <= start <= request.routes_from:
        raise breach("routed_experts", f"begin at position {start}, and those from {request.routes_from} on are wanted")
    return {ROUTES: (start, routes)}


def _bytes(given: Any, breach: ResponseErrors) -> bytes:
    try:
        return b64decode(given, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise breach("routed_experts", f"are no base64: {error}") from error


def _header(data: bytes) -> tuple[int, tuple[int, ...], int]:
    """Bytes of a number, the shape, and where the numbers begin, of an .npy file (numpy.lib.format)."""
    if data[:6] != MAGIC or len(data) < 12:
        raise ValueError("it does not begin as one")
    wide = 2 if data[6] == 1 else 4
    start = 8 + wide + int.from_bytes(data[8 : 8 + wide], "little")
    if start > MOST_HEADER:
        raise ValueError(f"a header of {start} bytes")
    told = ast.literal_eval(data[8 + wide : start].decode("latin-1").strip())
    kind, shape = re.fullmatch(r"[<|][iu]([1248])", told["descr"]), told["shape"]
    if kind is None or told["fortran_order"] or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"{told!r:.100}")
    return int(kind[1]), shape, start
