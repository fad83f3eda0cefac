"""Kernels of the fused passes, compiled by numba: float32 rows on one core, each row by itself.

Arrays of int16 hold bfloat16: their numbers are widened when they are read and rounded to the
nearest, ties to even, when they are written. All arithmetic is in float32.

No sum is reassociated. Every row follows one order of operations that depends only on its own
length. So its bits are the same in any batch, in decoding and in a prompt.

The file has four parts: operations on vectors of `WIDTH` floats, which numba lacks; kernels of the
forward pass, the largest of which is `attend`; kernels of the gradients, whose names end in
`_slope`; and kernels that copy and share blocks of the cache. Products with matrices are not here
but torch's, except `multiply_few`. Read on in `FusedDecoder._layer`, which calls the kernels of a
layer in their order.

All kernels are in this file because numba's disk cache is invalidated only by changes to a
function's own file. Arrays are flat. Vector sizes are multiples of `WIDTH`. Addresses count the
numbers of an array; a name that ends in `_at` is one.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
_FLOAT = ir.FloatType()
_INT = ir.IntType(64)
_BITS = ir.IntType(32)
_HALF = ir.IntType(16)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_BIT_VECTOR = ir.VectorType(_BITS, WIDTH)
_HALF_VECTOR = ir.VectorType(_HALF, WIDTH)


class _Vector(types.Type):  # type: ignore[misc]
    """numba type of `WIDTH` floats."""


@register_model(_Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


_vector = _Vector(name="turnwright_vector")


def _operation(arguments: str, build: Callable[..., Any], result: Any = _vector) -> Any:
    """Define an operation for kernels.

    `arguments` has one letter for each: (a)rray, (i)nteger, (f)loat, (v)ector. `build` emits the
    code from a builder and the arguments, of an array the address of its data.
    """
    type_of_letter = {"i": types.int64, "f": types.float32, "v": _vector}

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        operands = []
        for type_, value in zip(signature.args, values, strict=True):
            if isinstance(type_, types.Array):
                value = context.make_array(type_)(context, builder, value).data
            operands.append(value)
        return build(builder, *operands)

    def typed(argument_types: tuple[Any, ...]) -> Any:
        accepted = []
        for letter, type_ in zip(arguments, argument_types, strict=True):
            accepted.append(type_ if letter == "a" else type_of_letter[letter])
        return result(*accepted), code

    # numba reads the number of arguments from the signature.
    forms = {
        1: lambda typing, a: typed((a,)),
        2: lambda typing, a, b: typed((a, b)),
        3: lambda typing, a, b, c: typed((a, b, c)),
    }
    return intrinsic(forms[len(arguments)])


def _address(builder: Any, data: Any, index: Any, type_: Any) -> Any:
    """Return the address of a number of an array, as one of a value of another type."""
    return builder.bitcast(builder.gep(data, [index]), type_.as_pointer())


def _all_floats(value: float) -> Any:
    return ir.Constant(_VECTOR, [float(np.float32(value))] * WIDTH)


def _all_bits(number: int) -> Any:
    return ir.Constant(_BIT_VECTOR, [number] * WIDTH)


def _is_half(data: Any) -> bool:
    return bool(data.type.pointee == _HALF)


def _load(builder: Any, data: Any, index: Any) -> Any:
    if not _is_half(data):
        return builder.load(_address(builder, data, index, _VECTOR), align=4)
    # bfloat16 is the upper half of a float32.
    halves = builder.load(_address(builder, data, index, _HALF_VECTOR), align=2)
    bits = builder.shl(builder.zext(halves, _BIT_VECTOR), _all_bits(16))
    return builder.bitcast(bits, _VECTOR)


def _store(builder: Any, data: Any, index: Any, value: Any) -> Any:
    if _is_half(data):
        halves = builder.trunc(_rounded(builder, value, _all_bits), _HALF_VECTOR)
        builder.store(halves, _address(builder, data, index, _HALF_VECTOR), align=2)
    else:
        builder.store(value, _address(builder, data, index, _VECTOR), align=4)
    return ir.Constant(_INT, 0)


def _put(builder: Any, data: Any, index: Any, value: Any) -> Any:
    if _is_half(data):
        bits = _rounded(builder, value, lambda number: ir.Constant(_BITS, number))
        value = builder.trunc(bits, _HALF)
    builder.store(value, builder.gep(data, [index]))
    return ir.Constant(_INT, 0)


def _rounded(builder: Any, value: Any, constant: Callable[[int], Any]) -> Any:
    """Return the upper halves of floats rounded to them, in the lower halves; NaN stays NaN."""
    bits = builder.bitcast(value, constant(0).type)
    # Half a unit less one carries into the upper half when the lower one is above half a unit; the
    # last bit of the upper half makes ties even.
    last_bit = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    carried = builder.add(builder.add(bits, constant(0x7FFF)), last_bit)
    nearest = builder.lshr(carried, constant(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, constant(0x7FC0), nearest)


def _half_of_pairs(builder: Any, data: Any, index: Any, *, second: bool) -> Any:
    """Widen the first or the second of each of `WIDTH` pairs of bfloat16."""
    pairs = builder.load(_address(builder, data, index, _BIT_VECTOR), align=2)
    if second:
        bits = builder.and_(pairs, _all_bits(0xFFFF0000))
    else:
        bits = builder.shl(pairs, _all_bits(16))
    return builder.bitcast(bits, _VECTOR)


def _repeat(builder: Any, data: Any, index: Any) -> Any:
    value = builder.load(builder.gep(data, [index]))
    if _is_half(data):
        bits = builder.shl(builder.zext(value, _BITS), ir.Constant(_BITS, 16))
        value = builder.bitcast(bits, _FLOAT)
    return _spread(builder, value)


def _swap_control(builder: Any, after: Any) -> Any:
    """Exchange the register; on other processors there is none, and nothing is done."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return after
    byte_pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte_pointer])
    memory = cgutils.alloca_once(builder, _BITS)

    def call(name: str) -> None:
        name = f"llvm.x86.sse.{name}"
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        builder.call(function, [builder.bitcast(memory, byte_pointer)])

    call("stmxcsr")
    before = builder.load(memory)
    builder.store(builder.trunc(after, _BITS), memory)
    call("ldmxcsr")
    return builder.zext(before, _INT)


def _spread(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_BITS, 0))
    return builder.shuffle_vector(single, undefined, _all_bits(0))


def _fetch(builder: Any, data: Any, index: Any) -> Any:
    """Prefetch a cache line; an address past the end is harmless."""
    byte_pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte_pointer, _BITS, _BITS, _BITS])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    address = builder.bitcast(builder.gep(data, [index]), byte_pointer)
    # The flags: to read, into the second cache, data.
    flags = [ir.Constant(_BITS, flag) for flag in (0, 1, 1)]
    builder.call(function, [address, *flags])
    return ir.Constant(_INT, 0)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    signature = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    name = f"llvm.fmuladd.v{WIDTH}f32"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, [a, b, c])


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _folded(join: Callable[..., Any]) -> Callable[..., Any]:
    """Build a reduction of a vector to one float, by halves."""

    def build(builder: Any, value: Any) -> Any:
        half = WIDTH // 2
        while half:
            order = [*range(half, 2 * half), *range(WIDTH - half)]
            moved = builder.shuffle_vector(value, value, ir.Constant(_BIT_VECTOR, order))
            value = join(builder, value, moved)
            half //= 2
        return builder.extract_element(value, ir.Constant(_BITS, 0))

    return build


def _exp(builder: Any, x: Any) -> Any:
    """e**x for x up to 88, within 2 units in the last place; 0 below -87.7, NaN for NaN.

    x = n ln 2 + r with |r| <= ln(2) / 2. n comes from adding a number so large that the sum has no
    fraction bits; then Taylor's polynomial of degree 7, with a relative error below 1e-8.
    """
    low = _all_floats(-88.0)
    high = _all_floats(88.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)

    # n, and in the lowest bits of `shifted` n as an integer.
    large = _all_floats(12582912.0)  # 1.5 * 2**23
    shifted = _fused(builder, x, _all_floats(1.4426950408889634), large)
    n = builder.fsub(shifted, large)

    # r, with ln 2 in two parts, the first exact in few bits.
    r = _fused(builder, n, _all_floats(-0.693359375), x)
    r = _fused(builder, n, _all_floats(2.12194440e-4), r)

    # The polynomial by Horner's rule, times 2**n: n goes into the exponent's bits.
    polynomial = _all_floats(1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        polynomial = _fused(builder, polynomial, r, _all_floats(coefficient))
    exponent = builder.add(builder.bitcast(shifted, _BIT_VECTOR), _all_bits(127))
    power = builder.shl(exponent, _all_bits(23))
    return builder.fmul(polynomial, builder.bitcast(power, _VECTOR))


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
    """Compile the forms of a kernel, or load them from numba's cache.

    A form has one letter for each argument, as in `_operation`, but (a) for an array of float32,
    (n) for one of int64 and (h) for one of bfloat16.
    """
    type_of_letter = {
        "a": types.float32[::1],
        "h": types.int16[::1],
        "n": types.int64[::1],
        "i": types.int64,
        "f": types.float32,
    }

    def compiled(function: Any) -> Any:
        kernel = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
        # Where there is no directory to keep it in, it is compiled by every process, which takes
        # some seconds.
        with contextlib.suppress(RuntimeError):
            kernel.enable_caching()
        for letters in forms:
            argument_types = [type_of_letter[letter] for letter in letters]
            kernel.compile(types.void(*argument_types))
        kernel.disable_compile()
        return kernel

    return compiled


# Kernels allocate nothing; counting references to their arrays took a quarter of `attend` with keys
# in the processor's cache.
_inner = numba.njit(inline="never", error_model="numpy", _nrt=False)


@_inner
def _norm(x, x_at, size, weight, eps, out, out_at):  # type: ignore[no-untyped-def]
    """RMSNorm (Zhang and Sennrich, 2019) of one vector: x / rms(x) * weight."""
    squares = broadcast(np.float32(0))
    for i in range(0, size, WIDTH):
        value = load(x, x_at + i)
        squares = fused(value, value, squares)
    mean = horizontal_sum(squares) / np.float32(size)

    factor = broadcast(np.float32(1) / np.float32(np.sqrt(mean + eps)))
    for i in range(0, size, WIDTH):
        scaled = multiply(load(x, x_at + i), factor)
        store(out, out_at + i, multiply(load(weight, i), scaled))


@_kernel("aanafa", "ahnafh")
def add_and_norm(hidden, change, rows, weight, eps, out):  # type: ignore[no-untyped-def]
    """Add `change` to rows of the residual stream, if not empty, and write their norms to `out`
    consecutively."""
    size = weight.size
    for number in range(rows.size):
        row_at = rows[number] * size
        if change.size:
            for i in range(row_at, row_at + size, WIDTH):
                store(hidden, i, add(load(hidden, i), load(change, i)))
        _norm(hidden, row_at, size, weight, eps, out, number * size)


@_kernel("aiia", "hiih")
def swiglu(both, rows, size, out):  # type: ignore[no-untyped-def]
    """SwiGLU (Shazeer, 2020): gate * sigmoid(gate) * value.

    Rows of `both` have `size` gates, then `size` values.
    """
    one = broadcast(np.float32(1))
    zero = broadcast(np.float32(0))
    for row in range(rows):
        for i in range(0, size, WIDTH):
            gate = load(both, 2 * row * size + i)
            activated = divide(gate, add(one, exp(subtract(zero, gate))))
            value = load(both, (2 * row + 1) * size + i)
            store(out, row * size + i, multiply(activated, value))


FLUSHING = 0x9FC0
"""Control register with which numbers below float32's normal range count as zero; it rounds to
nearest and raises nothing."""
PANEL = 32
"""Outputs that a packed matrix stores together, and inputs that one instruction of a matrix unit
sums up."""
AHEAD = 4096
"""How many numbers before their use weights are fetched; 30 layers took 89 ms with it and 138
without."""


@_inner
def _multiply_panel(inputs, row_at, inner, part, packed, panel_at, ahead, out, out_at):  # type: ignore[no-untyped-def]
    """Multiply one row with the weights of 32 outputs, and fetch weights for later if `ahead`."""
    zero = broadcast(np.float32(0))
    left = zero
    right = zero
    for start in range(0, inner, part):
        left_part = zero
        right_part = zero
        for block in range(start, min(start + part, inner), PANEL):
            # The first 16 outputs and the others, even and odd inputs apart.
            left_even = zero
            left_odd = zero
            right_even = zero
            right_odd = zero
            for i in range(block, block + PANEL, 2):
                even = repeat(inputs, row_at + i)
                odd = repeat(inputs, row_at + i + 1)
                pairs_at = panel_at + i * PANEL
                if ahead:
                    prefetch(packed, pairs_at + AHEAD)
                    prefetch(packed, pairs_at + AHEAD + PANEL)
                left_even = fused(even, evens(packed, pairs_at), left_even)
                left_odd = fused(odd, odds(packed, pairs_at), left_odd)
                right_even = fused(even, evens(packed, pairs_at + PANEL), right_even)
                right_odd = fused(odd, odds(packed, pairs_at + PANEL), right_odd)

            left_part = add(left_part, add(left_even, left_odd))
            right_part = add(right_part, add(right_even, right_odd))
        left = add(left, left_part)
        right = add(right, right_part)
    store(out, out_at, left)
    store(out, out_at + WIDTH, right)


@_kernel("hiihiih")
def multiply_few(inputs, rows, inner, packed, outs, part, out):  # type: ignore[no-untyped-def]
    """Multiply rows of bfloat16 with a packed matrix, in the order in which a matrix unit adds up.

    `packed` has panels of 32 outputs; a panel has pairs of inputs, and each pair 32 times two
    numbers. TDPBF16PS of x86 sums the first numbers of 16 pairs, and the second ones, by fused
    multiplications, and adds the sum of both to the result. `part` inputs are summed up before they
    are added to those before them. `inner`, `outs` and `part` are multiples of 32.
    """
    control = swap_control(FLUSHING)
    for panel in range(0, outs, PANEL):
        panel_at = panel * inner
        for row in range(rows):
            ahead = row == 0
            out_at = row * outs + panel
            _multiply_panel(inputs, row * inner, inner, part, packed, panel_at, ahead, out, out_at)
    swap_control(control)


@_inner
def _turned(x, x_at, size, norm, eps, bias, bias_at, cos, sin, angle_at):  # type: ignore[no-untyped-def]
    """Apply bias, optional norm and rotary embedding (Su et al., 2021) to a projection, in
    place."""
    if bias.size:
        for i in range(0, size, WIDTH):
            store(x, x_at + i, add(load(x, x_at + i), load(bias, bias_at + i)))
    if norm.size:
        _norm(x, x_at, size, norm, eps, x, x_at)

    half = size // 2
    for i in range(half):
        left = x[x_at + i]
        right = x[x_at + half + i]
        x[x_at + i] = left * cos[angle_at + i] - right * sin[angle_at + i]
        x[x_at + half + i] = right * cos[angle_at + half + i] + left * sin[angle_at + half + i]


@_inner
def _columns(x, x_at, size, store, head_at, place):  # type: ignore[no-untyped-def]
    """Write a vector as a column of its block, as keys are stored."""
    column = head_at + place // BLOCK * BLOCK * size + place % BLOCK
    for i in range(size):
        put(store, column + i * BLOCK, x[x_at + i])


@_inner
def _keep(x, k_at, v_at, size, bias, bias_at, keys, values, head_at, place):  # type: ignore[no-untyped-def]
    """Write a key (a column of its block) and a value with its bias to the cache."""
    _columns(x, k_at, size, keys, head_at, place)
    for i in range(0, size, WIDTH):
        value = load(x, v_at + i)
        if bias.size:
            value = add(value, load(bias, bias_at + i))
        store(values, head_at + place * size + i, value)


class KeySpan(NamedTuple):
    """Keys or values that a row attends to: `length` of them, the first `shared` at `shared_at`,
    the others at `own_at` as if all were there."""

    shared_at: int
    shared: int
    own_at: int
    length: int


class Block(NamedTuple):
    """Some of the values that a row attends to: those from `first` to `last`, counted from `at`."""

    at: int
    first: int
    last: int


@_inner
def _scores(query, q_at, group, size, keys, span, scale, scores, reach, values, ahead):  # type: ignore[no-untyped-def]
    """Softmax weights of the keys of a span for each query head of a group."""
    _dots(query, q_at, group, size, keys, span, scale, scores, reach, values, ahead)
    end = (span.length + BLOCK - 1) // BLOCK * BLOCK
    for head in range(group):
        _softmax(scores, head * reach, span.length, end)


@_inner
def _dots(query, q_at, group, size, keys, span, scale, scores, reach, values, ahead):  # type: ignore[no-untyped-def]
    """Scaled products of each query head of a group with the keys of a span.

    Heads are computed in pairs, and the last of an odd number alone. The scores of a head are
    `reach` floats after those of the one before. With `ahead`, prefetch the values of these keys.
    """
    zero = broadcast(np.float32(0))
    factor = broadcast(scale)
    end = (span.length + BLOCK - 1) // BLOCK * BLOCK
    for block in range(0, end, BLOCK):
        block_at = (span.shared_at if block < span.shared else span.own_at) + block * size
        for head in range(0, group, 2):
            is_pair = head + 1 < group
            first_q = q_at + head * size
            second_q = first_q + size

            # The first 16 keys of the block and the others, for the first head and the second one.
            # Even and odd dimensions apart: eight sums, none of which waits for another.
            first_left_even = zero
            first_left_odd = zero
            first_right_even = zero
            first_right_odd = zero
            second_left_even = zero
            second_left_odd = zero
            second_right_even = zero
            second_right_odd = zero
            for i in range(0, size, 2):
                keys_at = block_at + i * BLOCK
                if ahead and head == 0:
                    for line in range(0, 2 * BLOCK, WIDTH):
                        prefetch(values, keys_at + line)

                left_even = load(keys, keys_at)
                right_even = load(keys, keys_at + WIDTH)
                left_odd = load(keys, keys_at + BLOCK)
                right_odd = load(keys, keys_at + BLOCK + WIDTH)
                even = repeat(query, first_q + i)
                odd = repeat(query, first_q + i + 1)
                first_left_even = fused(even, left_even, first_left_even)
                first_right_even = fused(even, right_even, first_right_even)
                first_left_odd = fused(odd, left_odd, first_left_odd)
                first_right_odd = fused(odd, right_odd, first_right_odd)
                if is_pair:
                    even = repeat(query, second_q + i)
                    odd = repeat(query, second_q + i + 1)
                    second_left_even = fused(even, left_even, second_left_even)
                    second_right_even = fused(even, right_even, second_right_even)
                    second_left_odd = fused(odd, left_odd, second_left_odd)
                    second_right_odd = fused(odd, right_odd, second_right_odd)

            scores_at = head * reach + block
            left = add(first_left_even, first_left_odd)
            right = add(first_right_even, first_right_odd)
            store(scores, scores_at, multiply(left, factor))
            store(scores, scores_at + WIDTH, multiply(right, factor))
            if is_pair:
                left = add(second_left_even, second_left_odd)
                right = add(second_right_even, second_right_odd)
                store(scores, scores_at + reach, multiply(left, factor))
                store(scores, scores_at + reach + WIDTH, multiply(right, factor))


@_inner
def _softmax(scores, start, count, end):  # type: ignore[no-untyped-def]
    """Softmax of `count` scores from `start` on, in place; up to `end` the weights are 0."""
    for i in range(start + count, start + end):
        scores[i] = -np.inf

    peaks = load(scores, start)
    for i in range(start + WIDTH, start + end, WIDTH):
        peaks = greater_than(peaks, load(scores, i))
    peak = broadcast(horizontal_max(peaks))

    sums = broadcast(np.float32(0))
    for i in range(start, start + end, WIDTH):
        weight = exp(subtract(load(scores, i), peak))
        store(scores, i, weight)
        sums = add(sums, weight)
    share = broadcast(np.float32(1) / horizontal_sum(sums))
    for i in range(start, start + end, WIDTH):
        store(scores, i, multiply(load(scores, i), share))


@_inner
def _mixture(scores, reach, group, size, values, span, out, out_at, keys, ahead):  # type: ignore[no-untyped-def]
    """Sum of the values of a span, weighted by the scores of each query head of a group.

    Two heads and two vectors of a value are added up at once where there are as many. Unless
    `ahead` is 0, prefetch the keys at that offset from the others, which are used next.
    """
    for i in range(out_at, out_at + group * size, WIDTH):
        store(out, i, broadcast(np.float32(0)))

    for first in range(0, span.length, BLOCK):
        last = min(first + BLOCK, span.length)
        is_shared = first < span.shared
        block = Block(span.shared_at if is_shared else span.own_at, first, last)
        for head in range(0, group, 2):
            fetched = ahead if head == 0 and not is_shared else 0
            paired = size // (2 * WIDTH) * 2 * WIDTH if head + 1 < group else 0
            for part in range(0, paired, 2 * WIDTH):
                _mix_four(
                    scores, reach, head, size, values, block, out, out_at, part, keys, fetched
                )
            for single in range(head, min(head + 2, group)):
                for part in range(paired, size, WIDTH):
                    _mix_one(
                        scores, reach, single, size, values, block, out, out_at, part, keys, fetched
                    )


@_inner
def _mix_four(scores, reach, head, size, values, block, out, out_at, part, keys, ahead):  # type: ignore[no-untyped-def]
    """Add the values of a block to four vectors: two from `part` on of a head, and two of the next.

    Even and odd keys are added up apart: eight sums, none of which waits for another.
    """
    first_scores = head * reach
    second_scores = first_scores + reach
    first_out = out_at + head * size + part
    second_out = first_out + size

    first_left_even = load(out, first_out)
    first_right_even = load(out, first_out + WIDTH)
    second_left_even = load(out, second_out)
    second_right_even = load(out, second_out + WIDTH)
    zero = broadcast(np.float32(0))
    first_left_odd = zero
    first_right_odd = zero
    second_left_odd = zero
    second_right_odd = zero
    for key in range(block.first, block.last - 1, 2):
        even_at = block.at + key * size + part
        odd_at = even_at + size
        if ahead != 0:
            for line in range(0, 2 * WIDTH, WIDTH):
                prefetch(keys, even_at + ahead + line)
                prefetch(keys, odd_at + ahead + line)

        left = load(values, even_at)
        right = load(values, even_at + WIDTH)
        first_weight = repeat(scores, first_scores + key)
        second_weight = repeat(scores, second_scores + key)
        first_left_even = fused(first_weight, left, first_left_even)
        first_right_even = fused(first_weight, right, first_right_even)
        second_left_even = fused(second_weight, left, second_left_even)
        second_right_even = fused(second_weight, right, second_right_even)

        left = load(values, odd_at)
        right = load(values, odd_at + WIDTH)
        first_weight = repeat(scores, first_scores + key + 1)
        second_weight = repeat(scores, second_scores + key + 1)
        first_left_odd = fused(first_weight, left, first_left_odd)
        first_right_odd = fused(first_weight, right, first_right_odd)
        second_left_odd = fused(second_weight, left, second_left_odd)
        second_right_odd = fused(second_weight, right, second_right_odd)

    # The last of an odd number of keys, which is an even one.
    if (block.last - block.first) % 2:
        key = block.last - 1
        even_at = block.at + key * size + part
        left = load(values, even_at)
        right = load(values, even_at + WIDTH)
        first_weight = repeat(scores, first_scores + key)
        second_weight = repeat(scores, second_scores + key)
        first_left_even = fused(first_weight, left, first_left_even)
        first_right_even = fused(first_weight, right, first_right_even)
        second_left_even = fused(second_weight, left, second_left_even)
        second_right_even = fused(second_weight, right, second_right_even)

    store(out, first_out, add(first_left_even, first_left_odd))
    store(out, first_out + WIDTH, add(first_right_even, first_right_odd))
    store(out, second_out, add(second_left_even, second_left_odd))
    store(out, second_out + WIDTH, add(second_right_even, second_right_odd))


@_inner
def _mix_one(scores, reach, head, size, values, block, out, out_at, part, keys, ahead):  # type: ignore[no-untyped-def]
    """Add the values of a block to one vector of a head, in the order of `_mix_four`."""
    head_scores = head * reach
    head_out = out_at + head * size + part
    even = load(out, head_out)
    odd = broadcast(np.float32(0))
    for key in range(block.first, block.last - 1, 2):
        value_at = block.at + key * size + part
        if ahead != 0:
            prefetch(keys, value_at + ahead)
            prefetch(keys, value_at + ahead + size)
        even = fused(repeat(scores, head_scores + key), load(values, value_at), even)
        odd = fused(repeat(scores, head_scores + key + 1), load(values, value_at + size), odd)
    if (block.last - block.first) % 2:
        key = block.last - 1
        value_at = block.at + key * size + part
        even = fused(repeat(scores, head_scores + key), load(values, value_at), even)
    store(out, head_out, add(even, odd))


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
    group = heads // kv
    head_floats = capacity * size
    for row in range(places.size):
        slot = slots[row]
        place = places[row]
        row_at = row * (heads + 2 * kv) * size
        angle_at = turns[row] * size
        next_slot = slots[min(row + 1, places.size - 1)]
        # Rows of one slot follow each other, and only the first fetches values ahead.
        is_first = row == 0 or slots[row - 1] != slot

        for head in range(heads):
            q_at = row_at + head * size
            _turned(qkv, q_at, size, q_norm, eps, bias, head * size, cos, sin, angle_at)

        for head in range(kv):
            # The row's own key and value.
            k_column = (heads + head) * size
            v_column = k_column + kv * size
            k_at = row_at + k_column
            v_at = row_at + v_column
            head_at = (slot * kv + head) * head_floats
            _turned(qkv, k_at, size, k_norm, eps, bias, k_column, cos, sin, angle_at)
            _keep(qkv, k_at, v_at, size, bias, v_column, keys, values, head_at, place)

            # What is used next are the keys of the next head, or of the next slot.
            ahead = 0  # keys of the same slot are cached already
            if next_slot != slot:
                if head + 1 < kv:
                    ahead = head_floats
                else:
                    ahead = next_slot * kv * head_floats - head_at

            q_at = row_at + head * group * size
            out_at = (row * heads + head * group) * size
            shared_at = (sources[slot] * kv + head) * head_floats
            span = KeySpan(shared_at, shared[slot], head_at, place + 1)
            _scores(qkv, q_at, group, size, keys, span, scale, scores, capacity, values, is_first)
            _mixture(scores, capacity, group, size, values, span, out, out_at, keys, ahead)


@_kernel("aaaafaaniii")
def rotate(  # type: ignore[no-untyped-def]
    qkv, bias, q_norm, k_norm, eps, cos, sin, turns, heads, kv, size
):
    """Add the biases of rows and rotate their query and key heads, in place and as `attend`
    does."""
    for row in range(turns.size):
        row_at = row * (heads + 2 * kv) * size
        angle_at = turns[row] * size
        if bias.size:
            for i in range((heads + kv) * size, (heads + 2 * kv) * size, WIDTH):
                store(qkv, row_at + i, add(load(qkv, row_at + i), load(bias, i)))
        for head in range(heads):
            column = head * size
            _turned(qkv, row_at + column, size, q_norm, eps, bias, column, cos, sin, angle_at)
        for head in range(heads, heads + kv):
            column = head * size
            _turned(qkv, row_at + column, size, k_norm, eps, bias, column, cos, sin, angle_at)


@_kernel("annnhhiiiifaa")
def attend_paths(  # type: ignore[no-untyped-def]
    qkv, paths, starts, owners, keys, values, capacity, heads, kv, size, scale, scores, out
):
    """Attend from rotated rows of training, each to the rows on its path, with the arithmetic of
    `attend`.

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
    group = heads // kv
    width = (heads + 2 * kv) * size
    no_bias = scores[:0]
    for slot in range(owners.size):
        start = starts[slot]
        length = starts[slot + 1] - start
        for place in range(length):
            row_at = paths[start + place] * width
            for head in range(kv):
                k_at = row_at + (heads + head) * size
                v_at = k_at + kv * size
                head_at = (slot * kv + head) * capacity * size
                _keep(qkv, k_at, v_at, size, no_bias, 0, keys, values, head_at, place)

        for place in range(length - owners[slot], length):
            row = paths[start + place]
            for head in range(kv):
                head_at = (slot * kv + head) * capacity * size
                q_at = row * width + head * group * size
                out_at = (row * heads + head * group) * size
                span = KeySpan(head_at, 0, head_at, place + 1)
                _scores(qkv, q_at, group, size, keys, span, scale, scores, capacity, values, False)
                _mixture(scores, capacity, group, size, values, span, out, out_at, keys, 0)


@_inner
def _score_slopes(weights, slopes, start, end, scale):  # type: ignore[no-untyped-def]
    """Replace the gradients of softmax weights from `start` on by those of the products of queries
    and keys, in place."""
    total = broadcast(np.float32(0))
    for i in range(start, start + end, WIDTH):
        total = fused(load(weights, i), load(slopes, i), total)
    mean = broadcast(horizontal_sum(total))

    factor = broadcast(scale)
    for i in range(start, start + end, WIDTH):
        change = multiply(load(weights, i), subtract(load(slopes, i), mean))
        store(slopes, i, multiply(change, factor))


@_inner
def _gather(rows, paths, start, length, width, column, size, into, into_at):  # type: ignore[no-untyped-def]
    """Copy a vector of each row of a path to `into`, `WIDTH` numbers of all rows after the
    other."""
    for part in range(0, size, WIDTH):
        for place in range(length):
            value = load(rows, paths[start + place] * width + column + part)
            store(into, into_at + part * length + place * WIDTH, value)


@_inner
def _scatter(rows, paths, start, length, width, column, size, gathered, gathered_at):  # type: ignore[no-untyped-def]
    """Copy back what `_gather` copied."""
    for part in range(0, size, WIDTH):
        for place in range(length):
            value = load(gathered, gathered_at + part * length + place * WIDTH)
            store(rows, paths[start + place] * width + column + part, value)


@_inner
def _query_slopes(  # type: ignore[no-untyped-def]
    qkv, q_at, slope, slope_at, size, length, count, weights, slopes, first, gathered, qkv_slope
):
    """Add the gradients of one query, and of the `count` keys and values that it attends to.

    `gathered` has the keys of the path, then the gradients of its keys and of its values.
    """
    k_slopes = length * size
    v_slopes = 2 * length * size
    for part in range(0, size, WIDTH):
        query = load(qkv, q_at + part)
        out_slope = load(slope, slope_at + part)
        q_slope = load(qkv_slope, q_at + part)
        for key in range(count):
            key_at = part * length + key * WIDTH
            k_slope_at = k_slopes + key_at
            v_slope_at = v_slopes + key_at
            score_slope = repeat(slopes, first + key)
            weight = repeat(weights, first + key)
            q_slope = fused(score_slope, load(gathered, key_at), q_slope)
            store(gathered, k_slope_at, fused(score_slope, query, load(gathered, k_slope_at)))
            store(gathered, v_slope_at, fused(weight, out_slope, load(gathered, v_slope_at)))
        store(qkv_slope, q_at + part, q_slope)


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
    """Add the gradients of rotated rows, from that of what `attend_paths` wrote.

    Its other arguments are the same. With p the softmax weights of a row: dv_j = p_j do,
    dp_j = v_j do, ds_j = p_j (dp_j - sum_i p_i dp_i) scale, dq = sum_j ds_j k_j and dk_j = ds_j q.

    Args:
        weights, slopes: two buffers as `scores`.
        gathered: buffer of 3 * capacity * size floats, for the keys of a path and the
            gradients of its keys and values.
        slope: [rows, heads, size], gradient of the output.
        qkv_slope: like `qkv`.
    """
    group = heads // kv
    width = (heads + 2 * kv) * size
    one = np.float32(1)
    for slot in range(owners.size):
        start = starts[slot]
        length = starts[slot + 1] - start
        k_slopes = length * size
        v_slopes = 2 * length * size
        for head in range(kv):
            # Keys and values of the path, both as columns; and keys and gradients to add to.
            head_at = (slot * kv + head) * capacity * size
            k_column = (heads + head) * size
            v_column = (heads + kv + head) * size
            for place in range(length):
                row_at = paths[start + place] * width
                _columns(qkv, row_at + k_column, size, keys, head_at, place)
                _columns(qkv, row_at + v_column, size, values, head_at, place)
            _gather(qkv, paths, start, length, width, k_column, size, gathered, 0)
            _gather(qkv_slope, paths, start, length, width, k_column, size, gathered, k_slopes)
            _gather(qkv_slope, paths, start, length, width, v_column, size, gathered, v_slopes)

            for place in range(length - owners[slot], length):
                # Softmax weights again, and their gradients: the products of `slope` and values.
                row = paths[start + place]
                count = place + 1
                end = (count + BLOCK - 1) // BLOCK * BLOCK
                q_at = row * width + head * group * size
                slope_at = (row * heads + head * group) * size
                span = KeySpan(head_at, 0, head_at, count)
                _scores(qkv, q_at, group, size, keys, span, scale, weights, capacity, values, False)
                _dots(
                    slope, slope_at, group, size, values, span, one, slopes, capacity, values, False
                )

                for query in range(group):
                    first = query * capacity
                    for i in range(first + count, first + end):
                        slopes[i] = 0.0  # what is stored there may be anything
                    _score_slopes(weights, slopes, first, end, scale)
                    _query_slopes(
                        qkv,
                        q_at + query * size,
                        slope,
                        slope_at + query * size,
                        size,
                        length,
                        count,
                        weights,
                        slopes,
                        first,
                        gathered,
                        qkv_slope,
                    )

            _scatter(qkv_slope, paths, start, length, width, k_column, size, gathered, k_slopes)
            _scatter(qkv_slope, paths, start, length, width, v_column, size, gathered, v_slopes)


@_inner
def _norm_back(x, x_at, size, weight, eps, slope, slope_at, beside, out, weight_slope):  # type: ignore[no-untyped-def]
    """Gradients of `_norm` of one vector: write that of the vector, plus `beside` if not empty,
    and add that of the weight.

    y = x r w with r = (mean x^2 + eps)^-1/2, so dx = r w dy - x r^3 mean(w dy x) and dw = sum of
    dy x r.
    """
    squares = broadcast(np.float32(0))
    products = broadcast(np.float32(0))
    for i in range(0, size, WIDTH):
        value = load(x, x_at + i)
        squares = fused(value, value, squares)
        weighted = multiply(load(weight, i), load(slope, slope_at + i))
        products = fused(weighted, value, products)
    r = np.float32(1) / np.float32(np.sqrt(horizontal_sum(squares) / np.float32(size) + eps))

    factor = broadcast(r)
    back = broadcast(-r * r * r * horizontal_sum(products) / np.float32(size))
    for i in range(0, size, WIDTH):
        value = load(x, x_at + i)
        out_slope = load(slope, slope_at + i)
        change = fused(value, back, multiply(factor, multiply(load(weight, i), out_slope)))
        if beside.size:
            change = add(change, load(beside, slope_at + i))
        store(out, slope_at + i, change)
        scaled = multiply(out_slope, factor)
        store(weight_slope, i, fused(scaled, value, load(weight_slope, i)))


@_kernel("aafhaaa", "aafaaaa")
def norm_slope(hidden, weight, eps, slope, beside, out, weight_slope):  # type: ignore[no-untyped-def]
    """Gradients of RMSNorm of rows: write those of the rows plus `beside`, if not empty, and add
    that of the weight."""
    size = weight.size
    for row_at in range(0, hidden.size, size):
        _norm_back(hidden, row_at, size, weight, eps, slope, row_at, beside, out, weight_slope)


@_kernel("aaafaaniiiaaa")
def rotate_slope(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, eps, cos, sin, turns, heads, kv, size, slope, q_norm_slope, k_norm_slope
):
    """Replace gradients of rotated rows by those of the projections with their bias, `qkv`; add
    those of the head norms."""
    half = size // 2
    nothing = slope[:0]
    for row in range(turns.size):
        row_at = row * (heads + 2 * kv) * size
        angle_at = turns[row] * size
        for head in range(heads + kv):
            head_at = row_at + head * size
            for i in range(half):
                left = slope[head_at + i]
                right = slope[head_at + half + i]
                slope[head_at + i] = left * cos[angle_at + i] + right * sin[angle_at + half + i]
                slope[head_at + half + i] = (
                    right * cos[angle_at + half + i] - left * sin[angle_at + i]
                )

            if q_norm.size and head < heads:
                _norm_back(
                    qkv, head_at, size, q_norm, eps, slope, head_at, nothing, slope, q_norm_slope
                )
            elif q_norm.size:
                _norm_back(
                    qkv, head_at, size, k_norm, eps, slope, head_at, nothing, slope, k_norm_slope
                )


@_kernel("hiihh")
def swiglu_slope(both, rows, size, slope, out):  # type: ignore[no-untyped-def]
    """Gradients of the gates and values of `swiglu`, from that of its output.

    With s = sigmoid(gate): d gate = slope value s (1 + gate (1 - s)) and d value = slope gate s.
    """
    one = broadcast(np.float32(1))
    zero = broadcast(np.float32(0))
    for row in range(rows):
        for i in range(0, size, WIDTH):
            gate_at = 2 * row * size + i
            value_at = (2 * row + 1) * size + i
            gate = load(both, gate_at)
            value = load(both, value_at)
            out_slope = load(slope, row * size + i)

            sigmoid = divide(one, add(one, exp(subtract(zero, gate))))
            bend = fused(multiply(gate, subtract(one, sigmoid)), one, one)
            store(out, gate_at, multiply(multiply(out_slope, value), multiply(sigmoid, bend)))
            store(out, value_at, multiply(out_slope, multiply(gate, sigmoid)))


@_kernel("aniii")
def copy_blocks(store, moves, heads, blocks, width):  # type: ignore[no-untyped-def]
    """Copy positions from slot to slot, one move after the other, and the rest of the blocks that
    they begin and end in.

    Args:
        store: [slots, heads, blocks, width].
        moves: [moves, 4]: source, target, first position, end.
        heads, blocks, width: heads of a slot, blocks of a head, floats of a block.
    """
    for m in range(0, moves.size, 4):
        source = moves[m]
        target = moves[m + 1]
        first = moves[m + 2] // BLOCK
        count = -(-moves[m + 3] // BLOCK) - first
        for head in range(heads):
            source_at = ((source * heads + head) * blocks + first) * width
            target_at = ((target * heads + head) * blocks + first) * width
            for i in range(count * width):
                store[target_at + i] = store[source_at + i]


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
        source = moves[m]
        target = moves[m + 1]
        complete = moves[m + 3] // BLOCK * BLOCK
        _end_sharing(target, moves[m + 2], sources, shared)
        sources[target] = sources[source] if shared[source] >= complete else source
        shared[target] = complete


@_kernel("nnn")
def end_sharing(rewound, sources, shared):  # type: ignore[no-untyped-def]
    """End the sharing of positions that will be overwritten: those of each slot from a position on,
    [slots, 2]."""
    for i in range(0, rewound.size, 2):
        _end_sharing(rewound[i], rewound[i + 1], sources, shared)
