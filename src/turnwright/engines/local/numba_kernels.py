"""Kernels of the fused passes, compiled by numba: float32 rows on one core, each row by itself.

Arrays of int16 hold bfloat16: their numbers are widened when they are read and rounded to the
nearest, ties to even, when they are written. All arithmetic is in float32.

No sum is reassociated. Every row follows one order of operations that depends only on its own
length. So its bits are the same in any batch, in decoding and in a prompt.

All kernels are in this file because numba's disk cache is invalidated only by changes to a
function's own file. Vector sizes are multiples of `WIDTH`; addresses count floats.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDTH = 16
"""Floats of one vector value; a processor with smaller registers takes several for it."""
BLOCK = 32
"""Keys stored together, dimension by dimension, so that scores of adjacent keys form one vector."""
_FLOAT, _INT, _BITS, _HALF = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16)
_VECTOR, _BIT_VECTOR = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_BITS, WIDTH)
_HALF_VECTOR = ir.VectorType(_HALF, WIDTH)


class _Vector(types.Type):  # type: ignore[misc]
    """numba type of `WIDTH` floats."""


@register_model(_Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


_vector = _Vector(name="turnwright_vector")


def _operation(arguments: str, build: Callable[..., Any], result: Any = _vector) -> Any:
    """Define an operation for kernels; `arguments` has one letter each: (a)rray,
    (i)nteger, (f)loat, (v)ector."""
    kinds = {"i": types.int64, "f": types.float32, "v": _vector}

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointers = [
            context.make_array(kind)(context, builder, value).data
            if isinstance(kind, types.Array)
            else value
            for kind, value in zip(signature.args, values, strict=True)
        ]
        return build(builder, *pointers)

    def typed(given: tuple[Any, ...]) -> Any:
        return result(
            *(
                kind if letter == "a" else kinds[letter]
                for letter, kind in zip(arguments, given, strict=True)
            )
        ), code

    forms = {
        1: lambda typing, a: typed((a,)),
        2: lambda typing, a, b: typed((a, b)),
        3: lambda typing, a, b, c: typed((a, b, c)),
    }
    return intrinsic(forms[len(arguments)])


def _at(builder: Any, data: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _is_half(data: Any) -> bool:
    return bool(data.type.pointee == _HALF)


def _load(builder: Any, data: Any, index: Any) -> Any:
    if not _is_half(data):
        return builder.load(_at(builder, data, index, _VECTOR), align=4)
    upper = builder.zext(
        builder.load(_at(builder, data, index, _HALF_VECTOR), align=2), _BIT_VECTOR
    )
    return builder.bitcast(builder.shl(upper, ir.Constant(_BIT_VECTOR, [16] * WIDTH)), _VECTOR)


def _store(builder: Any, data: Any, index: Any, value: Any) -> Any:
    if _is_half(data):
        upper = _rounded(builder, value, lambda number: ir.Constant(_BIT_VECTOR, [number] * WIDTH))
        builder.store(
            builder.trunc(upper, _HALF_VECTOR), _at(builder, data, index, _HALF_VECTOR), align=2
        )
    else:
        builder.store(value, _at(builder, data, index, _VECTOR), align=4)
    return ir.Constant(_INT, 0)


def _put(builder: Any, data: Any, index: Any, value: Any) -> Any:
    if _is_half(data):
        value = builder.trunc(
            _rounded(builder, value, lambda number: ir.Constant(_BITS, number)), _HALF
        )
    builder.store(value, builder.gep(data, [index]))
    return ir.Constant(_INT, 0)


def _rounded(builder: Any, value: Any, constant: Callable[[int], Any]) -> Any:
    """Return the upper halves of floats rounded to them, in the lower halves; NaN stays NaN."""
    bits = builder.bitcast(value, constant(0).type)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), odd), constant(16))
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC0), nearest)


def _half_of_pairs(builder: Any, data: Any, index: Any, *, second: bool) -> Any:
    """Widen the first or the second of each of `WIDTH` pairs of bfloat16."""
    pairs = builder.load(_at(builder, data, index, _BIT_VECTOR), align=2)
    if second:
        bits = builder.and_(pairs, ir.Constant(_BIT_VECTOR, [0xFFFF0000] * WIDTH))
    else:
        bits = builder.shl(pairs, ir.Constant(_BIT_VECTOR, [16] * WIDTH))
    return builder.bitcast(bits, _VECTOR)


def _repeat(builder: Any, data: Any, index: Any) -> Any:
    value = builder.load(builder.gep(data, [index]))
    if _is_half(data):
        value = builder.bitcast(
            builder.shl(builder.zext(value, _BITS), ir.Constant(_BITS, 16)), _FLOAT
        )
    return _spread(builder, value)


def _swap_control(builder: Any, after: Any) -> Any:
    """Exchange the register; on other processors there is none, and nothing is done."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return after
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte])
    place = cgutils.alloca_once(builder, _BITS)

    def call(name: str) -> None:
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}")
        builder.call(function, [builder.bitcast(place, byte)])

    call("stmxcsr")
    before = builder.load(place)
    builder.store(builder.trunc(after, _BITS), place)
    call("ldmxcsr")
    return builder.zext(before, _INT)


def _spread(builder: Any, value: Any) -> Any:
    single = builder.insert_element(
        ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_BITS, 0)
    )
    return builder.shuffle_vector(
        single, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_BIT_VECTOR, [0] * WIDTH)
    )


def _fetch(builder: Any, data: Any, index: Any) -> Any:
    """Prefetch a cache line; an address past the end is harmless."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _BITS, _BITS, _BITS])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    where = builder.bitcast(builder.gep(data, [index]), byte)
    # The flags: to read, into the second cache, data.
    builder.call(call, [where, *(ir.Constant(_BITS, flag) for flag in (0, 1, 1))])
    return ir.Constant(_INT, 0)


def _all(value: float) -> Any:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * WIDTH)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f32"), [a, b, c]
    )


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _folded(join: Callable[..., Any]) -> Callable[..., Any]:
    """Build a reduction of a vector to one float, by halves."""

    def build(builder: Any, value: Any) -> Any:
        half = WIDTH // 2
        while half:
            order = [*range(half, 2 * half), *range(WIDTH - half)]
            moved = builder.shuffle_vector(value, value, ir.Constant(_BIT_VECTOR, order))
            value, half = join(builder, value, moved), half // 2
        return builder.extract_element(value, ir.Constant(_BITS, 0))

    return build


def _exp(builder: Any, x: Any) -> Any:
    """e**x for x up to 88, within 2 units in the last place; 0 below -87.7, NaN for NaN.

    x = n ln 2 + r with |r| <= ln(2) / 2. n comes from adding a number so large that the sum has no
    fraction bits; then Taylor's polynomial of degree 7, with a relative error below 1e-8.
    """
    x = builder.select(builder.fcmp_ordered("<", x, _all(-88.0)), _all(-88.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, _all(88.0)), _all(88.0), x)
    large = _all(12582912.0)  # 1.5 * 2**23
    shifted = _fused(builder, x, _all(1.4426950408889634), large)
    count = builder.fsub(shifted, large)
    # ln 2 in two parts, the first exact in few bits.
    rest = _fused(builder, count, _all(-0.693359375), x)
    rest = _fused(builder, count, _all(2.12194440e-4), rest)
    value = _all(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        value = _fused(builder, value, rest, _all(factor))
    raised = builder.add(
        builder.bitcast(shifted, _BIT_VECTOR), ir.Constant(_BIT_VECTOR, [127] * WIDTH)
    )
    scale = builder.shl(raised, ir.Constant(_BIT_VECTOR, [23] * WIDTH))
    return builder.fmul(value, builder.bitcast(scale, _VECTOR))


load = _operation("ai", _load)
store = _operation("aiv", _store, types.int64)
put = _operation("aif", _put, types.int64)
"""Write one float to an array."""
broadcast = _operation("f", _spread)
repeat = _operation("ai", _repeat)
"""One number of an array, broadcast to a vector."""
evens = _operation("ai", partial(_half_of_pairs, second=False))
"""The first numbers of pairs of bfloat16; `odds` their second ones."""
odds = _operation("ai", partial(_half_of_pairs, second=True))
swap_control = _operation("i", _swap_control, types.int64)
"""Set the control register of float arithmetic on x86; return what it was."""
prefetch = _operation("ai", _fetch, types.int64)
fused = _operation("vvv", _fused)
"""a * b + c."""
add = _operation("vv", lambda builder, a, b: builder.fadd(a, b))
subtract = _operation("vv", lambda builder, a, b: builder.fsub(a, b))
multiply = _operation("vv", lambda builder, a, b: builder.fmul(a, b))
divide = _operation("vv", lambda builder, a, b: builder.fdiv(a, b))
greater_than = _operation("vv", _greater)
exp = _operation("v", _exp)
horizontal_sum = _operation("v", _folded(lambda builder, a, b: builder.fadd(a, b)), types.float32)
horizontal_max = _operation("v", _folded(_greater), types.float32)


def _kernel(*forms: str) -> Callable[[Any], Any]:
    """Compile the forms of a kernel, or load them from numba's cache; argument letters as above,
    (n) for an int64 array and (h) for one of bfloat16."""
    kinds = {
        "a": types.float32[::1],
        "h": types.int16[::1],
        "n": types.int64[::1],
        "i": types.int64,
        "f": types.float32,
    }

    def compiled(function: Any) -> Any:
        kernel = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
        # Where there is no directory to keep it in, it is compiled by every process,
        # which takes some seconds.
        with contextlib.suppress(RuntimeError):
            kernel.enable_caching()
        for letters in forms:
            kernel.compile(types.void(*(kinds[letter] for letter in letters)))
        kernel.disable_compile()
        return kernel

    return compiled


# Kernels allocate nothing; counting references to their arrays took a quarter of `attend` with keys
# in the processor's cache.
_inner = numba.njit(inline="never", error_model="numpy", _nrt=False)


@_inner
def _norm(x, at, size, weight, eps, out, to):  # type: ignore[no-untyped-def]
    """RMSNorm (Zhang and Sennrich, 2019) of one vector: x / rms(x) * weight."""
    squares = broadcast(np.float32(0))
    for i in range(0, size, WIDTH):
        value = load(x, at + i)
        squares = fused(value, value, squares)
    mean = horizontal_sum(squares) / np.float32(size)
    factor = broadcast(np.float32(1) / np.float32(np.sqrt(mean + eps)))
    for i in range(0, size, WIDTH):
        store(out, to + i, multiply(load(weight, i), multiply(load(x, at + i), factor)))


@_kernel("aanafa", "ahnafh")
def add_and_norm(hidden, change, rows, weight, eps, out):  # type: ignore[no-untyped-def]
    """Add `change` to rows of the residual stream, if not empty, and write their norms
    to `out` consecutively."""
    size = weight.size
    for to in range(rows.size):
        at = rows[to] * size
        if change.size:
            for i in range(at, at + size, WIDTH):
                store(hidden, i, add(load(hidden, i), load(change, i)))
        _norm(hidden, at, size, weight, eps, out, to * size)


@_kernel("aiia", "hiih")
def swiglu(both, rows, size, out):  # type: ignore[no-untyped-def]
    """SwiGLU (Shazeer, 2020) on rows of `size` gates and `size` values: gate *
    sigmoid(gate) * value."""
    one, zero = broadcast(np.float32(1)), broadcast(np.float32(0))
    for row in range(rows):
        for i in range(0, size, WIDTH):
            left = load(both, 2 * row * size + i)
            soft = divide(left, add(one, exp(subtract(zero, left))))
            store(out, row * size + i, multiply(soft, load(both, (2 * row + 1) * size + i)))


FLUSHING = 0x9FC0
"""Control register with which numbers below float32's normal range count as zero; it rounds to
nearest and raises nothing."""
PANEL = 32
"""Outputs that a packed matrix stores together, and inputs that one instruction of
a matrix unit sums up."""
AHEAD = 4096
"""How many numbers before their use weights are fetched; 30 layers took 89 ms
with it and 138 without."""


@_inner
def _multiply_panel(inputs, row_at, inner, part, packed, panel_at, ahead, out, to):  # type: ignore[no-untyped-def]
    """Multiply one row with the weights of 32 outputs, and fetch weights for later if `ahead`."""
    zero = broadcast(np.float32(0))
    left, right = zero, zero
    for start in range(0, inner, part):
        left_part, right_part = zero, zero
        for block in range(start, min(start + part, inner), PANEL):
            a, b, c, d = zero, zero, zero, zero
            for i in range(block, block + PANEL, 2):
                even, odd = repeat(inputs, row_at + i), repeat(inputs, row_at + i + 1)
                at = panel_at + i * PANEL
                if ahead:
                    prefetch(packed, at + AHEAD)
                    prefetch(packed, at + AHEAD + PANEL)
                a, b = fused(even, evens(packed, at), a), fused(odd, odds(packed, at), b)
                c, d = (
                    fused(even, evens(packed, at + PANEL), c),
                    fused(odd, odds(packed, at + PANEL), d),
                )
            left_part, right_part = add(left_part, add(a, b)), add(right_part, add(c, d))
        left, right = add(left, left_part), add(right, right_part)
    store(out, to, left)
    store(out, to + WIDTH, right)


@_kernel("hiihiih")
def multiply_few(inputs, rows, inner, packed, outs, part, out):  # type: ignore[no-untyped-def]
    """Multiply rows of bfloat16 with a packed matrix, in the order in which a matrix unit adds up.

    `packed` has panels of 32 outputs; a panel has pairs of inputs, and each pair 32 times two
    numbers. TDPBF16PS of x86 sums the first numbers of 16 pairs, and the second ones, by fused
    multiplications, and adds the sum of both to the result. `part` inputs are summed up before they
    are added to those before them. `inner`, `outs` and `part` are multiples of 32.
    """
    before = swap_control(FLUSHING)
    for panel in range(0, outs, PANEL):
        for row in range(rows):
            to = row * outs + panel
            _multiply_panel(
                inputs, row * inner, inner, part, packed, panel * inner, row == 0, out, to
            )
    swap_control(before)


@_inner
def _turned(x, at, size, norm, eps, bias, bias_at, cos, sin, turn):  # type: ignore[no-untyped-def]
    """Apply bias, optional norm and rotary embedding (Su et al., 2021) to a
    projection, in place."""
    if bias.size:
        for i in range(0, size, WIDTH):
            store(x, at + i, add(load(x, at + i), load(bias, bias_at + i)))
    if norm.size:
        _norm(x, at, size, norm, eps, x, at)
    half = size // 2
    for i in range(half):
        left, right = x[at + i], x[at + half + i]
        x[at + i] = left * cos[turn + i] - right * sin[turn + i]
        x[at + half + i] = right * cos[turn + half + i] + left * sin[turn + half + i]


@_inner
def _columns(x, at, size, store, origin, place):  # type: ignore[no-untyped-def]
    """Write a vector as a column of its block, as keys are stored."""
    column = origin + place // BLOCK * BLOCK * size + place % BLOCK
    for i in range(size):
        put(store, column + i * BLOCK, x[at + i])


@_inner
def _keep(x, k_at, v_at, size, bias, bias_at, keys, values, origin, place):  # type: ignore[no-untyped-def]
    """Write a key (a column of its block) and a value with its bias to the cache."""
    _columns(x, k_at, size, keys, origin, place)
    for i in range(0, size, WIDTH):
        value = load(x, v_at + i)
        if bias.size:
            value = add(value, load(bias, bias_at + i))
        store(values, origin + place * size + i, value)


@_inner
def _scores(  # type: ignore[no-untyped-def]
    query,
    q_at,
    group,
    size,
    keys,
    common,
    shared,
    origin,
    count,
    scale,
    scores,
    reach,
    values,
    ahead,
):
    """Softmax weights of `count` keys for each query head of a group."""
    _dots(
        query,
        q_at,
        group,
        size,
        keys,
        common,
        shared,
        origin,
        count,
        scale,
        scores,
        reach,
        values,
        ahead,
    )
    end = (count + BLOCK - 1) // BLOCK * BLOCK
    for head in range(group):
        _softmax(scores, head * reach, count, end)


@_inner
def _dots(  # type: ignore[no-untyped-def]
    query,
    q_at,
    group,
    size,
    keys,
    common,
    shared,
    origin,
    count,
    scale,
    scores,
    reach,
    values,
    ahead,
):
    """Scaled products of each query head of a group with `count` keys, heads in pairs, and the
    last of an odd number alone.

    The first `shared` keys are at `common`, the others at `origin`. With `ahead`, prefetch
    the values of these keys.
    """
    zero, factor = broadcast(np.float32(0)), broadcast(scale)
    end = (count + BLOCK - 1) // BLOCK * BLOCK
    for first in range(0, end, BLOCK):
        for head in range(0, group, 2):
            pair = head + 1 < group
            mine, theirs = q_at + head * size, q_at + (head + 1) * size
            a, b, c, d = zero, zero, zero, zero
            e, f, g, h = zero, zero, zero, zero
            for i in range(0, size, 2):
                # Even and odd dimensions apart: eight sums, none of which waits for another.
                at = (common if first < shared else origin) + first * size + i * BLOCK
                if ahead and head == 0:
                    for line in range(0, 2 * BLOCK, WIDTH):
                        prefetch(values, at + line)
                one, two = load(keys, at), load(keys, at + WIDTH)
                three, four = load(keys, at + BLOCK), load(keys, at + BLOCK + WIDTH)
                x, y = repeat(query, mine + i), repeat(query, mine + i + 1)
                a, b, e, f = (
                    fused(x, one, a),
                    fused(x, two, b),
                    fused(y, three, e),
                    fused(y, four, f),
                )
                if pair:
                    x, y = repeat(query, theirs + i), repeat(query, theirs + i + 1)
                    c, d, g, h = (
                        fused(x, one, c),
                        fused(x, two, d),
                        fused(y, three, g),
                        fused(y, four, h),
                    )
            store(scores, head * reach + first, multiply(add(a, e), factor))
            store(scores, head * reach + first + WIDTH, multiply(add(b, f), factor))
            if pair:
                store(scores, (head + 1) * reach + first, multiply(add(c, g), factor))
                store(scores, (head + 1) * reach + first + WIDTH, multiply(add(d, h), factor))


@_inner
def _softmax(scores, start, count, end):  # type: ignore[no-untyped-def]
    """Softmax of `count` scores from `start` on, in place; up to `end` the weights are 0."""
    zero = broadcast(np.float32(0))
    for i in range(start + count, start + end):
        scores[i] = -np.inf
    peaks = load(scores, start)
    for i in range(start + WIDTH, start + end, WIDTH):
        peaks = greater_than(peaks, load(scores, i))
    peak, sums = broadcast(horizontal_max(peaks)), zero
    for i in range(start, start + end, WIDTH):
        weight = exp(subtract(load(scores, i), peak))
        store(scores, i, weight)
        sums = add(sums, weight)
    share = broadcast(np.float32(1) / horizontal_sum(sums))
    for i in range(start, start + end, WIDTH):
        store(scores, i, multiply(load(scores, i), share))


@_inner
def _mixture(  # type: ignore[no-untyped-def]
    scores, reach, group, size, values, common, shared, origin, count, out, to, keys, ahead
):
    """Weighted sum of `count` values for each query head of a group, the first `shared` at
    `common`, the others at `origin`.

    Two heads and two vectors of a value are added up at once where there are as many. Unless
    `ahead` is 0, prefetch the keys at that offset from the others, which are used next.
    """
    for i in range(to, to + group * size, WIDTH):
        store(out, i, broadcast(np.float32(0)))
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        base = common if first < shared else origin
        for head in range(0, group, 2):
            fetched = ahead if head == 0 and first >= shared else 0
            paired = size // (2 * WIDTH) * 2 * WIDTH if head + 1 < group else 0
            for part in range(0, paired, 2 * WIDTH):
                _mix_four(
                    scores,
                    reach,
                    head,
                    size,
                    values,
                    base,
                    first,
                    last,
                    out,
                    to,
                    part,
                    keys,
                    fetched,
                )
            for one in range(head, min(head + 2, group)):
                for part in range(paired, size, WIDTH):
                    _mix_one(
                        scores,
                        reach,
                        one,
                        size,
                        values,
                        base,
                        first,
                        last,
                        out,
                        to,
                        part,
                        keys,
                        fetched,
                    )


@_inner
def _mix_four(scores, reach, head, size, values, base, first, last, out, to, part, keys, ahead):  # type: ignore[no-untyped-def]
    """Add the values from `first` to `last` to two vectors, from `part` on, of a
    head and of the next one."""
    zero = broadcast(np.float32(0))
    mine, theirs, rest, next_head = to + head * size, to + (head + 1) * size, part + WIDTH, head + 1
    a, b, c, d = (
        load(out, mine + part),
        load(out, mine + rest),
        load(out, theirs + part),
        load(out, theirs + rest),
    )
    e, f, g, h = zero, zero, zero, zero
    for key in range(first, last - 1, 2):  # even and odd keys apart
        at, left, right = base + key * size, head * reach + key, next_head * reach + key
        if ahead != 0:
            for line in range(0, 2 * WIDTH, WIDTH):
                prefetch(keys, at + ahead + part + line)
                prefetch(keys, at + ahead + part + line + size)
        one, two = load(values, at + part), load(values, at + rest)
        x, y = repeat(scores, left), repeat(scores, right)
        a, b, c, d = fused(x, one, a), fused(x, two, b), fused(y, one, c), fused(y, two, d)
        one, two = load(values, at + size + part), load(values, at + size + rest)
        x, y = repeat(scores, left + 1), repeat(scores, right + 1)
        e, f, g, h = fused(x, one, e), fused(x, two, f), fused(y, one, g), fused(y, two, h)
    if (last - first) % 2:
        at = base + (last - 1) * size
        one, two = load(values, at + part), load(values, at + rest)
        x, y = repeat(scores, head * reach + last - 1), repeat(scores, next_head * reach + last - 1)
        a, b, c, d = fused(x, one, a), fused(x, two, b), fused(y, one, c), fused(y, two, d)
    store(out, mine + part, add(a, e))
    store(out, mine + rest, add(b, f))
    store(out, theirs + part, add(c, g))
    store(out, theirs + rest, add(d, h))


@_inner
def _mix_one(scores, reach, head, size, values, base, first, last, out, to, part, keys, ahead):  # type: ignore[no-untyped-def]
    """Add the values from `first` to `last` to one vector of a head, in the
    order of `_mix_four`."""
    mine, weight = to + head * size + part, head * reach
    a, e = load(out, mine), broadcast(np.float32(0))
    for key in range(first, last - 1, 2):
        at = base + key * size + part
        if ahead != 0:
            prefetch(keys, at + ahead)
            prefetch(keys, at + ahead + size)
        a = fused(repeat(scores, weight + key), load(values, at), a)
        e = fused(repeat(scores, weight + key + 1), load(values, at + size), e)
    if (last - first) % 2:
        a = fused(
            repeat(scores, weight + last - 1), load(values, base + (last - 1) * size + part), a
        )
    store(out, mine, add(a, e))


@_kernel("aaaafaannnnnaaiiiifaa", "aaaafaannnnnhhiiiifaa")
def attend(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    turns,
    places,
    slots,
    sources,
    shared,
    keys,
    values,
    capacity,
    heads,
    kv,
    size,
    scale,
    scores,
    out,
):
    """Write each row's keys and values to the cache and attend to its slot up to its position.

    Rows of one slot must be in position order.

    Args:
        qkv: projections per row, rotated in place: query heads, key heads, value heads.
        bias: their bias; empty without one.
        q_norm, k_norm: weights of the head norms; empty without them.
        eps: of the norms.
        cos, sin: [angles, size] of the rotary embedding.
        turns: angle index per row.
        places, slots: position and slot per row.
        sources, shared: per slot, where to read its first keys and values, and how many.
        keys: [slots, kv, capacity / BLOCK, size, BLOCK].
        values: [slots, kv, capacity, size].
        capacity: positions per slot.
        heads, kv, size: query heads, key heads, head size.
        scale: factor on the scores.
        scores: buffer of capacity * heads / kv floats.
        out: [rows, heads, size].
    """
    group, reach = heads // kv, capacity
    for row in range(places.size):
        slot, count, at = slots[row], places[row] + 1, row * (heads + 2 * kv) * size
        turn = turns[row] * size
        follower = slots[min(row + 1, places.size - 1)]
        new = row == 0 or slots[row - 1] != slot
        for head in range(heads):
            _turned(qkv, at + head * size, size, q_norm, eps, bias, head * size, cos, sin, turn)
        for head in range(kv):
            mine = (heads + head) * size
            _turned(qkv, at + mine, size, k_norm, eps, bias, mine, cos, sin, turn)
            origin = (slot * kv + head) * capacity * size
            _keep(
                qkv,
                at + mine,
                at + mine + kv * size,
                size,
                bias,
                mine + kv * size,
                keys,
                values,
                origin,
                places[row],
            )
            ahead = 0  # keys of the same slot are cached already
            if follower != slot:
                ahead = (
                    capacity * size if head + 1 < kv else follower * kv * capacity * size - origin
                )
            q_at, to = at + head * group * size, (row * heads + head * group) * size
            common, first = (sources[slot] * kv + head) * capacity * size, shared[slot]
            _scores(
                qkv,
                q_at,
                group,
                size,
                keys,
                common,
                first,
                origin,
                count,
                scale,
                scores,
                reach,
                values,
                new,
            )
            _mixture(
                scores,
                reach,
                group,
                size,
                values,
                common,
                first,
                origin,
                count,
                out,
                to,
                keys,
                ahead,
            )


@_kernel("aaaafaaniii")
def rotate(  # type: ignore[no-untyped-def]
    qkv, bias, q_norm, k_norm, eps, cos, sin, turns, heads, kv, size
):
    """Add the biases of rows and rotate their query and key heads, in place
    and as `attend` does."""
    for row in range(turns.size):
        at, turn = row * (heads + 2 * kv) * size, turns[row] * size
        for i in range((heads + kv) * size, (heads + 2 * kv) * size if bias.size else 0, WIDTH):
            store(qkv, at + i, add(load(qkv, at + i), load(bias, i)))
        for head in range(heads):
            _turned(qkv, at + head * size, size, q_norm, eps, bias, head * size, cos, sin, turn)
        for head in range(heads, heads + kv):
            _turned(qkv, at + head * size, size, k_norm, eps, bias, head * size, cos, sin, turn)


@_kernel("annnhhiiiifaa")
def attend_paths(  # type: ignore[no-untyped-def]
    qkv, paths, starts, owners, keys, values, capacity, heads, kv, size, scale, scores, out
):
    """Attend from rotated rows of training, each to the rows on its path, with
    the arithmetic of `attend`.

    Args:
        qkv: projections per row, from `rotate`.
        paths: rows on the path of each slot, one slot after the other.
        starts: where each slot's path begins, and the end of the last.
        owners: number of the slot's own rows, which are the last of its path.
        keys, values: storage of the slots, as of `attend`, which is overwritten.
        capacity: positions per slot; the longest path fits.
        heads, kv, size: query heads, key heads, head size.
        scale: factor on the scores.
        scores: buffer of capacity * heads / kv floats.
        out: [rows, heads, size].
    """
    group, width, no_bias = heads // kv, (heads + 2 * kv) * size, scores[:0]
    for slot in range(owners.size):
        length = starts[slot + 1] - starts[slot]
        for place in range(length):
            at = paths[starts[slot] + place] * width
            for head in range(kv):
                k_at, origin = at + (heads + head) * size, (slot * kv + head) * capacity * size
                _keep(qkv, k_at, k_at + kv * size, size, no_bias, 0, keys, values, origin, place)
        for place in range(length - owners[slot], length):
            row = paths[starts[slot] + place]
            for head in range(kv):
                origin = (slot * kv + head) * capacity * size
                q_at, to, count = (
                    row * width + head * group * size,
                    (row * heads + head * group) * size,
                    place + 1,
                )
                _scores(
                    qkv,
                    q_at,
                    group,
                    size,
                    keys,
                    origin,
                    0,
                    origin,
                    count,
                    scale,
                    scores,
                    capacity,
                    values,
                    False,
                )
                _mixture(
                    scores,
                    capacity,
                    group,
                    size,
                    values,
                    origin,
                    0,
                    origin,
                    count,
                    out,
                    to,
                    keys,
                    0,
                )


@_inner
def _score_slopes(weights, slopes, start, end, scale):  # type: ignore[no-untyped-def]
    """Replace the gradients of softmax weights from `start` on by those of the products of
    queries and keys, in place."""
    total = broadcast(np.float32(0))
    for i in range(start, start + end, WIDTH):
        total = fused(load(weights, i), load(slopes, i), total)
    mean, factor = broadcast(horizontal_sum(total)), broadcast(scale)
    for i in range(start, start + end, WIDTH):
        change = multiply(load(weights, i), subtract(load(slopes, i), mean))
        store(slopes, i, multiply(change, factor))


@_inner
def _gather(rows, paths, start, length, width, column, size, into, to):  # type: ignore[no-untyped-def]
    """Copy a vector of each row of a path to `into` from `to` on, `WIDTH` numbers of all
    rows after the other."""
    for part in range(0, size, WIDTH):
        for place in range(length):
            store(
                into,
                to + (part * length + place * WIDTH),
                load(rows, paths[start + place] * width + column + part),
            )


@_inner
def _scatter(rows, paths, start, length, width, column, size, given, origin):  # type: ignore[no-untyped-def]
    """Copy back what `_gather` copied."""
    for part in range(0, size, WIDTH):
        for place in range(length):
            value = load(given, origin + (part * length + place * WIDTH))
            store(rows, paths[start + place] * width + column + part, value)


@_inner
def _query_slopes(  # type: ignore[no-untyped-def]
    qkv, q_at, slope, s_at, size, length, count, weights, slopes, first, gathered, qkv_slope
):
    """Add the gradients of one query, and of the `count` keys and values that it attends to,
    which are in `gathered`."""
    to_k, to_v = length * size, 2 * length * size
    for part in range(0, size, WIDTH):
        q, g, back = load(qkv, q_at + part), load(slope, s_at + part), load(qkv_slope, q_at + part)
        for key in range(count):
            at = part * length + key * WIDTH
            change, share = repeat(slopes, first + key), repeat(weights, first + key)
            back = fused(change, load(gathered, at), back)
            store(gathered, to_k + at, fused(change, q, load(gathered, to_k + at)))
            store(gathered, to_v + at, fused(share, g, load(gathered, to_v + at)))
        store(qkv_slope, q_at + part, back)


@_kernel("annnhhiiiifaaaaa")
def attend_paths_slope(  # type: ignore[no-untyped-def]
    qkv,
    paths,
    starts,
    owners,
    keys,
    values,
    capacity,
    heads,
    kv,
    size,
    scale,
    weights,
    slopes,
    gathered,
    slope,
    qkv_slope,
):
    """Add the gradients of rotated rows, from that of what `attend_paths` wrote; its
    other arguments are the same.

    With p the softmax weights of a row: dv_j = p_j do, dp_j = v_j do, ds_j = p_j (dp_j - sum_i p_i
    dp_i) scale, dq = sum_j ds_j k_j and dk_j = ds_j q.

    Args:
        weights, slopes: two buffers as `scores`.
        gathered: buffer of 3 * capacity * size floats, for the keys of a path and the
            gradients of its keys and values.
        slope: [rows, heads, size], gradient of the output.
        qkv_slope: like `qkv`.
    """
    group, width, one = heads // kv, (heads + 2 * kv) * size, np.float32(1)
    for slot in range(owners.size):
        start, length = starts[slot], starts[slot + 1] - starts[slot]
        for head in range(kv):
            origin, k_column, v_column = (
                (slot * kv + head) * capacity * size,
                (heads + head) * size,
                (heads + kv + head) * size,
            )
            for place in range(length):
                at = paths[start + place] * width
                _columns(qkv, at + k_column, size, keys, origin, place)
                _columns(qkv, at + v_column, size, values, origin, place)
            to_k, to_v = length * size, 2 * length * size
            _gather(qkv, paths, start, length, width, k_column, size, gathered, 0)
            _gather(qkv_slope, paths, start, length, width, k_column, size, gathered, to_k)
            _gather(qkv_slope, paths, start, length, width, v_column, size, gathered, to_v)

            for place in range(length - owners[slot], length):
                row, count = paths[start + place], place + 1
                q_at, at = row * width + head * group * size, (row * heads + head * group) * size
                end = (count + BLOCK - 1) // BLOCK * BLOCK
                _scores(
                    qkv,
                    q_at,
                    group,
                    size,
                    keys,
                    origin,
                    0,
                    origin,
                    count,
                    scale,
                    weights,
                    capacity,
                    values,
                    False,
                )
                _dots(
                    slope,
                    at,
                    group,
                    size,
                    values,
                    origin,
                    0,
                    origin,
                    count,
                    one,
                    slopes,
                    capacity,
                    values,
                    False,
                )
                for query in range(group):
                    first, mine = query * capacity, query * size
                    for i in range(first + count, first + end):
                        slopes[i] = 0.0  # what is stored there may be anything
                    _score_slopes(weights, slopes, first, end, scale)
                    _query_slopes(
                        qkv,
                        q_at + mine,
                        slope,
                        at + mine,
                        size,
                        length,
                        count,
                        weights,
                        slopes,
                        first,
                        gathered,
                        qkv_slope,
                    )
            _scatter(qkv_slope, paths, start, length, width, k_column, size, gathered, to_k)
            _scatter(qkv_slope, paths, start, length, width, v_column, size, gathered, to_v)


@_inner
def _norm_back(x, at, size, weight, eps, slope, s_at, beside, out, weight_slope):  # type: ignore[no-untyped-def]
    """Gradients of `_norm` of one vector: write that of the vector, plus `beside` if not empty,
    and add that of the weight.

    y = x r w with r = (mean x^2 + eps)^-1/2, so dx = r w dy - x r^3 mean(w dy
    x) and dw = sum of dy x r.
    """
    squares, products = broadcast(np.float32(0)), broadcast(np.float32(0))
    for i in range(0, size, WIDTH):
        value = load(x, at + i)
        squares = fused(value, value, squares)
        products = fused(multiply(load(weight, i), load(slope, s_at + i)), value, products)
    r = np.float32(1) / np.float32(np.sqrt(horizontal_sum(squares) / np.float32(size) + eps))
    factor = broadcast(r)
    back = broadcast(-r * r * r * horizontal_sum(products) / np.float32(size))
    for i in range(0, size, WIDTH):
        value, given = load(x, at + i), load(slope, s_at + i)
        change = fused(value, back, multiply(factor, multiply(load(weight, i), given)))
        if beside.size:
            change = add(change, load(beside, s_at + i))
        store(out, s_at + i, change)
        store(weight_slope, i, fused(multiply(given, factor), value, load(weight_slope, i)))


@_kernel("aafhaaa", "aafaaaa")
def norm_slope(hidden, weight, eps, slope, beside, out, weight_slope):  # type: ignore[no-untyped-def]
    """Gradients of RMSNorm of rows: write those of the rows plus `beside`, if not empty, and
    add that of the weight."""
    for at in range(0, hidden.size, weight.size):
        _norm_back(hidden, at, weight.size, weight, eps, slope, at, beside, out, weight_slope)


@_kernel("aaafaaniiiaaa")
def rotate_slope(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, eps, cos, sin, turns, heads, kv, size, slope, q_norm_slope, k_norm_slope
):
    """Replace gradients of rotated rows by those of the projections with their bias, `qkv`; add
    those of the head norms."""
    half, nothing = size // 2, slope[:0]
    for row in range(turns.size):
        at, turn = row * (heads + 2 * kv) * size, turns[row] * size
        for head in range(heads + kv):
            mine = at + head * size
            for i in range(half):
                left, right = slope[mine + i], slope[mine + half + i]
                slope[mine + i] = left * cos[turn + i] + right * sin[turn + half + i]
                slope[mine + half + i] = right * cos[turn + half + i] - left * sin[turn + i]
            if q_norm.size and head < heads:
                _norm_back(qkv, mine, size, q_norm, eps, slope, mine, nothing, slope, q_norm_slope)
            elif q_norm.size:
                _norm_back(qkv, mine, size, k_norm, eps, slope, mine, nothing, slope, k_norm_slope)


@_kernel("hiihh")
def swiglu_slope(both, rows, size, slope, out):  # type: ignore[no-untyped-def]
    """Gradients of the gates and values of `swiglu`, from that of its output.

    With s = sigmoid(gate): d gate = slope value s (1 + gate (1 - s)) and d value = slope gate s.
    """
    one, zero = broadcast(np.float32(1)), broadcast(np.float32(0))
    for row in range(rows):
        for i in range(0, size, WIDTH):
            left, right = 2 * row * size + i, (2 * row + 1) * size + i
            gate, value, given = load(both, left), load(both, right), load(slope, row * size + i)
            soft = divide(one, add(one, exp(subtract(zero, gate))))
            bend = fused(multiply(gate, subtract(one, soft)), one, one)
            store(out, left, multiply(multiply(given, value), multiply(soft, bend)))
            store(out, right, multiply(given, multiply(gate, soft)))


@_kernel("aniii")
def copy_blocks(store, moves, heads, blocks, width):  # type: ignore[no-untyped-def]
    """Copy positions from slot to slot, one move after the other, and the rest of the blocks
    that they begin and end in.

    Args:
        store: [slots, heads, blocks, width].
        moves: [moves, 4]: source, target, first position, end.
        heads, blocks, width: heads of a slot, blocks of a head, floats of a block.
    """
    for m in range(0, moves.size, 4):
        first, count = moves[m + 2] // BLOCK, -(-moves[m + 3] // BLOCK) - moves[m + 2] // BLOCK
        for head in range(heads):
            at = ((moves[m] * heads + head) * blocks + first) * width
            to = ((moves[m + 1] * heads + head) * blocks + first) * width
            for i in range(count * width):
                store[to + i] = store[at + i]


@_inner
def _end_sharing(slot, keep, sources, shared):  # type: ignore[no-untyped-def]
    complete = keep // BLOCK * BLOCK
    for reader in range(sources.size):
        if (reader == slot or sources[reader] == slot) and shared[reader] > complete:
            shared[reader] = complete


@_kernel("nnn")
def share_blocks(moves, sources, shared):  # type: ignore[no-untyped-def]
    """Let targets of moves, as above, be read where the complete blocks that were copied are, and
    end what overwriting ends."""
    for m in range(0, moves.size, 4):
        source, target, complete = moves[m], moves[m + 1], moves[m + 3] // BLOCK * BLOCK
        _end_sharing(target, moves[m + 2], sources, shared)
        sources[target] = sources[source] if shared[source] >= complete else source
        shared[target] = complete


@_kernel("nnn")
def end_sharing(rewound, sources, shared):  # type: ignore[no-untyped-def]
    """End the sharing of positions that will be overwritten: those of each slot from a
    position on, [slots, 2]."""
    for i in range(0, rewound.size, 2):
        _end_sharing(rewound[i], rewound[i + 1], sources, shared)
