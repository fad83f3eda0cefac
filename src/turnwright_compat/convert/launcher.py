"""Follow a Python launcher without running it: texts, arguments with their defaults, and
functions of files beside it.

`Launcher.follow` is the entry. It interprets the syntax tree: `_STATEMENTS` and `_VALUES` name the
method of each kind of node, `_either` follows both branches of a condition that is unknown, and
`_call` decides what a call is. What the launcher starts is in `Launcher.launches`, and the calls of
functions that are not read are in `Launcher.calls`.

Only a few kinds of values are followed: texts, numbers, lists, tables, instances of data classes
and of `argparse`. No module is imported and nothing of the system is called. What depends on
anything else is `Unknown`; in a text it stays as `${source}`, so that settings which hold it can be
named.
"""

from __future__ import annotations

import ast
import math
import operator
import os.path
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwright.errors import ConfigError
from turnwright.files import resolved

MAX_STEPS = 200_000
"""Most statements and expressions that are followed."""
MAX_CALLS = 40
"""Most calls, one inside another."""
MAX_TEXT = 200_000
"""Most characters of one text."""
MAX_MODULES = 40
"""Most files that are read besides the launcher."""
MAX_FILE = 1_000_000
"""Most bytes of such a file."""
_MAX_ITEMS = 10_000
"""Most items over which a loop is followed."""

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

    def bound(self, name: str) -> Function:
        """Return a method that has this instance as its first argument."""
        method = self.methods[name]
        return Function(method.node, method.scope, self)


@dataclass(frozen=True, slots=True)
class Function:
    """Function of the launcher or of a file beside it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: Record | None = None

    @property
    def name(self) -> str:
        """Its name; `lambda` for one without."""
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


@dataclass(frozen=True, slots=True)
class _BranchEnd:
    """Values after a branch that does not return."""

    names: dict[str, Any]
    fields: list[dict[str, Any]]
    """Those of each record that had a name before the branch."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Call with its arguments evaluated."""

    node: ast.Call
    name: str
    """Dotted name of the function."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def last_name(self) -> str:
        """Name of the function without its module or object."""
        return self.name.rpartition(".")[2]

    def unknown(self) -> Unknown:
        """Return the result of a call that is not followed."""
        return _unknown(self.node)


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

        names = {"__name__": "__main__"}
        if folder is not None:
            names["__file__"] = str(folder / name)
        self.scope = Scope(names, module=Path(name).stem, folder=folder)

    def follow(self) -> None:
        """Follow the module as a program; then, if nothing was started, its functions that start
        something."""
        try:
            self._body(self.tree.body, self.scope)
            makes_trainer = any(call.name.endswith(("Trainer", "Arguments")) for call in self.calls)
            if self.launches or makes_trainer:
                return

            for node in self.tree.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _holds_flags(node):
                    self.call(Function(node, self.scope), (), {})
        except (_TooLong, RecursionError):
            self.missing.append("the launcher is too long to be followed to its end")

    # Statements

    def _body(self, body: Sequence[ast.stmt], scope: Scope) -> _Returned | None:
        for node in body:
            self._count_step()
            handle = _STATEMENTS.get(type(node))
            returned = None if handle is None else handle(self, node, scope)
            if returned is not None:
                return returned
        return None

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooLong

    def _assignment(self, node: ast.Assign, scope: Scope) -> None:
        value = self.value(node.value, scope)
        for target in node.targets:
            self._assign(target, value, scope)

    def _annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self._assign(node.target, self.value(node.value, scope), scope)

    def _augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        operation = ast.BinOp(left=_loaded(node.target), op=node.op, right=node.value)
        value = self.value(ast.copy_location(operation, node), scope)
        self._assign(node.target, value, scope)

    def _assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope.names[name] = value
            case ast.Attribute(value=owner, attr=attribute):
                record = self.value(owner, scope)
                if isinstance(record, Record):
                    record.fields[attribute] = value
            case ast.Subscript(value=owner, slice=key):
                table = self.value(owner, scope)
                index = self.value(key, scope)
                if isinstance(table, dict) and isinstance(index, str | int):
                    table[index] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                fits = isinstance(value, list | tuple) and len(value) == len(parts)
                for index, part in enumerate(parts):
                    item = value[index] if fits else Unknown(ast.unparse(part))
                    self._assign(part, item, scope)

    def _expression(self, node: ast.Expr, scope: Scope) -> None:
        self.value(node.value, scope)

    def _return(self, node: ast.Return, scope: Scope) -> _Returned:
        return _Returned(None if node.value is None else self.value(node.value, scope))

    def _raise(self, node: ast.Raise, scope: Scope) -> _Returned:
        return _Returned(Unknown(_ERROR))

    def _with(self, node: ast.With | ast.AsyncWith, scope: Scope) -> _Returned | None:
        for item in node.items:
            context = self.value(item.context_expr, scope)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, context, scope)
        return self._body(node.body, scope)

    def _try(self, node: ast.Try, scope: Scope) -> _Returned | None:
        """Follow a `try` as if its body raised nothing."""
        return self._body([*node.body, *node.orelse], scope) or self._body(node.finalbody, scope)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        scope.names[node.name] = Function(node, scope)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        scope.names[node.name] = Class(node, scope)

    # Imports

    def _import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            bound_name = alias.asname or alias.name.partition(".")[0]
            module = self._module(alias.name, scope)
            scope.names[bound_name] = Unknown(alias.name) if module is None else module

    def _import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        module_name = node.module or ""
        module = self._module(module_name, scope, node.level)
        for alias in node.names:
            full_name = f"{module_name}.{alias.name}".lstrip(".")
            value: Any
            if module is not None and module.has(alias.name):
                value = module.find(alias.name)
            else:
                value = self._module(full_name, scope, node.level)
            if value is None:
                value = Unknown(full_name, imported=not node.level)
            scope.names[alias.asname or alias.name] = value

    def _module(self, dotted: str, scope: Scope, level: int = 0) -> Scope | None:
        """Return the names of a module whose file is beside the launcher or in a folder above it;
        None for another.

        A relative import names the folder by its level, from 1.
        """
        if scope.folder is None:
            return None

        parts = [part for part in dotted.split(".") if part]
        folders = [scope.folder, *scope.folder.parents][:7]
        if level:
            folders = folders[level - 1 : level]
        for folder in folders:
            stem = folder.joinpath(*parts)
            for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
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

        names = {"__name__": path.stem, "__file__": str(path)}
        scope = Scope(names, module=path.stem, folder=path.parent, path=path)
        # Known before it is followed, as modules may import each other.
        self._modules[path] = scope
        self._body(tree.body, scope)
        return scope

    # Branches and loops

    def _if(self, node: ast.If, scope: Scope) -> _Returned | None:
        truth = self._decide(node.test, scope)
        if truth is not None:
            return self._body(node.body if truth else node.orelse, scope)
        return self._either([node.body, node.orelse], scope, ast.unparse(node.test))

    def _decide(self, test: ast.expr, scope: Scope) -> bool | None:
        """Return the truth of a condition; None if it is unknown."""
        truth = self._truth(self.value(test, scope))
        self._note_arguments(test)
        return truth

    def _note_arguments(self, test: ast.expr) -> None:
        """Note the arguments with their defaults that a condition reads."""
        for node in ast.walk(test):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name in self.defaults and not isinstance(self.defaults[name], Unknown):
                self.decided[name] = self.defaults[name]

    def _either(
        self, bodies: Sequence[Sequence[ast.stmt]], scope: Scope, condition: str
    ) -> _Returned | None:
        """Follow branches of which one is taken, and keep what they agree on."""
        names_before = {name: _copied(value) for name, value in scope.names.items()}
        records = [value for value in names_before.values() if isinstance(value, Record)]
        fields_before = [dict(record.fields) for record in records]

        ends: list[_BranchEnd] = []
        returns: list[Any] = []
        for body in bodies:
            # A branch may change lists, tables and records in place.
            scope.names.clear()
            scope.names.update({name: _copied(value) for name, value in names_before.items()})
            for record, fields in zip(records, fields_before, strict=True):
                record.put(fields)

            returned = self._body(body, scope)
            if returned is None:
                fields_after = [dict(record.fields) for record in records]
                ends.append(_BranchEnd(dict(scope.names), fields_after))
                continue

            # A branch that raises is not the one that a training takes.
            raises = isinstance(returned.value, Unknown) and returned.value.source == _ERROR
            if not raises:
                returns.append(returned.value)

        unknown = Unknown(f"if {condition}")
        if returns:
            all_same = not ends and all(value == returns[0] for value in returns)
            return _Returned(returns[0] if all_same else self._joined(returns, unknown))
        if not ends:
            return _Returned(Unknown(_ERROR))

        scope.names.clear()
        scope.names.update(self._joined_tables([end.names for end in ends], unknown))
        for index, record in enumerate(records):
            record.put(self._joined_tables([end.fields[index] for end in ends], unknown))
        return None

    def _joined_tables(
        self, tables: Sequence[Mapping[str, Any]], unknown: Unknown
    ) -> dict[str, Any]:
        keys = dict.fromkeys(key for table in tables for key in table)
        return {key: self._joined([table.get(key) for table in tables], unknown) for key in keys}

    def _joined(self, values: Sequence[Any], unknown: Unknown) -> Any:
        """Return the value that branches have in common; of texts and lists, the start that they
        share."""
        first, *others = values
        if all(
            other is first or (type(other) is type(first) and other == first) for other in others
        ):
            return first

        if all(isinstance(value, str) for value in values):
            return _shared_start([str(value) for value in values]) + self._place(unknown)

        if all(isinstance(value, list) for value in values):
            shared = []
            for items in zip(*values, strict=False):
                if any(item != items[0] for item in items):
                    break
                shared.append(items[0])
            return [*shared, self._place(unknown)]

        return unknown

    def _match(self, node: ast.Match, scope: Scope) -> _Returned | None:
        subject = self.value(node.subject, scope)
        self._note_arguments(node.subject)

        bodies = [case.body for case in node.cases]
        condition = ast.unparse(node.subject)
        if not _is_known(subject):
            return self._either(bodies, scope, condition)

        for case in node.cases:
            fits = self._fits(case.pattern, subject, scope)
            if fits is None:
                return self._either(bodies, scope, condition)
            if fits:
                return self._body(case.body, scope)
        return None

    def _fits(self, pattern: ast.pattern, subject: Any, scope: Scope) -> bool | None:
        """Return whether a value has a pattern; None if that is unknown."""
        match pattern:
            case ast.MatchValue(value=value):
                expected = self.value(value, scope)
                return bool(expected == subject) if _is_known(expected) else None
            case ast.MatchSingleton(value=expected):
                return subject is expected
            case ast.MatchOr(patterns=patterns):
                fits = [self._fits(alternative, subject, scope) for alternative in patterns]
                if True in fits:
                    return True
                return None if None in fits else False
            case ast.MatchAs(pattern=None):
                return True
        return None

    def _for(self, node: ast.For, scope: Scope) -> _Returned | None:
        items = self.value(node.iter, scope)
        if not isinstance(items, list | tuple) or len(items) > _MAX_ITEMS:
            self._forget(node.body, scope, f"for {ast.unparse(node.target)}")
            return None

        for item in items:
            self._assign(node.target, item, scope)
            returned = self._body(node.body, scope)
            if returned is not None:
                return returned
        return None

    def _while(self, node: ast.While, scope: Scope) -> None:
        self._forget(node.body, scope, ast.unparse(node.test))

    def _forget(self, body: Sequence[ast.stmt], scope: Scope, source: str) -> None:
        """Mark what a loop of unknown length changes."""
        unknown = Unknown(source)
        for statement in body:
            for node in ast.walk(statement):
                if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
                    continue
                value = scope.find(node.id)
                is_text = isinstance(value, str)
                scope.names[node.id] = value + self._place(unknown) if is_text else unknown

    # Values

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """Return the value of an expression."""
        self._count_step()
        value = self._value(node, scope)
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise ConfigError(f"a text of the launcher has over {MAX_TEXT} characters")
        return value

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        handle = _VALUES.get(type(node))
        return _unknown(node) if handle is None else handle(self, node, scope)

    def _name(self, node: ast.Name, scope: Scope) -> Any:
        return scope.find(node.id) if scope.has(node.id) else Unknown(node.id)

    def _chosen(self, node: ast.IfExp, scope: Scope) -> Any:
        truth = self._decide(node.test, scope)
        if truth is not None:
            return self.value(node.body if truth else node.orelse, scope)

        both = [self.value(node.body, scope), self.value(node.orelse, scope)]
        return self._joined(both, Unknown(f"if {ast.unparse(node.test)}"))

    def _named_expression(self, node: ast.NamedExpr, scope: Scope) -> Any:
        value = self.value(node.value, scope)
        self._assign(node.target, value, scope)
        return value

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        if isinstance(owner, Record):
            if node.attr in owner.fields:
                return owner.fields[node.attr]
            if node.attr in owner.methods:
                method = owner.bound(node.attr)
                return self.call(method, (), {}) if _is_property(method.node) else method

        if isinstance(owner, Scope) and owner.has(node.attr):
            return owner.find(node.attr)

        # Paths are texts here.
        if isinstance(owner, str):
            path = Path(owner)
            if node.attr == "name":
                return path.name
            if node.attr == "stem":
                return path.stem
            if node.attr == "parent":
                return str(path.parent)

        return _unknown(node)

    # Texts

    def _formatted(self, node: ast.JoinedStr, scope: Scope) -> str:
        return "".join(self._piece(piece, scope) for piece in node.values)

    def _piece(self, node: ast.expr, scope: Scope) -> str:
        """Return the text of one piece of an f-string."""
        if not isinstance(node, ast.FormattedValue):
            return self._text(self.value(node, scope), _short(node))

        value = self.value(node.value, scope)
        if node.format_spec is not None and isinstance(value, str | int | float):
            spec = self._value(node.format_spec, scope)
            try:
                return format(value, spec)
            except (TypeError, ValueError):
                return self._place(_unknown(node.value))
        return self._text(value, _short(node.value))

    def _text(self, value: Any, source: str) -> str:
        """Return a value as text; the placeholder of its source for one that is unknown."""
        if isinstance(value, str | int | float | bool | type(None)):
            return str(value)
        if isinstance(value, list | tuple | dict) and _is_plain(value):
            return str(value)

        # The name in the launcher tells the user more than what it comes from.
        return self._place(Unknown(source))

    def _place(self, unknown: Unknown) -> str:
        """Return the placeholder of an unknown value, and report it."""
        if unknown.placeholder not in self.unresolved:
            self.unresolved.append(unknown.placeholder)
        return unknown.placeholder

    # Operations

    def _binary(self, node: ast.BinOp, scope: Scope) -> Any:
        left = self.value(node.left, scope)
        right = self.value(node.right, scope)

        if isinstance(node.op, ast.Add):
            joined = self._added(left, right, node)
            if joined is not _NOT_HERE:
                return joined
        if isinstance(node.op, ast.Div) and isinstance(left, str):
            return str(Path(left) / right) if isinstance(right, str) else _unknown(node)
        if isinstance(node.op, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
            return {**left, **right}
        if _is_number(left) and _is_number(right):
            return _computed(left, right, node)
        if isinstance(node.op, ast.Mod) and isinstance(left, str) and _is_plain(right):
            try:
                return left % (tuple(right) if isinstance(right, list) else right)
            except (TypeError, ValueError, KeyError):
                pass
        return _unknown(node)

    def _added(self, left: Any, right: Any, node: ast.BinOp) -> Any:
        """Return the sum of texts or of lists; `_NOT_HERE` for other values."""
        if isinstance(left, str) or isinstance(right, str):
            parts = [left, right]
            if not all(isinstance(part, str | Unknown) for part in parts):
                return _unknown(node)
            return "".join(part if isinstance(part, str) else self._place(part) for part in parts)

        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            return [*left, *right]
        if isinstance(left, list) and isinstance(right, Unknown):
            return [*left, self._place(right)]
        return _NOT_HERE

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            truth = self._truth(value)
            return _unknown(node) if truth is None else not truth
        if isinstance(node.op, ast.USub) and _is_number(value):
            return -value
        return _unknown(node)

    def _boolean(self, node: ast.BoolOp, scope: Scope) -> Any:
        """Return the first value that decides; unknown if an unknown one comes before it and does
        not agree."""
        deciding = isinstance(node.op, ast.Or)
        has_unknown = False
        value: Any = None
        for operand in node.values:
            value = self.value(operand, scope)
            truth = self._truth(value)
            if truth is deciding and not has_unknown:
                return value
            if truth is deciding:
                # After something unknown: `and` is false in any case, `or` has one of two values.
                return _unknown(node) if deciding else False
            has_unknown = has_unknown or truth is None
        return _unknown(node) if has_unknown else value

    def _compare(self, node: ast.Compare, scope: Scope) -> Any:
        left = self.value(node.left, scope)
        comparison = node.ops[0]
        right = self.value(node.comparators[0], scope)
        if len(node.ops) > 1:
            return _unknown(node)

        # What a text holds, it holds whatever its placeholders stand for.
        both_texts = isinstance(left, str) and isinstance(right, str)
        if isinstance(comparison, ast.In | ast.NotIn) and both_texts and left in right:
            return isinstance(comparison, ast.In)

        if not (_is_known(left) and _is_known(right)):
            return _unknown(node)
        try:
            return bool(_COMPARISONS[type(comparison)](left, right))
        except (KeyError, TypeError):
            return _unknown(node)

    @staticmethod
    def _truth(value: Any) -> bool | None:
        """Return the truth of a value; None for one that is unknown, or the placeholder of one."""
        if isinstance(value, Unknown):
            return None
        if isinstance(value, str) and " " not in value:
            is_placeholder = value.startswith("${") and value.endswith("}")
            return None if is_placeholder else bool(value)
        return bool(value)

    # Lists and tables

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set, scope: Scope) -> list[Any]:
        return self._items(node.elts, scope)

    def _items(self, parts: Sequence[ast.expr], scope: Scope) -> list[Any]:
        items: list[Any] = []
        for part in parts:
            if isinstance(part, ast.Starred):
                inner = self.value(part.value, scope)
                items += inner if isinstance(inner, list | tuple) else [_unknown(part.value)]
            else:
                items.append(self.value(part, scope))
        return items

    def _table(self, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
        table: dict[Any, Any] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node, scope)
            if key_node is None:
                table.update(_unpacked(value, value_node))
                continue

            key = self.value(key_node, scope)
            if isinstance(key, str | int | bool | type(None)):
                table[key] = value
        return table

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        key = self.value(node.slice, scope)
        has_items = isinstance(owner, dict | list | tuple | str)
        try:
            if has_items and not isinstance(key, Unknown) and "**" not in owner:
                return owner[key]
        except (KeyError, IndexError, TypeError):
            pass
        return _unknown(node)

    # Calls

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        """Return the result of a call: of something that starts a training, a function that is
        known here, or one of the launcher; any other is added to `calls`."""
        args = tuple(self._items(node.args, scope))
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            else:
                kwargs.update(_unpacked(value, keyword.value))

        call = _Call(node, ast.unparse(node.func), args, kwargs)
        last_name = call.last_name
        if last_name == "execute_train":
            return self._execute_train(args, kwargs)
        if last_name in ("run", "Fire") and args and isinstance(args[0], Function):
            return self.call(args[0], (), {})
        if last_name in _RUNS or last_name.startswith("exec_command"):
            return self._command(args, kwargs)

        result = self._builtin(call, scope)
        if result is not _NOT_HERE:
            return result

        target = self.value(node.func, scope)
        if isinstance(target, Function):
            return self.call(target, args, kwargs)
        if isinstance(target, Class):
            return self._instance(target, args, kwargs)

        self.calls.append(LauncherCall(call.name, args, kwargs, scope.function))
        if last_name[:1].isupper():
            return Record(last_name, dict(kwargs))
        return _unknown(node)

    def _execute_train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Follow `execute_train(train_args, train_script)`, which starts a training."""
        text = kwargs.get("train_args", args[0] if args else None)
        if not isinstance(text, str):
            text = self._place(text if isinstance(text, Unknown) else Unknown("train_args"))

        program = kwargs.get("train_script", "train.py")
        if not isinstance(program, str):
            program = "train.py"
        self.launches.append(Launch(program, text))
        return None

    def _command(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Unknown:
        """Follow a function that starts a program."""
        command: Any
        if len(args) == 2 and isinstance(args[1], list):
            # As `os.execvp` takes them: the file, then all words.
            command = args[1]
        elif args:
            command = args[0]
        else:
            command = kwargs.get("args")

        if isinstance(command, str):
            self.launches.append(Launch("", command))
        elif isinstance(command, list):
            words = [self._text(word, source_of(word, "?")) for word in command]
            self.launches.append(Launch("", words=tuple(words)))
        return Unknown("the result of a command")

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function returns; parameters that are not given have their defaults."""
        if self._depth >= MAX_CALLS:
            return Unknown(function.name)

        node = function.node
        names: dict[str, Any] = {}
        outer = function.scope
        scope = Scope(names, outer, outer.module, outer.folder, outer.path, function.name)
        positional = list(args)
        if function.owner is not None:
            positional.insert(0, function.owner)
        self._bind(node.args, positional, kwargs, names, outer)

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
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: dict[str, Any],
        scope: Scope,
    ) -> None:
        """Give each parameter its argument, its default, or what the command line would give."""
        positional = [*spec.posonlyargs, *spec.args]
        without_default = len(positional) - len(spec.defaults)
        parameters = [*positional, *spec.kwonlyargs]
        defaults = [*([None] * without_default), *spec.defaults, *spec.kw_defaults]

        for index, (parameter, default) in enumerate(zip(parameters, defaults, strict=True)):
            if index < len(args) and index < len(positional):
                names[parameter.arg] = args[index]
            elif parameter.arg in kwargs:
                names[parameter.arg] = kwargs[parameter.arg]
            elif default is not None:
                names[parameter.arg] = self.value(default, scope)
            else:
                names[parameter.arg] = self._argument(parameter, scope)

        if spec.vararg is not None:
            names[spec.vararg.arg] = list(args[len(positional) :])
        if spec.kwarg is not None:
            others = {key: value for key, value in kwargs.items() if key not in names}
            names[spec.kwarg.arg] = others

    def _argument(self, parameter: ast.arg, scope: Scope) -> Any:
        """Return an argument that the command line gives: a data class with its defaults, or
        something unknown."""
        kind = None if parameter.annotation is None else self.value(parameter.annotation, scope)
        if not isinstance(kind, Class):
            return Unknown(parameter.arg)

        instance = self._instance(kind, (), {})
        for name, value in instance.fields.items():
            if _is_plain(value):
                self.defaults[name] = value
        return instance

    # Classes

    def _instance(self, kind: Class, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Record:
        record = Record(kind.name)
        field_names = self._fields(kind, record, depth=0)
        record.fields.update(zip(field_names, args, strict=False))
        record.fields.update(kwargs)

        # Keywords are fields already.
        if "__init__" in record.methods and (args or kwargs):
            self.call(record.bound("__init__"), args, {})
        if "__post_init__" in record.methods:
            self.call(record.bound("__post_init__"), (), {})
        return record

    def _fields(self, kind: Class, record: Record, depth: int) -> list[str]:
        """Set the defaults of a class and of those it extends; return the names of its fields in
        their order."""
        field_names: list[str] = []
        for base in kind.node.bases:
            extended = self.value(base, kind.scope)
            if isinstance(extended, Class) and depth < 10:
                field_names += self._fields(extended, record, depth + 1)

        for node in kind.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                field_names.append(name)
                if node.value is None or _is_uninitialized(node.value):
                    record.fields[name] = Unknown(name)
                else:
                    record.fields[name] = self.value(node.value, kind.scope)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        record.fields[target.id] = self.value(node.value, kind.scope)
            elif isinstance(node, ast.FunctionDef):
                record.methods[node.name] = Function(node, kind.scope)
                if any(
                    isinstance(decorator, ast.Name) and decorator.id == "property"
                    for decorator in node.decorator_list
                ):
                    # It takes the place of a field of a class that this one extends.
                    record.fields.pop(node.name, None)
        return field_names

    # Functions that are known here

    def _builtin(self, call: _Call, scope: Scope) -> Any:
        """Return the result of a function that is known here; `_NOT_HERE` for another."""
        name = call.name
        last_name = call.last_name
        args = call.args
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
            return self._environment_variable(args, call.kwargs)

        if name in ("os.path.join", "path.join"):
            if args and all(isinstance(part, str) for part in args):
                return os.path.join(*args)
            return call.unknown()

        if last_name in ("Path", "str", "repr") and len(args) == 1:
            if isinstance(args[0], Unknown):
                return args[0]
            return self._text(args[0], _short(call.node.args[0]))

        if name in _FUNCTIONS or name == "dict":
            return _plain_call(call)
        if name in _TEXT_FUNCTIONS and args and _is_known(args[0]):
            try:
                return _TEXT_FUNCTIONS[name](args[0])
            except TypeError:  # of a value that is no text
                return call.unknown()
        if last_name == "field" and ("default" in call.kwargs or "default_factory" in call.kwargs):
            return self._field_default(call)
        return self._framework_function(call, scope)

    def _environment_variable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the default of a variable of the process environment, which is taken as not
        set."""
        if args and isinstance(args[0], str) and args[0] not in self.environment:
            self.environment.append(args[0])
        return args[1] if len(args) > 1 else kwargs.get("default")

    def _field_default(self, call: _Call) -> Any:
        """Return the default that `dataclasses.field` gives."""
        factory = call.kwargs.get("default_factory")
        if isinstance(factory, Function):
            default = self.call(factory, (), {})
        else:
            default = _empty(call.node)
        return call.kwargs.get("default", default)

    def _framework_function(self, call: _Call, scope: Scope) -> Any:
        last_name = call.last_name
        if last_name == "get_default_wandb_args":
            # Miles' own: a tracker, which has its key in the process environment.
            return ""
        if last_name == "ArgumentParser":
            return Record("ArgumentParser", {})
        if last_name in ("add_argument", "parse_args", "parse_known_args", "add_argument_group"):
            return self._parser(call, scope)
        if isinstance(call.node.func, ast.Attribute):
            return self._method(self.value(call.node.func.value, scope), call)
        return _NOT_HERE

    def _parser(self, call: _Call, scope: Scope) -> Any:
        """Follow `argparse`: its arguments have their defaults."""
        function = call.node.func
        parser = self.value(function.value, scope) if isinstance(function, ast.Attribute) else None
        if not isinstance(parser, Record) or parser.kind != "ArgumentParser":
            return _NOT_HERE

        if call.last_name == "add_argument_group":
            return parser
        if call.last_name == "add_argument":
            _add_argument(parser, call.args, call.kwargs)
            return None

        self.defaults.update(parser.fields)
        arguments = Record("arguments", dict(parser.fields))
        return arguments if call.last_name == "parse_args" else [arguments, []]

    def _method(self, owner: Any, call: _Call) -> Any:
        """Return the result of a method of a text, a list or a table; `_NOT_HERE` for another."""
        if isinstance(owner, str):
            return self._text_method(owner, call)
        if isinstance(owner, list):
            return _list_method(owner, call)
        if isinstance(owner, dict):
            return _table_method(owner, call)
        return _NOT_HERE

    def _text_method(self, owner: str, call: _Call) -> Any:
        name = call.last_name
        args = call.args
        if name == "join" and len(args) == 1 and isinstance(args[0], list | tuple):
            return owner.join(self._text(part, source_of(part, "?")) for part in args[0])
        if name == "format":
            return self._format(owner, call)
        if name in ("resolve", "absolute", "expanduser", "as_posix"):
            # A path, which stays as it is written.
            return owner

        is_followed = name in _TEXT_METHODS and not call.kwargs
        if is_followed and all(_is_plain(value) for value in args):
            try:
                return getattr(owner, name)(*args)
            except (TypeError, ValueError):
                return call.unknown()
        return call.unknown()

    def _format(self, owner: str, call: _Call) -> Any:
        texts = [self._text(value, source_of(value, "?")) for value in call.args]
        named_texts = {
            key: self._text(value, source_of(value, key)) for key, value in call.kwargs.items()
        }
        # Attributes and formats of arguments, which are texts here.
        if re.search(r"\{[^}]*[.\[!:]", owner):
            return call.unknown()

        try:
            return owner.format(*texts, **named_texts)
        except (KeyError, IndexError, ValueError):
            return call.unknown()


class _TooLong(Exception):
    """The launcher has too many steps."""


_NOT_HERE = object()
"""Result of a call or an operation that another method has to follow."""
_ERROR = "an error"
"""Source of what a function gives that raises."""


# Branches and names


def _holds_flags(node: ast.AST) -> bool:
    """Return whether a text in a function begins with a flag, as the arguments of a program do."""
    constants = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
    return any(isinstance(value, str) and value.lstrip().startswith("--") for value in constants)


def _loaded(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as the expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _shared_start(texts: Sequence[str]) -> str:
    """Return the longest start that texts have in common."""
    # What the first and the last in order share, all between them have too.
    first = min(texts)
    last = max(texts)
    for index, (first_char, last_char) in enumerate(zip(first, last, strict=False)):
        if first_char != last_char:
            return first[:index]
    return first


def _copied(value: Any) -> Any:
    """Return a list or table as a new one; another value as it is."""
    return value.copy() if isinstance(value, list | dict) else value


# Kinds of values


def source_of(value: Any, default: str) -> str:
    """Return the source of an unknown value, or a default for another one."""
    return value.source if isinstance(value, Unknown) else default


def _unknown(node: ast.AST) -> Unknown:
    """Return the value of an expression that is not followed."""
    return Unknown(_short(node))


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_property(node: ast.AST) -> bool:
    """Return whether a function has a decorator such as `property` or `cached_property`."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of texts, numbers, lists and tables."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, str | int | float | bool | type(None))


def _is_known(value: Any) -> bool:
    """Return whether a value can be compared: it holds nothing unknown."""
    if isinstance(value, str):
        return "${" not in value
    if isinstance(value, list | tuple):
        return all(_is_known(item) for item in value)
    return isinstance(value, int | float | bool | type(None) | dict)


def _unpacked(value: Any, node: ast.expr) -> dict[Any, Any]:
    """Return what `**value` adds to a table or a call; under the key `**` what is unknown of it."""
    return value if isinstance(value, dict) else {"**": _unknown(node)}


def _is_uninitialized(node: ast.expr) -> bool:
    """Return whether the value is `field(init=False)` without a default."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field"):
        return False
    return not any(keyword.arg in ("default", "default_factory") for keyword in node.keywords)


def _empty(node: ast.Call) -> Any:
    """Return the value of `field(default_factory=list)` or `dict`; unknown for another factory."""
    for keyword in node.keywords:
        if keyword.arg == "default_factory":
            kind = ast.unparse(keyword.value)
            if kind in ("list", "dict"):
                return [] if kind == "list" else {}
            return Unknown(f"{kind}()")
    return _unknown(node)


# Functions and methods that are known here

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
    "removeprefix",
    "removesuffix",
    "splitlines",
    "partition",
    "rpartition",
    "count",
    "find",
    "title",
}


def _plain_call(call: _Call) -> Any:
    """Return the result of one of Python's own functions; unknown unless all of its arguments are
    known."""
    if call.name == "dict" and not call.args:
        return dict(call.kwargs)
    if call.kwargs or not all(_is_plain(value) for value in call.args):
        return call.unknown()

    try:
        return _FUNCTIONS.get(call.name, dict)(*call.args)
    except (TypeError, ValueError, OverflowError):
        return call.unknown()


def _list_method(owner: list[Any], call: _Call) -> Any:
    if len(call.args) != 1:
        return call.unknown()

    argument = call.args[0]
    if call.last_name == "append":
        owner.append(argument)
        return None
    if call.last_name == "extend":
        is_list = isinstance(argument, list | tuple)
        owner.extend(argument if is_list else [_unknown(call.node.args[0])])
        return None
    return call.unknown()


def _table_method(owner: dict[Any, Any], call: _Call) -> Any:
    name = call.last_name
    args = call.args
    if name == "get" and args and isinstance(args[0], str | int) and "**" not in owner:
        return owner.get(args[0], args[1] if len(args) > 1 else None)

    if name == "update":
        if args and isinstance(args[0], dict):
            owner.update(args[0])
        owner.update(call.kwargs)
        return None

    if name in ("items", "keys", "values"):
        # Tuples are lists here.
        entries = getattr(owner, name)()
        return [list(entry) if isinstance(entry, tuple) else entry for entry in entries]

    return call.unknown()


def _add_argument(parser: Record, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Add the argument of `add_argument` to a parser, with its default."""
    flags = [value for value in args if isinstance(value, str)]
    if not flags:
        return

    long_flag = next((flag for flag in flags if flag.startswith("--")), flags[0])
    name = str(kwargs.get("dest", long_flag.lstrip("-").replace("-", "_")))
    switch_defaults = {"store_true": False, "store_false": True}
    default = kwargs.get("default", switch_defaults.get(str(kwargs.get("action"))))
    if kwargs.get("required") is True and default is None:
        default = Unknown(long_flag)
    parser.fields[name] = default


# Operations


def _power(base: Any, exponent: Any) -> Any:
    """Return a power; not a number for one that would take long."""
    if abs(base) < 1e6 and abs(exponent) < 64:
        return base**exponent
    return math.nan


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
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


def _computed(left: Any, right: Any, node: ast.BinOp) -> Any:
    """Return the result of two numbers; unknown for one that is large, or no number."""
    compute = _ARITHMETIC.get(type(node.op))
    if compute is None:
        return _unknown(node)

    try:
        result = compute(left, right)
    except (ArithmeticError, ValueError):
        return _unknown(node)
    if isinstance(result, int | float) and abs(result) < 10**18:
        return result
    return _unknown(node)


# The method of each kind of node

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
