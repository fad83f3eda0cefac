"""Follow a Python launcher without running it: texts, arguments with their defaults, and
functions of files beside it.

The syntax tree is interpreted for a few kinds of values (texts, numbers, lists, tables,
instances of data classes and of `argparse`). No module is imported and nothing of the system is
called. What depends on anything else is `Unknown`; in a text it stays as `${source}`, so that
settings which hold it can be named.
"""

from __future__ import annotations

import ast
import math
import operator
import os.path
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwright.errors import ConfigError
from turnwright.files import resolved

MAX_STEPS = 200_000
MAX_CALLS = 40
MAX_TEXT = 200_000
MAX_MODULES = 40
MAX_FILE = 1_000_000
_MANY = 10_000

_RUNS = {"run", "call", "check_call", "check_output", "Popen", "system", "popen", "execvp"}
"""Names of functions that start a program, besides those that begin with `exec_command`."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Value that only a run would give."""

    source: str
    imported: bool = False
    """Whether it is an object of a module that is not read."""

    @property
    def placeholder(self) -> str:
        """Text in place of the value within a text."""
        return "${" + re.sub(r"\W+", "_", self.source)[:40].strip("_") + "}"


@dataclass(slots=True)
class Scope:
    """Names of a module, a function or a class body."""

    names: dict[str, Any]
    outer: Scope | None = None
    module: str = ""
    folder: Path | None = None
    path: Path | None = None
    """File of a module beside the launcher; None in the launcher itself."""
    function: str = ""
    """Name of the function whose body it is."""

    def find(self, name: str) -> Any:
        """Return the value of a name; None if it has none here."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None

    def has(self, name: str) -> bool:
        """Return whether a name has a value here."""
        scope: Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.outer
        return scope is not None


@dataclass(slots=True)
class Record:
    """Instance of a class: of a data class with its fields, or of an unknown one with the
    arguments of its call."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)

    def put(self, fields: Mapping[str, Any]) -> None:
        """Replace its fields."""
        self.fields.clear()
        self.fields.update(fields)


@dataclass(frozen=True, slots=True)
class Function:
    """Function of the launcher or of a file beside it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: Record | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return "lambda" if isinstance(self.node, ast.Lambda) else self.node.name


@dataclass(frozen=True, slots=True)
class Class:
    """Class of the launcher or of a file beside it."""

    node: ast.ClassDef
    scope: Scope

    @property
    def name(self) -> str:
        """Its name."""
        return self.node.name


@dataclass(frozen=True, slots=True)
class LauncherCall:
    """Call of a function that the launcher imports."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    function: str
    """Function in whose body it is; empty for the module's."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of a training: its program and the text or the words of its arguments."""

    program: str
    text: str | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


class Launcher:
    """Interpreter of one launcher."""

    def __init__(self, text: str, name: str, folder: Path | None = None) -> None:
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{name}: is no Python file ({error})") from None
        self.launches: list[Launch] = []
        self.calls: list[LauncherCall] = []
        self.unresolved: list[str] = []
        self.missing: list[str] = []
        self.decided: dict[str, Any] = {}
        """Arguments with their defaults by which branches were chosen."""
        self.environment: list[str] = []
        """Variables of the process environment, which are taken as not set."""
        self.defaults: dict[str, Any] = {}
        """Arguments of the launcher that have their defaults."""
        self.last_names: dict[str, Any] = {}
        """Names of the functions that were followed, with their last values."""
        self._modules: dict[Path, Scope] = {}
        self._steps = 0
        self._depth = 0
        names = {"__name__": "__main__"} | (
            {} if folder is None else {"__file__": str(folder / name)}
        )
        self.scope = Scope(names, module=Path(name).stem, folder=folder)

    def follow(self) -> None:
        """Follow the module as a program; then, if nothing was started, its functions
        that start something."""
        try:
            self._body(self.tree.body, self.scope)
            if self.launches or any(
                one.name.endswith(("Trainer", "Arguments")) for one in self.calls
            ):
                return
            for node in self.tree.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self._starts(node):
                    self.call(Function(node, self.scope), (), {})
        except (_TooLong, RecursionError):
            self.missing.append("the launcher is too long to be followed to its end")

    @staticmethod
    def _starts(node: ast.AST) -> bool:
        texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
        return any(isinstance(one, str) and one.lstrip().startswith("--") for one in texts)

    # Statements

    def _body(self, body: Sequence[ast.stmt], scope: Scope) -> _Returned | None:
        for node in body:
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise _TooLong
            if (returned := self._statement(node, scope)) is not None:
                return returned
        return None

    def _statement(self, node: ast.stmt, scope: Scope) -> _Returned | None:
        handle = _STATEMENTS.get(type(node))
        return None if handle is None else handle(self, node, scope)

    def _assignment(self, node: ast.Assign, scope: Scope) -> None:
        found = self.value(node.value, scope)
        for target in node.targets:
            self._assign(target, found, scope)

    def _annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self._assign(node.target, self.value(node.value, scope), scope)

    def _augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        joined = ast.BinOp(left=_loaded(node.target), op=node.op, right=node.value)
        self._assign(node.target, self.value(ast.copy_location(joined, node), scope), scope)

    def _expression(self, node: ast.Expr, scope: Scope) -> None:
        self.value(node.value, scope)

    def _return(self, node: ast.Return, scope: Scope) -> _Returned:
        return _Returned(None if node.value is None else self.value(node.value, scope))

    def _raise(self, node: ast.Raise, scope: Scope) -> _Returned:
        return _Returned(Unknown(_ERROR))

    def _if(self, node: ast.If, scope: Scope) -> _Returned | None:
        truth = self._decide(node.test, scope)
        if truth is not None:
            return self._body(node.body if truth else node.orelse, scope)
        return self._either([node.body, node.orelse], scope, ast.unparse(node.test))

    def _while(self, node: ast.While, scope: Scope) -> None:
        self._forget(node.body, scope, ast.unparse(node.test))

    def _with(self, node: ast.With | ast.AsyncWith, scope: Scope) -> _Returned | None:
        for item in node.items:
            opened = self.value(item.context_expr, scope)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, opened, scope)
        return self._body(node.body, scope)

    def _try(self, node: ast.Try, scope: Scope) -> _Returned | None:
        return self._body([*node.body, *node.orelse], scope) or self._body(node.finalbody, scope)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        scope.names[node.name] = Function(node, scope)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        scope.names[node.name] = Class(node, scope)

    def _import(self, node: ast.Import, scope: Scope) -> None:
        for one in node.names:
            bound = one.asname or one.name.partition(".")[0]
            scope.names[bound] = self._module(one.name, scope) or Unknown(one.name)

    def _import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        module, level = node.module or "", node.level
        found = self._module(module, scope, level)
        for one in node.names:
            value: Any = None
            if found is not None and found.has(one.name):
                value = found.find(one.name)
            else:
                value = self._module(f"{module}.{one.name}".lstrip("."), scope, level)
            bound = one.asname or one.name
            unknown = Unknown(f"{module}.{one.name}".lstrip("."), imported=not level)
            scope.names[bound] = unknown if value is None else value

    def _module(self, dotted: str, scope: Scope, level: int = 0) -> Scope | None:
        """Return the names of a module whose file is beside the launcher or in a folder above
        it; None for another."""
        if scope.folder is None:
            return None
        parts = [part for part in dotted.split(".") if part]
        above = [scope.folder, *scope.folder.parents][:7]
        folders = above[level - 1 : level] if level else above
        for folder in folders:
            inner = folder.joinpath(*parts)
            for path in (inner.with_name(f"{inner.name}.py"), inner / "__init__.py"):
                if parts and path.is_file():
                    return self._file(path)
        return None

    def _file(self, path: Path) -> Scope | None:
        path = resolved(path)
        if path in self._modules:
            return self._modules[path]
        if len(self._modules) >= MAX_MODULES or path.stat().st_size > MAX_FILE:
            return None
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        self._modules[path] = scope = Scope(
            {"__name__": path.stem, "__file__": str(path)},
            module=path.stem,
            folder=path.parent,
            path=path,
        )
        self._body(tree.body, scope)
        return scope

    def _decide(self, test: ast.expr, scope: Scope) -> bool | None:
        """Return the truth of a condition; None if it is unknown."""
        truth = self._truth(self.value(test, scope))
        self._note_arguments(test)
        return truth

    def _note_arguments(self, test: ast.expr) -> None:
        for one in ast.walk(test):
            name = one.attr if isinstance(one, ast.Attribute) else ""
            if name in self.defaults and not isinstance(self.defaults[name], Unknown):
                self.decided[name] = self.defaults[name]

    def _either(
        self, bodies: Sequence[Sequence[ast.stmt]], scope: Scope, condition: str
    ) -> _Returned | None:
        """Follow branches of which one is taken, and keep what they agree on."""
        before, ends, returns = dict(scope.names), [], []
        kept = {
            key: list(one) if isinstance(one, list) else dict(one)
            for key, one in before.items()
            if _is_mutable(one)
        }
        records = [one for one in before.values() if isinstance(one, Record)]
        fields_before = [dict(one.fields) for one in records]
        endings = []
        for body in bodies:
            scope.names.clear()
            scope.names.update(before)
            scope.names.update({key: one.copy() for key, one in kept.items()})
            for one, own in zip(records, fields_before, strict=True):
                one.put(own)
            returned = self._body(body, scope)
            if returned is None:
                ends.append(dict(scope.names))
                endings.append([dict(one.fields) for one in records])
            elif not (isinstance(returned.value, Unknown) and returned.value.source == _ERROR):
                returns.append(returned)
        unknown = Unknown(f"if {condition}")
        if returns:
            same = not ends and all(one.value == returns[0].value for one in returns)
            return (
                returns[0]
                if same
                else _Returned(self._joined([one.value for one in returns], unknown))
            )
        if not ends:
            return _Returned(Unknown(_ERROR))
        scope.names.clear()
        for name in dict.fromkeys(key for end in ends for key in end):
            scope.names[name] = self._joined([end.get(name) for end in ends], unknown)
        for at, one in enumerate(records):
            keys = dict.fromkeys(key for end in endings for key in end[at])
            one.put(
                {key: self._joined([end[at].get(key) for end in endings], unknown) for key in keys}
            )
        return None

    def _joined(self, values: Sequence[Any], unknown: Unknown) -> Any:
        """Return the value that branches have in common; of texts, the start that they share."""
        first, *rest = values
        if all(one is first or (type(one) is type(first) and one == first) for one in rest):
            return first
        if all(isinstance(one, str) for one in values):
            return _shared_start([str(one) for one in values]) + self._place(unknown)
        if all(isinstance(one, list) for one in values):
            count = next(
                (
                    at
                    for at, group in enumerate(zip(*values, strict=False))
                    if any(g != group[0] for g in group)
                ),
                None,
            )
            least = min(len(one) for one in values)
            return [*first[: least if count is None else count], self._place(unknown)]
        return unknown

    def _match(self, node: ast.Match, scope: Scope) -> _Returned | None:
        subject = self.value(node.subject, scope)
        self._note_arguments(node.subject)
        if not _is_known(subject):
            return self._either(
                [case.body for case in node.cases], scope, ast.unparse(node.subject)
            )
        for case in node.cases:
            fits = self._fits(case.pattern, subject, scope)
            if fits is None:
                return self._either(
                    [one.body for one in node.cases], scope, ast.unparse(node.subject)
                )
            if fits:
                return self._body(case.body, scope)
        return None

    def _fits(self, pattern: ast.pattern, subject: Any, scope: Scope) -> bool | None:
        match pattern:
            case ast.MatchValue(value=value):
                expected = self.value(value, scope)
                return bool(expected == subject) if _is_known(expected) else None
            case ast.MatchSingleton(value=expected):
                return subject is expected
            case ast.MatchOr(patterns=patterns):
                found = [self._fits(one, subject, scope) for one in patterns]
                return True if True in found else None if None in found else False
            case ast.MatchAs(pattern=None):
                return True
        return None

    def _for(self, node: ast.For, scope: Scope) -> _Returned | None:
        values = self.value(node.iter, scope)
        if not isinstance(values, list | tuple) or len(values) > _MANY:
            self._forget(node.body, scope, f"for {ast.unparse(node.target)}")
            return None
        for one in values:
            self._assign(node.target, one, scope)
            if (returned := self._body(node.body, scope)) is not None:
                return returned
        return None

    def _forget(self, body: Sequence[ast.stmt], scope: Scope, source: str) -> None:
        """Mark what a loop of unknown length changes."""
        for node in body:
            for one in ast.walk(node):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    old = scope.find(one.id)
                    unknown = Unknown(source)
                    scope.names[one.id] = (
                        old + self._place(unknown) if isinstance(old, str) else unknown
                    )

    def _assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope.names[name] = value
            case ast.Attribute(value=owner, attr=attribute):
                if isinstance(record := self.value(owner, scope), Record):
                    record.fields[attribute] = value
            case ast.Subscript(value=owner, slice=key):
                found, index = self.value(owner, scope), self.value(key, scope)
                if isinstance(found, dict) and isinstance(index, str | int):
                    found[index] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                known = isinstance(value, list | tuple) and len(value) == len(parts)
                for at, part in enumerate(parts):
                    self._assign(part, value[at] if known else Unknown(ast.unparse(part)), scope)

    # Values

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """Return the value of an expression."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooLong
        found = self._value(node, scope)
        if isinstance(found, str) and len(found) > MAX_TEXT:
            raise ConfigError(f"a text of the launcher has over {MAX_TEXT} characters")
        return found

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        handle = _VALUES.get(type(node))
        return Unknown(_short(node)) if handle is None else handle(self, node, scope)

    def _name(self, node: ast.Name, scope: Scope) -> Any:
        return scope.find(node.id) if scope.has(node.id) else Unknown(node.id)

    def _formatted(self, node: ast.JoinedStr, scope: Scope) -> str:
        return "".join(self._piece(one, scope) for one in node.values)

    def _binary(self, node: ast.BinOp, scope: Scope) -> Any:
        return self._operation(
            self.value(node.left, scope), node.op, self.value(node.right, scope), node
        )

    def _chosen(self, node: ast.IfExp, scope: Scope) -> Any:
        truth = self._decide(node.test, scope)
        if truth is not None:
            return self.value(node.body if truth else node.orelse, scope)
        both = [self.value(node.body, scope), self.value(node.orelse, scope)]
        return self._joined(both, Unknown(f"if {ast.unparse(node.test)}"))

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set, scope: Scope) -> list[Any]:
        return self._items(node.elts, scope)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        return self._item(self.value(node.value, scope), self.value(node.slice, scope), node)

    def _named_expression(self, node: ast.NamedExpr, scope: Scope) -> Any:
        found = self.value(node.value, scope)
        self._assign(node.target, found, scope)
        return found

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        if isinstance(owner, Record):
            if node.attr in owner.fields:
                return owner.fields[node.attr]
            if node.attr in owner.methods:
                method = Function(
                    owner.methods[node.attr].node, owner.methods[node.attr].scope, owner
                )
                is_property = _is_property(method.node)
                return self.call(method, (), {}) if is_property else method
        if isinstance(owner, Scope) and owner.has(node.attr):
            return owner.find(node.attr)
        if isinstance(owner, str) and node.attr in ("name", "stem", "parent"):
            return {
                "name": Path(owner).name,
                "stem": Path(owner).stem,
                "parent": str(Path(owner).parent),
            }[node.attr]
        return Unknown(_short(node))

    def _piece(self, node: ast.expr, scope: Scope) -> str:
        if isinstance(node, ast.FormattedValue):
            found = self.value(node.value, scope)
            if node.format_spec is not None and isinstance(found, str | int | float):
                spec = self._value(node.format_spec, scope)
                try:
                    return format(found, spec)
                except (TypeError, ValueError):
                    return self._place(Unknown(_short(node.value)))
            return self._text(found, _short(node.value))
        return self._text(self.value(node, scope), _short(node))

    def _text(self, value: Any, source: str) -> str:
        if isinstance(value, str | int | float | bool | type(None)):
            return str(value)
        if isinstance(value, list | tuple | dict) and _is_plain(value):
            return str(value)
        # the name in the launcher tells the user more than what it comes from
        return self._place(Unknown(source))

    def _place(self, unknown: Unknown) -> str:
        if unknown.placeholder not in self.unresolved:
            self.unresolved.append(unknown.placeholder)
        return unknown.placeholder

    def _operation(self, left: Any, op: ast.operator, right: Any, node: ast.expr) -> Any:
        if isinstance(op, ast.Add) and (isinstance(left, str) or isinstance(right, str)):
            parts = [left, right]
            if all(isinstance(one, str | Unknown) for one in parts):
                return "".join(one if isinstance(one, str) else self._place(one) for one in parts)
            return Unknown(_short(node))
        if (
            isinstance(op, ast.Add)
            and isinstance(left, list | tuple)
            and isinstance(right, list | tuple)
        ):
            return [*left, *right]
        if isinstance(op, ast.Add) and isinstance(left, list) and isinstance(right, Unknown):
            return [*left, self._place(right)]
        if isinstance(op, ast.Div) and isinstance(left, str):
            return str(Path(left) / right) if isinstance(right, str) else Unknown(_short(node))
        if isinstance(op, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
            return {**left, **right}
        if type(op) in _ARITHMETIC and _is_number(left) and _is_number(right):
            try:
                found = _ARITHMETIC[type(op)](left, right)
            except (ArithmeticError, ValueError):
                return Unknown(_short(node))
            if isinstance(found, int | float) and abs(found) < 10**18:
                return found
        if isinstance(op, ast.Mod) and isinstance(left, str) and _is_plain(right):
            try:
                return left % (tuple(right) if isinstance(right, list) else right)
            except (TypeError, ValueError, KeyError):
                pass
        return Unknown(_short(node))

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            truth = self._truth(value)
            return Unknown(_short(node)) if truth is None else not truth
        if isinstance(node.op, ast.USub) and _is_number(value):
            return -value
        return Unknown(_short(node))

    def _boolean(self, node: ast.BoolOp, scope: Scope) -> Any:
        """Return the first value that decides; unknown if an unknown one comes before
        it and does not agree."""
        stops = isinstance(node.op, ast.Or)
        unknown = False
        found: Any = None
        for one in node.values:
            found = self.value(one, scope)
            truth = self._truth(found)
            if truth is stops and not unknown:
                return found
            if truth is stops:
                return Unknown(_short(node)) if stops else False
            unknown = unknown or truth is None
        return Unknown(_short(node)) if unknown else found

    def _compare(self, node: ast.Compare, scope: Scope) -> Any:
        left, op, right = (
            self.value(node.left, scope),
            node.ops[0],
            self.value(node.comparators[0], scope),
        )
        if len(node.ops) > 1:
            return Unknown(_short(node))
        if (
            isinstance(op, ast.In | ast.NotIn)
            and isinstance(right, str)
            and isinstance(left, str)
            and left in right
        ):
            return isinstance(op, ast.In)
        if not (_is_known(left) and _is_known(right)):
            return Unknown(_short(node))
        try:
            return bool(_COMPARISONS[type(op)](left, right))
        except (KeyError, TypeError):
            return Unknown(_short(node))

    @staticmethod
    def _truth(value: Any) -> bool | None:
        if isinstance(value, Unknown):
            return None
        if (
            isinstance(value, str)
            and value.startswith("${")
            and value.endswith("}")
            and " " not in value
        ):
            return None
        return bool(value)

    def _items(self, parts: Sequence[ast.expr], scope: Scope) -> list[Any]:
        found: list[Any] = []
        for one in parts:
            if isinstance(one, ast.Starred):
                inner = self.value(one.value, scope)
                found += inner if isinstance(inner, list | tuple) else [Unknown(_short(one.value))]
            else:
                found.append(self.value(one, scope))
        return found

    def _table(self, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            given = self.value(value, scope)
            if key is None:
                found.update(given if isinstance(given, dict) else {"**": Unknown(_short(value))})
            elif isinstance(name := self.value(key, scope), str | int | bool | type(None)):
                found[name] = given
        return found

    def _item(self, owner: Any, key: Any, node: ast.expr) -> Any:
        try:
            if (
                isinstance(owner, dict | list | tuple | str)
                and not isinstance(key, Unknown)
                and "**" not in owner
            ):
                return owner[key]
        except (KeyError, IndexError, TypeError):
            pass
        return Unknown(_short(node))

    # Calls

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        args = tuple(self._items(node.args, scope))
        kwargs: dict[str, Any] = {}
        for one in node.keywords:
            given = self.value(one.value, scope)
            if one.arg is not None:
                kwargs[one.arg] = given
            else:
                kwargs.update(
                    given if isinstance(given, dict) else {"**": Unknown(_short(one.value))}
                )
        if last == "execute_train":
            return self._execute_train(args, kwargs)
        if last in ("run", "Fire") and args and isinstance(args[0], Function):
            return self.call(args[0], (), {})
        if last in _RUNS or last.startswith("exec_command"):
            return self._command(args, kwargs)
        if (found := self._builtin(name, last, node, args, kwargs, scope)) is not _NOT_HERE:
            return found
        target = self.value(node.func, scope)
        if isinstance(target, Function):
            return self.call(target, args, kwargs)
        if isinstance(target, Class):
            return self._instance(target, args, kwargs)
        self.calls.append(LauncherCall(name, args, kwargs, scope.function))
        if last[:1].isupper():
            return Record(last, dict(kwargs))
        return Unknown(_short(node))

    def _execute_train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        text = kwargs.get("train_args", args[0] if args else None)
        program = kwargs.get("train_script", "train.py")
        if not isinstance(text, str):
            text = self._place(text if isinstance(text, Unknown) else Unknown("train_args"))
        self.launches.append(Launch(program if isinstance(program, str) else "train.py", text))
        return None

    def _command(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = (
            args[-1]
            if len(args) == 2 and isinstance(args[1], list)
            else args[0]
            if args
            else kwargs.get("args")
        )
        if isinstance(given, str):
            self.launches.append(Launch("", given))
        elif isinstance(given, list):
            words = [self._text(one, source_of(one, "?")) for one in given]
            self.launches.append(Launch("", words=tuple(words)))
        return Unknown("the result of a command")

    def _builtin(
        self,
        name: str,
        last: str,
        node: ast.Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        scope: Scope,
    ) -> Any:
        """Return the result of a function that is known here; `_NOT_HERE` for another."""
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
            return self._environment_variable(args, kwargs)
        if name in ("os.path.join", "path.join"):
            return (
                os.path.join(*args)
                if args and all(isinstance(one, str) for one in args)
                else Unknown(_short(node))
            )
        if last in ("Path", "str", "repr") and len(args) == 1:
            return (
                args[0]
                if isinstance(args[0], Unknown)
                else self._text(args[0], _short(node.args[0]))
            )
        if name in _FUNCTIONS or name == "dict":
            return self._plain_call(name, args, kwargs, node)
        if name in _TEXT_FUNCTIONS and args and _is_known(args[0]):
            return _TEXT_FUNCTIONS[name](args[0])
        if last == "field" and ("default" in kwargs or "default_factory" in kwargs):
            factory = kwargs.get("default_factory")
            made = self.call(factory, (), {}) if isinstance(factory, Function) else _empty(node)
            return kwargs.get("default", made)
        return self._framework_function(last, node, args, kwargs, scope)

    def _framework_function(
        self,
        last: str,
        node: ast.Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        scope: Scope,
    ) -> Any:
        if last == "get_default_wandb_args":
            # Miles' own: a tracker, which has its key in the process environment.
            return ""
        if last == "ArgumentParser":
            return Record("ArgumentParser", {})
        if last in ("add_argument", "parse_args", "parse_known_args", "add_argument_group"):
            return self._parser(last, node, args, kwargs, scope)
        if isinstance(node.func, ast.Attribute):
            return self._method(
                self.value(node.func.value, scope), node.func.attr, args, kwargs, node
            )
        return _NOT_HERE

    def _environment_variable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the default of a variable of the process environment,
        which is taken as not set."""
        if args and isinstance(args[0], str) and args[0] not in self.environment:
            self.environment.append(args[0])
        return args[1] if len(args) > 1 else kwargs.get("default")

    def _plain_call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], node: ast.Call
    ) -> Any:
        if name == "dict" and not args:
            return dict(kwargs)
        if kwargs or not all(_is_plain(one) for one in args):
            return Unknown(_short(node))
        try:
            return _FUNCTIONS.get(name, dict)(*args)
        except (TypeError, ValueError, OverflowError):
            return Unknown(_short(node))

    def _parser(
        self,
        last: str,
        node: ast.Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        scope: Scope,
    ) -> Any:
        """Follow `argparse`: its arguments have their defaults."""
        parser = (
            self.value(node.func.value, scope) if isinstance(node.func, ast.Attribute) else None
        )
        if not isinstance(parser, Record) or parser.kind != "ArgumentParser":
            return _NOT_HERE
        if last == "add_argument_group":
            return parser
        if last == "add_argument":
            flags = [one for one in args if isinstance(one, str)]
            if flags:
                long = next((one for one in flags if one.startswith("--")), flags[0])
                key = str(kwargs.get("dest", long.lstrip("-").replace("-", "_")))
                switched = {"store_true": False, "store_false": True}.get(str(kwargs.get("action")))
                default = kwargs.get("default", switched)
                if kwargs.get("required") is True and default is None:
                    default = Unknown(long)
                parser.fields[key] = default
            return None
        self.defaults.update(parser.fields)
        made = Record("arguments", dict(parser.fields))
        return made if last == "parse_args" else [made, []]

    def _method(
        self,
        owner: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        node: ast.Call,
    ) -> Any:
        if isinstance(owner, str):
            return self._text_method(owner, name, args, kwargs, node)
        if isinstance(owner, list):
            return self._list_method(owner, name, args, node)
        if isinstance(owner, dict):
            return self._table_method(owner, name, args, kwargs, node)
        return _NOT_HERE

    def _text_method(
        self,
        owner: str,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        node: ast.Call,
    ) -> Any:
        if name == "join" and len(args) == 1 and isinstance(args[0], list | tuple):
            return owner.join(self._text(one, source_of(one, "?")) for one in args[0])
        if name == "format":
            return self._format(owner, args, kwargs, node)
        if name in ("resolve", "absolute", "expanduser", "as_posix"):
            return owner
        if name in _TEXT_METHODS and not kwargs and all(_is_plain(one) for one in args):
            try:
                return getattr(owner, name)(*args)
            except (TypeError, ValueError):
                return Unknown(_short(node))
        return Unknown(_short(node))

    def _list_method(
        self, owner: list[Any], name: str, args: tuple[Any, ...], node: ast.Call
    ) -> Any:
        if name == "append" and len(args) == 1:
            owner.append(args[0])
            return None
        if name == "extend" and len(args) == 1:
            owner += (
                args[0] if isinstance(args[0], list | tuple) else [Unknown(_short(node.args[0]))]
            )
            return None
        return Unknown(_short(node))

    def _table_method(
        self,
        owner: dict[Any, Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        node: ast.Call,
    ) -> Any:
        if name == "get" and args and isinstance(args[0], str | int) and "**" not in owner:
            return owner.get(args[0], args[1] if len(args) > 1 else None)
        if name == "update":
            owner.update(args[0] if args and isinstance(args[0], dict) else {})
            owner.update(kwargs)
            return None
        if name in ("items", "keys", "values"):
            return [list(one) if isinstance(one, tuple) else one for one in getattr(owner, name)()]
        return Unknown(_short(node))

    def _format(
        self, owner: str, args: Sequence[Any], kwargs: Mapping[str, Any], node: ast.Call
    ) -> Any:
        sources = [self._text(one, source_of(one, "?")) for one in args]
        named = {key: self._text(one, source_of(one, key)) for key, one in kwargs.items()}
        if re.search(r"\{[^}]*[.\[!:]", owner):  # attributes and formats of arguments
            return Unknown(_short(node))
        try:
            return owner.format(*sources, **named)
        except (KeyError, IndexError, ValueError):
            return Unknown(_short(node))

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function returns; parameters that are not given have their defaults."""
        if self._depth >= MAX_CALLS:
            return Unknown(function.name)
        node = function.node
        names: dict[str, Any] = {}
        outer = function.scope
        scope = Scope(names, outer, outer.module, outer.folder, outer.path, function.name)
        given = [function.owner, *args] if function.owner is not None else list(args)
        self._bind(node.args, given, kwargs, names, function.scope)
        self._depth += 1
        try:
            if isinstance(node, ast.Lambda):
                return self.value(node.body, scope)
            returned = self._body(node.body, scope)
        finally:
            self._depth -= 1
        self.last_names.update(scope.names)
        return None if returned is None else returned.value

    def _bind(
        self,
        spec: ast.arguments,
        given: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: dict[str, Any],
        scope: Scope,
    ) -> None:
        places = [*spec.posonlyargs, *spec.args]
        defaults = [None] * (len(places) - len(spec.defaults)) + list(spec.defaults)
        pairs: Iterator[tuple[ast.arg, ast.expr | None]] = iter(
            [
                *zip(places, defaults, strict=True),
                *zip(spec.kwonlyargs, spec.kw_defaults, strict=True),
            ]
        )
        for at, (parameter, default) in enumerate(pairs):
            if at < len(given) and at < len(places):
                names[parameter.arg] = given[at]
            elif parameter.arg in kwargs:
                names[parameter.arg] = kwargs[parameter.arg]
            elif default is not None:
                names[parameter.arg] = self.value(default, scope)
            else:
                names[parameter.arg] = self._argument(parameter, scope)
        if spec.vararg is not None:
            names[spec.vararg.arg] = list(given[len(places) :])
        if spec.kwarg is not None:
            names[spec.kwarg.arg] = {key: one for key, one in kwargs.items() if key not in names}

    def _argument(self, parameter: ast.arg, scope: Scope) -> Any:
        """Return an argument that the command line gives: a data class with its defaults,
        or something unknown."""
        kind = None if parameter.annotation is None else self.value(parameter.annotation, scope)
        if not isinstance(kind, Class):
            return Unknown(parameter.arg)
        made = self._instance(kind, (), {})
        self.defaults.update({key: one for key, one in made.fields.items() if _is_plain(one)})
        return made

    def _instance(self, made: Class, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Record:
        record = Record(made.name)
        order = self._fields(made, record, depth=0)
        record.fields.update(zip(order, args, strict=False))
        record.fields.update(kwargs)
        for name in ("__init__", "__post_init__"):
            if name in record.methods and (name == "__post_init__" or (args or kwargs)):
                method = record.methods[name]
                self.call(
                    Function(method.node, method.scope, record),
                    args if name == "__init__" else (),
                    {},
                )
        return record

    def _fields(self, made: Class, record: Record, depth: int) -> list[str]:
        """Set the defaults of a class and of those it extends; return the names of its
        fields in their order."""
        order: list[str] = []
        for base in made.node.bases:
            extended = self.value(base, made.scope)
            if isinstance(extended, Class) and depth < 10:
                order += self._fields(extended, record, depth + 1)
        for node in made.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                order.append(name)
                if node.value is None or _is_uninitialized(node.value):
                    record.fields[name] = Unknown(name)
                else:
                    record.fields[name] = self.value(node.value, made.scope)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        record.fields[target.id] = self.value(node.value, made.scope)
            elif isinstance(node, ast.FunctionDef):
                record.methods[node.name] = Function(node, made.scope)
                if any(
                    isinstance(one, ast.Name) and one.id == "property"
                    for one in node.decorator_list
                ):
                    record.fields.pop(node.name, None)
        return order


class _TooLong(Exception):
    """The launcher has too many steps."""


_NOT_HERE = object()
_ERROR = "an error"
"""Source of what a function gives that raises."""
_STATEMENTS: Mapping[type[ast.stmt], Callable[[Launcher, Any, Scope], _Returned | None]] = {
    ast.Assign: Launcher._assignment,
    ast.AnnAssign: Launcher._annotated,
    ast.AugAssign: Launcher._augmented,
    ast.Expr: Launcher._expression,
    ast.Return: Launcher._return,
    ast.Raise: Launcher._raise,
    ast.If: Launcher._if,
    ast.Match: Launcher._match,
    ast.For: Launcher._for,
    ast.While: Launcher._while,
    ast.With: Launcher._with,
    ast.AsyncWith: Launcher._with,
    ast.Try: Launcher._try,
    ast.FunctionDef: Launcher._function,
    ast.AsyncFunctionDef: Launcher._function,
    ast.ClassDef: Launcher._class,
    ast.Import: Launcher._import,
    ast.ImportFrom: Launcher._import_from,
}
_VALUES: Mapping[type[ast.expr], Callable[[Launcher, Any, Scope], Any]] = {
    ast.Constant: lambda _, node, scope: node.value,
    ast.Name: Launcher._name,
    ast.Attribute: Launcher._attribute,
    ast.JoinedStr: Launcher._formatted,
    ast.BinOp: Launcher._binary,
    ast.UnaryOp: Launcher._unary,
    ast.BoolOp: Launcher._boolean,
    ast.Compare: Launcher._compare,
    ast.IfExp: Launcher._chosen,
    ast.List: Launcher._sequence,
    ast.Tuple: Launcher._sequence,
    ast.Set: Launcher._sequence,
    ast.Dict: Launcher._table,
    ast.Subscript: Launcher._subscript,
    ast.Call: Launcher._call,
    ast.Lambda: lambda _, node, scope: Function(node, scope),
    ast.NamedExpr: Launcher._named_expression,
    ast.Await: lambda launcher, node, scope: launcher.value(node.value, scope),
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "len": len,
    "max": max,
    "min": min,
    "abs": abs,
    "round": round,
    "list": list,
    "tuple": list,
    "sum": sum,
}
_TEXT_FUNCTIONS: Mapping[str, Callable[[Any], str]] = {
    "shlex.quote": shlex.quote,
    "quote": shlex.quote,
    "shlex.join": shlex.join,
    "textwrap.dedent": textwrap.dedent,
    "dedent": textwrap.dedent,
}
_TEXT_METHODS = {
    *(
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "replace",
        "lower",
        "upper",
        "startswith",
        "endswith",
    ),
    *(
        "removeprefix",
        "removesuffix",
        "splitlines",
        "partition",
        "rpartition",
        "count",
        "find",
        "title",
    ),
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: left**right if abs(left) < 1e6 and abs(right) < 64 else math.nan,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def _shared_start(texts: Sequence[str]) -> str:
    """Return the longest start that texts have in common."""
    first, last = min(texts), max(texts)
    count = next(
        (at for at, (left, right) in enumerate(zip(first, last, strict=False)) if left != right),
        len(first),
    )
    return first[:count]


def _loaded(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as the expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body


def source_of(value: Any, default: str) -> str:
    """Return the source of an unknown value, or a default for another one."""
    return value.source if isinstance(value, Unknown) else default


def _is_property(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        "property" in ast.unparse(one) for one in node.decorator_list
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_mutable(value: Any) -> bool:
    return isinstance(value, list | dict)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of texts, numbers, lists and tables."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if isinstance(value, dict):
        return all(_is_plain(one) for one in value.values())
    return isinstance(value, str | int | float | bool | type(None))


def _is_known(value: Any) -> bool:
    """Return whether a value can be compared: it holds nothing unknown."""
    if isinstance(value, str):
        return "${" not in value
    if isinstance(value, list | tuple):
        return all(_is_known(one) for one in value)
    return isinstance(value, int | float | bool | type(None) | dict)


def _is_uninitialized(node: ast.expr) -> bool:
    """Return whether the value is `field(init=False)` without a default."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field"):
        return False
    return not any(one.arg in ("default", "default_factory") for one in node.keywords)


def _empty(node: ast.Call) -> Any:
    """Return the value of `field(default_factory=list)` or `dict`; unknown for another factory."""
    for one in node.keywords:
        if one.arg == "default_factory":
            kind = ast.unparse(one.value)
            if kind in ("list", "dict"):
                return [] if kind == "list" else {}
            return Unknown(f"{kind}()")
    return Unknown(_short(node))


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."
