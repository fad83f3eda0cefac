"""Read the commands of a shell script without running it: words, quotes, continuations,
literal variables and arrays.

Nothing is executed and no process environment is read; of files, only scripts that it sources. What
only a shell can know (command substitutions, variables that the script does not set) stays in the
text as it is written and is reported in `Script.unresolved`; conditions that only a shell can know
are reported with the words that depend on them.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from turnwright.errors import ConfigError
from turnwright.files import resolved

MAX_CHARACTERS = 1_000_000
MAX_WORDS = 100_000
MAX_EXPANSION = 200_000
"""Most characters of one expanded word: a script may set each variable to several
copies of the last one."""
MAX_SOURCED = 20
"""Most scripts that a script sources, one inside another."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)")
_KEYWORDS = {
    "then",
    "do",
    "done",
    "fi",
    "else",
    "{",
    "}",
    "esac",
    "time",
    "!",
    "exec",
    "nohup",
    "set",
    "function",
}
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
    doubts: list[list[frozenset[str]]] = field(default_factory=list)
    """For each word of each command, the conditions that only a shell can know
    and on which it depends."""
    not_found: list[str] = field(default_factory=list)
    """Scripts that it sources and that are not there."""
    unresolved: list[str] = field(default_factory=list)
    """Variables and substitutions left as they are written, in order."""
    notes: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """Variables with one value."""

    def add(self, words: list[str], doubts: list[frozenset[str]] | None = None) -> None:
        """Add a command."""
        self.commands.append(words)
        self.doubts.append([frozenset()] * len(words) if doubts is None else doubts)


def read_script(text: str, folder: Path | None = None) -> Script:
    """Return the commands of a script; raise `ConfigError` for one that cannot be read.

    Args:
        text: its content.
        folder: where it is, for the scripts that it sources; None reads none.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"the script has {len(text)} characters; at most {MAX_CHARACTERS} are read"
        )
    return _Reader(folder).read(text)


def split_words(text: str) -> list[str]:
    """Return the words of an argument list, without expansion."""
    return [
        "".join(part.text for part in word)
        for command in _commands(text)
        for word in command
        if isinstance(word, tuple)
    ]


@dataclass(slots=True)
class _Case:
    """An open `case`."""

    subject: str | None
    """Its word; None if it is unknown."""
    source: str
    expects: bool = True
    """Whether patterns come next."""
    patterns: list[str] = field(default_factory=list)
    read: bool | None = False
    """Whether the current branch is read; None if that is unknown."""
    matched: bool = False

    def start_branch(self) -> None:
        """Decide about the branch of the patterns that were read."""
        self.expects = False
        if self.subject is None:
            self.read = None
            return
        fits = any(fnmatchcase(self.subject, one) for one in self.patterns)
        self.read = fits and not self.matched
        self.matched = self.matched or fits

    def end_branch(self) -> None:
        """Expect the patterns of the next branch."""
        self.expects, self.read = True, False
        self.patterns.clear()


@dataclass(slots=True)
class _If:
    """An open `if`."""

    read: bool | None
    """Whether the current branch is read; None if that is unknown."""
    taken: bool
    """Whether one of its branches was."""
    source: str

    def next_branch(self, found: bool | None) -> None:
        """Decide about `elif`."""
        self.read = None if self.read is None or found is None else found and not self.taken
        self.taken = bool(self.taken or self.read)

    def last_branch(self) -> None:
        """Decide about `else`."""
        self.read = None if self.read is None else not self.taken


@dataclass(slots=True)
class _Condition:
    """Tests between `if` and `then`."""

    first: bool
    source: str
    value: bool | None = None
    groups: list[tuple[bool | None, str]] = field(default_factory=list)
    """For each open `{`, the value before it and the operator between."""

    def open_group(self, link: str) -> None:
        """Follow `{`."""
        self.groups.append((self.value, link))
        self.value = None

    def close_group(self) -> None:
        """Follow `}`."""
        before, between = self.groups.pop()
        self.value = _combined(before, between, self.value)

    def add(self, link: str, source: str, found: bool | None) -> None:
        """Add one test."""
        if link or self.groups:
            self.source = f"{self.source} {link} {source}"
        self.value = _combined(self.value, link, found)


class _Reader:
    def __init__(self, folder: Path | None = None) -> None:
        self.values: dict[str, list[str]] = {}
        self.script = Script()
        self._folder = folder
        self._sourced = 0
        self._ifs: list[_If] = []
        self._cases: list[_Case] = []
        self._condition: _Condition | None = None
        self._link = ""
        """`&&` or `||` between the last command and the next one."""
        self._status: bool | None = True
        """Whether the last command succeeded; None if that is unknown."""
        self._status_source = ""
        self._doubts: dict[str, frozenset[str]] = {}
        """Variable -> the unknown conditions on which its value depends."""
        self._met: set[str] = set()
        """Unknown conditions of the variables that were expanded."""

    def read(self, text: str) -> Script:
        self._commands(text)
        self.script.variables.update(
            (name, values[0]) for name, values in self.values.items() if len(values) == 1
        )
        return self.script

    def _commands(self, text: str) -> None:
        for command in _commands(text):
            if len(command) == 1 and isinstance(command[0], str):
                self._mark(command[0])
                continue
            link, self._link = self._link, ""
            words = self._control(command, link)
            if not words or not self._is_read():
                continue
            if link and self._status is not None and self._status is not (link == "&&"):
                continue
            unknown = bool(link) and self._status is None
            self._command(words, unknown=self._status_source if unknown else "")

    def _mark(self, mark: str) -> None:
        """Follow a separator: `&&`, `||`, `|`, `;;` or `)`."""
        case = self._cases[-1] if self._cases else None
        if mark in ("&&", "||"):
            self._link = mark
        elif mark == ")" and case is not None and case.expects:
            case.start_branch()
        elif mark == ";;" and case is not None:
            case.end_branch()

    def _is_read(self) -> bool:
        return all(one.read is not False for one in self._ifs) and all(
            one.read is not False for one in self._cases
        )

    def _unknown_conditions(self) -> set[str]:
        ifs = {f"if {one.source}" for one in self._ifs if one.read is None}
        return ifs | {f"case {one.source}" for one in self._cases if one.read is None}

    def _control(self, command: Sequence[Word | str], link: str) -> list[Word | str]:
        """Follow `if` and `case`, and return the command without shell keywords."""
        words = list(command)
        if self._cases and self._cases[-1].expects:
            if isinstance(words[0], tuple) and _plain(words[0]) == "esac":
                self._cases.pop()
            else:
                self._add_patterns(words)
            return []
        while words and isinstance(words[0], tuple):
            name = _plain(words[0])
            if name == "then" and self._condition is not None:
                self._branch(self._condition)
                self._condition = None
            elif self._condition is not None and name not in ("if", "elif"):
                self._add_test(words, link)
                return []
            elif self._heads(name, words):
                return []
            elif not self._closes(name) and name not in _KEYWORDS:
                break
            words.pop(0)
        return words

    def _heads(self, name: str, words: Sequence[Word | str]) -> bool:
        """Follow the head of a compound command, or a command that is not executed;
        return whether it is one."""
        if name in ("if", "elif"):
            self._condition = _Condition(name == "if", _source(words[1:]))
            self._add_test(words[1:], "")
        elif name == "case":
            self._open_case(words)
        elif name == "for":
            self._loop(words)
        elif name in ("source", "."):
            if self._is_read():
                self._source_script(words[1:])
        elif name in ("while", "until", "trap", "echo", "printf"):
            self._status = True
        else:
            return False
        return True

    def _closes(self, name: str) -> bool:
        """Follow `else`, `fi` and `esac`; return whether the word is one."""
        if name == "else" and self._ifs:
            self._ifs[-1].last_branch()
        elif name == "fi" and self._ifs:
            self._ifs.pop()
        elif name == "esac" and self._cases:
            self._cases.pop()
        else:
            return False
        return True

    def _open_case(self, words: Sequence[Word | str]) -> None:
        given = self._known_words(words[1:2])
        self._cases.append(_Case(None if given is None else " ".join(given), _source(words[1:2])))
        self._add_patterns(words[3:])

    def _add_patterns(self, words: Sequence[Word | str]) -> None:
        for word in words:
            if isinstance(word, tuple):
                self._cases[-1].patterns.extend(self._expand(word, split=False))

    def _loop(self, words: Sequence[Word | str]) -> None:
        """Set the variable of a loop over one word; with several it has no single value."""
        if len(words) < 2 or not isinstance(words[1], tuple):
            return
        items = [one for word in words[3:] if isinstance(word, tuple) for one in self._expand(word)]
        self.values.pop(_plain(words[1]), None)
        if len(items) == 1:
            self.values[_plain(words[1])] = items

    def _source_script(self, words: Sequence[Word | str]) -> None:
        given = [one for word in words[:1] if isinstance(word, tuple) for one in self._expand(word)]
        path = None if self._folder is None or not given else self._folder / given[0]
        if path is None or not path.is_file() or self._sourced >= MAX_SOURCED:
            self.script.not_found.extend(given)
            return
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            self.script.not_found.extend(given)
            return
        if len(text) <= MAX_CHARACTERS:
            self._sourced += 1
            self._commands(text)

    def _add_test(self, words: Sequence[Word | str], link: str) -> None:
        condition = self._condition
        assert condition is not None
        name = _plain(words[0]) if words and isinstance(words[0], tuple) else ""
        if name == "{":
            condition.open_group(link)
            self._add_test(words[1:], "")
        elif name == "}" and condition.groups:
            condition.close_group()
        else:
            condition.add(link, _source(words), self._test(words))

    def _branch(self, condition: _Condition) -> None:
        found = condition.value
        if condition.first:
            if found is None and self._is_read():
                self.script.notes.append(f"both branches of `if {condition.source}` are read")
            self._ifs.append(_If(found, bool(found), condition.source))
        elif self._ifs:
            self._ifs[-1].next_branch(found)

    def _known_words(self, words: Sequence[Word | str]) -> list[str] | None:
        """Return the expanded words; None if one of them holds something unknown."""
        before = len(self.script.unresolved)
        flat = [" ".join(self._expand(word)) if isinstance(word, tuple) else word for word in words]
        known = len(self.script.unresolved) == before and not any("$" in one for one in flat)
        del self.script.unresolved[before:]
        return flat if known else None

    def _test(self, words: Sequence[Word | str]) -> bool | None:
        if words and isinstance(words[0], tuple) and _plain(words[0]) == "!":
            inner = self._test(words[1:])
            return None if inner is None else not inner
        flat = self._known_words(words)
        if flat is None:
            return None
        if flat in (["true"], ["false"]):
            return flat == ["true"]
        double = "[[" in flat[:1] or "]]" in flat[-1:]
        if not (double or flat[:1] == ["["]):
            return None
        flat = flat[1:] if flat[:1] in (["["], ["[["]) else flat
        flat = flat[:-1] if flat[-1:] in (["]"], ["]]"]) else flat
        match flat:
            case [left, "=" | "==", right]:
                return fnmatchcase(left, right) if double else left == right
            case [left, "!=", right]:
                return not fnmatchcase(left, right) if double else left != right
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as sign, right]:
                return _compared(left, sign, right)
            case ["-z", value]:
                return not value
            case ["-z"]:
                return True
            case ["-n", value]:
                return bool(value)
            case ["-n"]:
                return False
        return None

    def _command(self, words: list[Word | str], unknown: str = "") -> None:
        conditions = self._unknown_conditions() | ({f"if {unknown}"} if unknown else set())
        assigns = self._assignments(words, conditions)
        flat, doubts = self._expanded(words, conditions)

        self._status = (
            True if assigns and not flat else self._test(words) if _is_test(flat) else True
        )
        self._status_source = _source(words)
        if flat[:1] == ["eval"]:
            self._commands(" ".join(flat[1:]))
        elif flat and flat[0] != ":" and not _is_test(flat):
            self.script.add(flat, doubts)

    def _assignments(self, words: list[Word | str], conditions: set[str]) -> bool:
        """Follow the assignments at the start of a command, and take them away; return
        whether there was one."""
        assigns = False
        while words and isinstance(words[0], tuple):
            if _plain(words[0]) in _PREFIXES:
                words.pop(0)
                while (
                    words
                    and isinstance(words[0], tuple)
                    and re.fullmatch(r"-[A-Za-z]+", _plain(words[0]))
                ):
                    words.pop(0)
                continue
            first = words[0]
            found = _ASSIGNMENT.match(first[0].text) if not first[0].quoted else None
            if found is None:
                break
            assigns = True
            name, adds = found.groups()
            words.pop(0)
            self._met = set(conditions)
            rest: Word = (
                Part(first[0].text[found.end() :], first[0].expands, first[0].quoted),
                *first[1:],
            )
            if (
                words
                and isinstance(words[0], str)
                and words[0] == "("
                and not "".join(part.text for part in rest)
            ):
                end = words.index(")") if ")" in words else len(words)
                values = [
                    one
                    for word in words[1:end]
                    if isinstance(word, tuple)
                    for one in self._expand(word)
                ]
                del words[: end + 1]
            else:
                values = [" ".join(self._expand(rest, split=False))]
                if adds and name in self.values:
                    values = ["".join((*self.values[name], *values))]
                    adds = ""
            keeps = bool(found.group(2) or conditions)
            self._set(name, [*self.values.get(name, []), *values] if adds else values, keeps=keeps)
        return assigns

    def _set(self, name: str, values: list[str], *, keeps: bool) -> None:
        """Set a variable, and the conditions on which its value depends."""
        if self.values.get(name) == values:
            # A branch that sets what is set already decides nothing.
            return
        kept = self._doubts.get(name, frozenset()) if keeps else frozenset()
        self._doubts[name] = kept | frozenset(self._met)
        self.values[name] = values

    def _expanded(
        self, words: Sequence[Word | str], conditions: set[str]
    ) -> tuple[list[str], list[frozenset[str]]]:
        """Return the words of a command after expansion, each with the unknown
        conditions on which it depends."""
        flat: list[str] = []
        doubts: list[frozenset[str]] = []
        pending: set[str] = set()
        for word in _without_redirections(words):
            if not isinstance(word, tuple):
                continue
            self._met = set(conditions)
            expanded = self._expand(word)
            flat += expanded
            pending |= self._met
            if expanded:
                doubts += [frozenset(pending)] * len(expanded)
                pending = set()
        if pending and doubts:  # a word that is empty in the branch that is read
            doubts[-1] |= pending
        return flat, doubts

    def _expand(self, word: Word, *, split: bool = True) -> list[str]:
        """Return the words that a word becomes: an unquoted variable is split at blanks, an array
        has one for each item."""
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
                raise ConfigError(
                    f"a variable of the script expands to over {MAX_EXPANSION} characters"
                )
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
                if raw.startswith("$("):
                    # Without blanks, which would split the word when it is used.
                    raw = f"$({(raw[2:-1].split() or [''])[0]}...)"
                if raw not in self.script.unresolved:
                    self.script.unresolved.append(raw)
                yield raw, None
            else:
                yield kind, values
            at = end

    def _variable(self, text: str, start: int) -> tuple[int, str, list[str] | None]:
        """Return the end of a variable, `[@]` for the items of an array, and its values;
        None if they are unknown."""
        if text.startswith("$((", start):
            end = _closing(text, start + 1, "(", ")")
            value = self._arithmetic(text[start + 3 : end - 2])
            return end, "", None if value is None else [str(value)]
        if text.startswith("$(", start):
            end = _closing(text, start + 1, "(", ")")
            place = self._place(text[start + 2 : end - 1])
            return end, "", None if place is None else [place]
        if text.startswith("${", start):
            end = _closing(text, start + 1, "{", "}")
            return (
                end,
                "[@]" if "[@]" in text[start:end] else "",
                self._braced(text[start + 2 : end - 1]),
            )
        if text[start + 1] in "@*":
            # Arguments of the script: none are given.
            return start + 2, "[@]" if text[start + 1] == "@" else "", []
        if text[start + 1].isdigit() or text[start + 1] in "#?!$-":
            return start + 2, "", None
        found = _VARIABLE.match(text, start + 1)
        if found is None:
            return start + 1, "", ["$"]
        self._met |= self._doubts.get(found.group(), frozenset())
        return found.end(), "", self.values.get(found.group())

    def _place(self, command: str) -> str | None:
        """Return the folder that a substitution such as `$(cd "$(dirname "$0")/.." && pwd)` names;
        None for another one."""
        if self._folder is None:
            return None
        if "dirname" in command and (
            "BASH_SOURCE" in command or "$0" in command or "${0}" in command
        ):
            above = re.search(r"/((?:\.\./?)+)", command)
            return str(resolved(above.group(1) if above else ".", self._folder))
        found = re.fullmatch(
            r'\s*(?:cd(?: --)?|realpath|readlink -f)\s+"?([^"&;|]+)"?\s*(?:[^;|]*&&\s*pwd(?: -P)?)?\s*',  # noqa: E501
            command,
        )
        if found is None:
            return None
        before = len(self.script.unresolved)
        path = " ".join(self._expand((Part(found.group(1).strip(), expands=True, quoted=True),)))
        known = len(self.script.unresolved) == before
        del self.script.unresolved[before:]
        return str(resolved(path)) if known and path.startswith("/") else None

    def _braced(self, inside: str) -> list[str] | None:
        if (counted := re.fullmatch(r"#([A-Za-z_]\w*)(\[[@*]\])?", inside)) is not None:
            values = self.values.get(counted[1])
            return (
                None
                if values is None
                else [str(len(values) if counted[2] else len(" ".join(values)))]
            )
        found = re.fullmatch(
            r"([A-Za-z_]\w*|\d+)(\[(?:[@*]|\d+)\])?(?:(:?[-=+?])(.*)|(%%?|##?|//?)(.*))?",
            inside,
            re.DOTALL,
        )
        if found is None:
            return [] if inside[:1] in ("@", "*") else None
        name, items, sign, default, edit, pattern = found.groups()
        self._met |= self._doubts.get(name, frozenset())
        values = self.values.get(name)
        if values is not None and items is not None and items[1:-1].isdigit():
            at = int(items[1:-1])
            values = values[at : at + 1]
        if edit is not None:
            return None if values is None else [_edited(one, edit, pattern) for one in values]
        if sign is not None and sign.endswith("+"):
            return (
                [" ".join(self._expand(_default(default), split=False))]
                if values and any(values)
                else []
            )
        if values is not None and not (sign and sign[0] == ":" and not any(values)):
            return values
        if sign is None or sign.endswith("?"):
            return [] if items else None
        made = [" ".join(self._expand(_default(default), split=False))]
        if sign.endswith("="):
            self.values[name] = made
        return made

    def _arithmetic(self, text: str) -> int | None:
        """Compute integers, variables that hold integers, and ``+ - * / % ( )``;
        None for anything else."""
        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
        for name in re.findall(r"[A-Za-z_]\w*", plain):
            self._met |= self._doubts.get(name, frozenset())
        if len(plain) > 1000:
            return None
        try:
            return _compute(
                ast.parse(plain, mode="eval").body,
                {name: values[0] for name, values in self.values.items() if values},
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
            found = _OPERATORS[type(sign)](
                _compute(left, values, depth + 1), _compute(right, values, depth + 1)
            )
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


def _combined(left: bool | None, link: str, right: bool | None) -> bool | None:
    """Return the value of two conditions; None if it is unknown."""
    if not link:
        return right
    decides = link == "||"  # what one side must be to decide alone
    if left is decides or right is decides:
        return decides
    return None if left is None or right is None else not decides


def _compared(left: str, sign: str, right: str) -> bool | None:
    if not (re.fullmatch(r"-?\d{1,18}", left) and re.fullmatch(r"-?\d{1,18}", right)):
        return None
    compare = {
        "-eq": operator.eq,
        "-ne": operator.ne,
        "-lt": operator.lt,
        "-le": operator.le,
        "-gt": operator.gt,
        "-ge": operator.ge,
    }
    return bool(compare[sign](int(left), int(right)))


def _without_redirections(words: Sequence[Word | str]) -> list[Word | str]:
    """Return the words without `2>&1`, `> file`, `<<EOF` and the like."""
    kept: list[Word | str] = []
    skips = False
    for word in words:
        text = word[0].text if isinstance(word, tuple) and not word[0].quoted else ""
        found = re.match(r"(?:\d|&)?(?:>>?|<<<|<<-?|<)(?!\()", text)
        if found is None and not skips:
            kept.append(word)
        target = word[1:] if isinstance(word, tuple) else ()
        skips = found is not None and found.end() == len(text) and not target
    return kept


def _is_test(words: Sequence[str]) -> bool:
    return words[:1] in (["["], ["[["]) or words[-1:] == ["]]"]


def _edited(text: str, edit: str, pattern: str) -> str:
    """Return a value after `${name%pattern}`, `${name#pattern}` (doubled: the longest
    match) or `${name/old/new}`."""
    if edit[0] == "/":
        old, _, new = pattern.partition("/")
        return text.replace(old, new, -1 if edit == "//" else 1) if old else text
    cuts = range(len(text) + 1)
    if edit[0] == "%":
        at = next(
            (
                one
                for one in (cuts if edit == "%%" else reversed(cuts))
                if fnmatchcase(text[one:], pattern)
            ),
            None,
        )
        return text if at is None else text[:at]
    at = next(
        (
            one
            for one in (reversed(cuts) if edit == "##" else cuts)
            if fnmatchcase(text[:one], pattern)
        ),
        None,
    )
    return text if at is None else text[at:]


def _plain(word: Word) -> str:
    return word[0].text if len(word) == 1 and not word[0].quoted else ""


def _source(words: Sequence[Word | str]) -> str:
    text = " ".join(
        word if isinstance(word, str) else "".join(part.text for part in word) for word in words
    )
    return text if len(text) <= 60 else text[:57] + "..."


def _commands(text: str) -> Iterator[list[Word | str]]:
    """Yield each command's words, and separators that decide something (`&&`, `;;`,
    `)`) as commands of one text.

    The brackets of an array are texts of their own within its command; its
    line breaks separate items.
    """
    text = _without_heredocs(text.replace("\r\n", "\n"))
    command: list[Word | str] = []
    in_array = False
    for count, token in enumerate(_tokens(text)):
        if count >= MAX_WORDS:
            raise ConfigError(f"the script has over {MAX_WORDS} words")
        if isinstance(token, tuple):
            command.append(token)
        elif in_array:
            if token == ")":
                command.append(token)
                in_array = False
        elif (
            token == "("
            and command
            and isinstance(command[-1], tuple)
            and _opens_array(command[-1])
        ):
            command.append(token)
            in_array = True
        else:
            if command:
                yield command
                command = []
            if token in ("&&", "||", ";;", ")"):
                yield [token]
    if command:
        yield command


def _opens_array(word: Word) -> bool:
    last = word[-1]
    return last.text.endswith("=") and not last.quoted


def _without_heredocs(text: str) -> str:
    kept: list[str] = []
    end = ""
    for line in text.split("\n"):
        if end:
            end = "" if line.strip() == end else end
            continue
        if not line.lstrip().startswith("#"):
            kept.append(line)
            if found := re.search(r"(?<!<)<<(?!<)-?\s*(['\"]?)([A-Za-z_]\w*)\1", line):
                end = found.group(2)
    return "\n".join(kept)


_BREAKS = "\n;|&"


def _tokens(text: str) -> Iterator[Word | str]:
    """Yield words, brackets, and separators; a line break is `;`."""
    at = 0
    while at < len(text):
        char = text[at]
        if char in "()":
            yield char
        elif char in _BREAKS:
            double = text[at : at + 2]
            if double in ("&&", "||", ";;"):
                yield double
                at += 2
                continue
            # `2>&1` and `&>file` are redirections
            if not (
                char == "&" and (text[at - 1 : at] in ("<", ">") or text[at + 1 : at + 2] == ">")
            ):
                yield ";" if char != "|" else "|"
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
    """Return the end of the unquoted text at a position; brackets of a variable or a
    substitution belong to it."""
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
