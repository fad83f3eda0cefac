"""What a user's function of slime or Miles is, by how slime calls it and by what it uses."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from turnwright.envs.foreign import Registered
from turnwright.envs.user_imports import public_name

OTHERS = ("task", "data_source", "prompts", "completions", "input_batch", "infer_request")
"""First parameters of functions of other frameworks, and of play functions of ours."""


def takes_a_sample(target: Any) -> bool:
    """Whether a function is called as `generate(args, sample, sampling_params)`.

    slime calls it by position. Names decide only where another reading remains: a play
    function takes two arguments.
    """
    signature = signature_of(target)
    if signature is None or not _is_async(target):
        return False
    evaluation = {"evaluation": False} if "evaluation" in signature.parameters else {}
    if not binds(signature, None, None, None, **evaluation):
        return False

    first = next(iter(signature.parameters), "")
    if first in OTHERS:
        return False
    takes_two = binds(signature, None, None)
    return not takes_two or first == "args" or _uses_slime(target)


def takes_one_input(target: Any) -> bool:
    """Whether a function, or a class of callable objects, is one of Miles, which
    takes a `GenerateFnInput`."""
    function = target
    if inspect.isclass(target):
        # Miles makes one object of the class, and calls that.
        function = functools.partial(target.__call__, None) if "__call__" in vars(target) else None
    signature = signature_of(function)
    if signature is None or not _is_async(function) or len(signature.parameters) != 1:
        return False

    (parameter,) = signature.parameters.values()
    hint = parameter.annotation
    hint_name = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
    if hint_name.rpartition(".")[2] == "GenerateFnInput":
        return True

    # Without an annotation, by the attributes of the input that its code reads.
    code = getattr(_innermost(function), "__code__", None)
    names_read = set(code.co_names) if code is not None else set()
    return "sample" in names_read and bool(names_read & {"args", "state", "sampling_params"})


def plays_session(target: Any) -> bool:
    """Whether a function is an agent function of Miles, called as
    `run(base_url=, prompt=, request_kwargs=, metadata=)`."""
    signature = signature_of(target)
    if signature is None or not _is_async(target):
        return False
    if not {"base_url", "prompt"} <= signature.parameters.keys():
        return False
    return binds(signature, base_url=None, prompt=None, request_kwargs=None, metadata=None)


def builds_env(target: Any) -> bool:
    """Whether a function builds an interaction environment:
    `build_env(sample=sample, args=args)`, or by position."""
    if not inspect.isfunction(target) or _is_async(target):
        return False
    if parameter_names(target)[:2] == ("sample", "args"):
        return True
    if target.__name__ != "build_env":
        return False

    signature = inspect.signature(target)
    needs_both = binds(signature, None, None) and not binds(signature, None)
    return needs_both or (binds(signature, sample=None, args=None) and _uses_slime(target))


def parameter_names(target: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters; none of anything else."""
    try:
        return tuple(inspect.signature(target).parameters) if inspect.isfunction(target) else ()
    except (TypeError, ValueError):
        return ()


def signature_of(target: Any) -> inspect.Signature | None:
    """Return the signature of a function, or of the calls to a callable object;
    None of anything else."""
    if inspect.isclass(target) or isinstance(target, Registered) or not callable(target):
        return None
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def binds(signature: inspect.Signature, *args: Any, **options: Any) -> bool:
    """Whether a function can be called with such arguments."""
    try:
        signature.bind(*args, **options)
    except TypeError:
        return False
    return True


def _innermost(target: Any) -> Any:
    """Return the function that a callable object, partial arguments or decorators end in."""
    function = target.func if isinstance(target, functools.partial) else target
    if not inspect.isroutine(function):
        function = type(function).__call__
    return inspect.unwrap(function)


def _is_async(target: Any) -> bool:
    """Whether calls are awaited; also of a decorated function, whose wrapper returns
    what the function did."""
    return inspect.iscoroutinefunction(_innermost(target))


def _uses_slime(target: Any) -> bool:
    """Whether the module of a function imports from slime or Miles."""
    for value in list(getattr(_innermost(target), "__globals__", {}).values()):
        home = getattr(value, "__name__" if inspect.ismodule(value) else "__module__", None)
        if public_name(str(home)).partition(".")[0] in ("slime", "miles"):
            return True
    return False
