"""Read the commands of a shell script without running it: words, quotes, continuations, literal variables and arrays.

Nothing is executed and no file or process environment is read. What only a shell can know (command substitutions, variables
that the script does not set) stays in the text as it is written and is reported in `Script.unresolved`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.errors import ConfigError

MAX_CHARACTERS = 1_000_000
MAX_WORDS = 100_000
MAX_EXPANSION = 200_000
"""Most characters of one expanded word: a script may set each variable to several copies of the last one."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)")
_KEYWORDS = {"then", "do", "done", "fi", "else", "{", "}", "esac", "time", "!", "exec", "nohup", "set", "function"}
_PREFIXES = {"export", "local", "declare", "readonly", "typeset"}


@dataclass(frozen=True, slots=True)
class Part:
    """Piece of a word: text that stays as it is, or text whose variables are expanded."""

    text: str
    expands: bool
    quoted: bool


Word = tuple[Part, ...]


@dataclass(slots=True)
class Script:
    """Commands of a script after expansion, and what could not be known."""

    commands: list[list[str]] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    """Variables and substitutions left as they are written, in order."""
    notes: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """Variables with one value."""


def read_script(text: str) -> Script:
    """Return the commands of a script; raise `ConfigError` for one that cannot be read."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"the script has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    return _Reader().read(text)


def split_words(text: str) -> list[str]:
    """Return the words of an argument list, without expansion."""
    return ["".join(part.text for part in word) for command in _commands(text) for word in command if isinstance(word, tuple)]


class _Reader:
    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.script = Script()
        self._branches: list[list[bool | None]] = []
        """For each open `if`: whether the current branch is read (None: its condition is unknown), and whether one was."""

    def read(self, text: str) -> Script:
        for command in _commands(text):
            words = self._control(command)
            if words and self._is_read():
                self._command(words)
        self.script.variables.update((name, values[0]) for name, values in self.values.items() if len(values) == 1)
        return self.script

    def _is_read(self) -> bool:
        return all(branch[0] is not False for branch in self._branches)

    def _control(self, command: Sequence[Word | str]) -> list[Word | str]:
        """Follow `if`, and return the command without shell keywords."""
        words = list(command)
        while words and isinstance(words[0], tuple):
            name = _plain(words[0])
            if name in ("if", "elif"):
                self._condition(words[1:], first=name == "if")
                return []
            if name == "else" and self._branches:
                branch = self._branches[-1]
                branch[0] = None if branch[0] is None else not branch[1]
                words.pop(0)
            elif name == "fi" and self._branches:
                self._branches.pop()
                words.pop(0)
            elif name in ("for", "while", "until", "case", "trap", "echo", "printf", "source", "."):
                return []
            elif name in _KEYWORDS:
                words.pop(0)
            else:
                break
        return words

    def _condition(self, words: Sequence[Word | str], *, first: bool) -> None:
        found = self._test(words)
        if first:
            if found is None and self._is_read():
                self.script.notes.append(f"both branches of `if {_source(words)}` are read")
            self._branches.append([found, bool(found)])
        elif self._branches:
            branch = self._branches[-1]
            known = None if branch[0] is None or found is None else found and not branch[1]
            self._branches[-1] = [known, bool(branch[1] or known)]

    def _test(self, words: Sequence[Word | str]) -> bool | None:
        before = len(self.script.unresolved)
        flat = [" ".join(self._expand(word)) if isinstance(word, tuple) else word for word in words]
        known = len(self.script.unresolved) == before
        del self.script.unresolved[before:]
        match flat:
            case ["[" | "[[", left, "=" | "==", right, "]" | "]]"] if known:
                return left == right
            case ["[" | "[[", left, "!=", right, "]" | "]]"] if known:
                return left != right
            case ["[" | "[[", "-z", value, "]" | "]]"] if known:
                return not value
            case ["[" | "[[", "-n", value, "]" | "]]"] if known:
                return bool(value)
        return None

    def _command(self, words: list[Word | str]) -> None:
        while words and isinstance(words[0], tuple):
            head = _plain(words[0])
            if head in _PREFIXES:
                words.pop(0)
                continue
            first = words[0]
            found = _ASSIGNMENT.match(first[0].text) if not first[0].quoted else None
            if found is None:
                break
            name, adds = found.groups()
            words.pop(0)
            rest: Word = (Part(first[0].text[found.end() :], first[0].expands, first[0].quoted), *first[1:])
            if words and isinstance(words[0], str) and words[0] == "(" and not "".join(part.text for part in rest):
                end = words.index(")") if ")" in words else len(words)
                values = [one for word in words[1:end] if isinstance(word, tuple) for one in self._expand(word)]
                del words[: end + 1]
            else:
                values = [" ".join(self._expand(rest, split=False))]
                if adds and name in self.values:
                    values = ["".join((*self.values[name], *values))]
                    adds = ""
            self.values[name] = [*self.values.get(name, []), *values] if adds else values
        flat = [one for word in words if isinstance(word, tuple) for one in self._expand(word)]
        if flat and flat != [":"] and flat[0] != ":":
            self.script.commands.append(flat)

    def _expand(self, word: Word, *, split: bool = True) -> list[str]:
        """Return the words that a word becomes: an unquoted variable is split at blanks, an array has one for each item."""
        found, solid = [""], False
        for part in word:
            if not part.expands:
                found[-1] += part.text
                solid = solid or part.quoted
                continue
            for text, values in self._pieces(part.text):
                if values is None:
                    found[-1] += text
                    solid = solid or (part.quoted and bool(text))
                    continue
                one = " ".join(values)
                if part.quoted and text == "[@]":
                    pieces, solid = values, solid or bool(values)
                elif part.quoted or not split:
                    pieces, solid = [one], solid or part.quoted
                else:
                    pieces = one.split()
                if pieces:
                    found[-1] += pieces[0]
                    found += pieces[1:]
                solid = solid or (part.quoted and text != "[@]")
            solid = solid or (part.quoted and not part.text)
            if sum(map(len, found)) > MAX_EXPANSION:
                raise ConfigError(f"a variable of the script expands to over {MAX_EXPANSION} characters")
        return [] if found == [""] and not solid else found

    def _pieces(self, text: str) -> Iterator[tuple[str, list[str] | None]]:
        """Yield (text, None) for text, and ("", values) or ("[@]", values) for each variable."""
        at = 0
        while at < len(text):
            start = text.find("$", at)
            if start < 0 or start + 1 == len(text):
                yield text[at:], None
                return
            yield text[at:start], None
            end, kind, values = self._variable(text, start)
            if values is None:
                raw = text[start:end]
                if raw.startswith("$("):  # without blanks, which would split the word when it is used
                    raw = f"$({(raw[2:-1].split() or [''])[0]}...)"
                if raw not in self.script.unresolved:
                    self.script.unresolved.append(raw)
                yield raw, None
            else:
                yield kind, values
            at = end

    def _variable(self, text: str, start: int) -> tuple[int, str, list[str] | None]:
        """Return the end of a variable, `[@]` for the items of an array, and its values; None if they are unknown."""
        if text.startswith("$((", start):
            end = _closing(text, start + 1, "(", ")")
            value = self._arithmetic(text[start + 3 : end - 2])
            return end, "", None if value is None else [str(value)]
        if text.startswith("$(", start):
            return _closing(text, start + 1, "(", ")"), "", None
        if text.startswith("${", start):
            end = _closing(text, start + 1, "{", "}")
            return end, "[@]" if "[@]" in text[start:end] else "", self._braced(text[start + 2 : end - 1])
        if text[start + 1] in "@*":
            return start + 2, "[@]" if text[start + 1] == "@" else "", []  # arguments of the script: none are given
        found = _VARIABLE.match(text, start + 1)
        if found is None:
            return start + 1, "", ["$"]
        return found.end(), "", self.values.get(found.group())

    def _braced(self, inside: str) -> list[str] | None:
        found = re.fullmatch(r"([A-Za-z_]\w*)(\[[@*]\])?(?:(:?[-=])(.*))?", inside, re.DOTALL)
        if found is None:
            return [] if inside[:1] in ("@", "*") else None
        name, items, sign, default = found.groups()
        values = self.values.get(name)
        if values is not None and not (sign and sign[0] == ":" and not any(values)):
            return values
        if sign is None:
            return [] if items else None
        made = [" ".join(self._expand(_default(default), split=False))]
        if sign.endswith("="):
            self.values[name] = made
        return made

    def _arithmetic(self, text: str) -> int | None:
        """Compute integers, variables that hold integers, and ``+ - * / % ( )``; None for anything else."""
        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
        if len(plain) > 1000:
            return None
        try:
            return _compute(
                ast.parse(plain, mode="eval").body, {name: values[0] for name, values in self.values.items() if values}
            )
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _compute(node: ast.expr, values: Mapping[str, str], depth: int = 0) -> int:
    if depth > 50:
        raise ValueError
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if re.fullmatch(r"-?\d{1,18}", values.get(name, "")):
            return int(values[name])
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_compute(inner, values, depth + 1)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            found = _OPERATORS[type(sign)](_compute(left, values, depth + 1), _compute(right, values, depth + 1))
            if abs(found) < 10**18:
                return found
    raise ValueError


def _closing(text: str, start: int, opening: str, closing: str) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == opening) - (text[at] == closing)
        if depth == 0:
            return at + 1
    return len(text)


def _plain(word: Word) -> str:
    return word[0].text if len(word) == 1 and not word[0].quoted else ""


def _source(words: Sequence[Word | str]) -> str:
    text = " ".join(word if isinstance(word, str) else "".join(part.text for part in word) for word in words)
    return text if len(text) <= 60 else text[:57] + "..."


def _commands(text: str) -> Iterator[list[Word | str]]:
    """Yield each command's words; `(` and `)` are texts of their own."""
    text = _without_heredocs(text.replace("\r\n", "\n"))
    command: list[Word | str] = []
    depth = 0
    for count, token in enumerate(_tokens(text)):
        if count >= MAX_WORDS:
            raise ConfigError(f"the script has over {MAX_WORDS} words")
        if token in ("(", ")"):
            depth += 1 if token == "(" else -1
        if isinstance(token, str) and token not in ("(", ")"):
            if depth <= 0 and command:  # a line break within an array separates its items
                yield command
                command, depth = [], 0
        else:
            command.append(token)
    if command:
        yield command


def _without_heredocs(text: str) -> str:
    kept: list[str] = []
    end = ""
    for line in text.split("\n"):
        if end:
            end = "" if line.strip() == end else end
            continue
        if not line.lstrip().startswith("#"):
            kept.append(line)
            if found := re.search(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1", line):
                end = found.group(2)
    return "\n".join(kept)


_BREAKS = "\n;|&"


def _tokens(text: str) -> Iterator[Word | str]:
    """Yield words, brackets, and line breaks and separators (as `;`)."""
    at = 0
    while at < len(text):
        char = text[at]
        if char in "()":
            yield char
        elif char in _BREAKS:
            yield ";"
        elif char == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        elif char not in " \t" and not text.startswith("\\\n", at):
            parts: list[Part] = []
            at = _word(text, at, parts)
            if parts:
                yield tuple(parts)
            continue
        at += 2 if char == "\\" else 1


def _word(text: str, at: int, parts: list[Part]) -> int:
    """Add the parts of the word at a position; return the position after it."""
    while at < len(text) and text[at] not in " \t()" + _BREAKS:
        char = text[at]
        if char == "\\":
            if text[at + 1 : at + 2] != "\n":
                parts.append(Part(text[at + 1 : at + 2], expands=False, quoted=True))
            at += 2
        elif char == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise ConfigError("the script has a ' without its end")
            parts.append(Part(text[at + 1 : end], expands=False, quoted=True))
            at = end + 1
        elif char == '"':
            at = _double_quoted(text, at + 1, parts)
        elif char == "`":
            end = text.find("`", at + 1)
            end = len(text) if end < 0 else end
            parts.append(Part(f"$({text[at + 1 : end]})", expands=True, quoted=False))
            at = end + 1
        else:
            end = _unquoted(text, at)
            parts.append(Part(text[at:end], expands=True, quoted=False))
            at = end
    return at


def _default(text: str) -> Word:
    """Return the default of a variable as one word; blanks belong to it."""
    parts: list[Part] = []
    at = 0
    while at < len(text):
        end = _word(text, at, parts)
        if end == at:
            parts.append(Part(text[at], expands=False, quoted=True))
            end += 1
        at = end
    return tuple(parts) or (Part("", expands=False, quoted=True),)


def _unquoted(text: str, at: int) -> int:
    """Return the end of the unquoted text at a position; brackets of a variable or a substitution belong to it."""
    while at < len(text) and text[at] not in " \t()\\'\"`" + _BREAKS:
        if text.startswith(("$(", "${"), at):
            at = _closing(text, at + 1, text[at + 1], ")" if text[at + 1] == "(" else "}")
        else:
            at += 1
    return at


def _double_quoted(text: str, at: int, parts: list[Part]) -> int:
    """Add the parts of a text in double quotes; return the position after it."""
    found: list[str] = []

    def flush() -> None:
        parts.append(Part("".join(found), expands=True, quoted=True))
        found.clear()

    while at < len(text) and text[at] != '"':
        if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            if text[at + 1] != "\n":
                flush()
                parts.append(Part(text[at + 1], expands=False, quoted=True))
            at += 2
        elif text.startswith(("$(", "${"), at):
            end = _closing(text, at + 1, text[at + 1], ")" if text[at + 1] == "(" else "}")
            found.append(text[at:end])
            at = end
        else:
            found.append(text[at])
            at += 1
    if at >= len(text):
        raise ConfigError('the script has a " without its end')
    flush()
    return at + 1
