"""Read the commands of a shell script without running it: words, quotes, continuations, literal
variables and arrays.

`read_script` is the entry. `_split_commands` cuts the text into the words of its commands, and a
`_Reader` follows them: `_follow_keywords` decides which branches of `if` and `case` are read,
`_assign` sets variables, and `_expand` puts their values into words. `split_words` only cuts.

Nothing is executed and no process environment is read; of files, only scripts that it sources. What
only a shell can know (command substitutions, variables that the script does not set) stays in the
text as it is written and is reported in `Script.unresolved`. Conditions that only a shell can know
are reported with the words that depend on them. The body of a loop or of a function is read once,
where it stands.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from turnwright.errors import ConfigError
from turnwright.files import resolved

MAX_CHARACTERS = 1_000_000
MAX_WORDS = 100_000
MAX_EXPANSION = 200_000
"""Most characters of one expanded word: a script may set each variable to several copies of the
last one."""
MAX_SOURCED = 20
"""Most scripts that a script sources, one inside another."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)")
_LENGTH = re.compile(r"#([A-Za-z_]\w*)(\[[@*]\])?")
"""Inside of `${#name}` and `${#name[@]}`."""
_BRACED = re.compile(
    r"([A-Za-z_]\w*|\d+)(\[(?:[@*]|\d+)\])?(?:(:?[-=+?])(.*)|(%%?|##?|//?)(.*))?", re.DOTALL
)
"""Inside of `${...}`: a name, an index, and a default or an edit."""
_FOLDER_COMMAND = re.compile(
    r'\s*(?:cd(?: --)?|realpath|readlink -f)\s+"?([^"&;|]+)"?'
    r"\s*(?:[^;|]*&&\s*pwd(?: -P)?)?\s*"
)
"""Command that prints a folder, with its path."""
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>?|<<<|<<-?|<)(?!\()")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_INTEGER = re.compile(r"-?\d{1,18}")
_BREAKS = "\n;|&"

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
    """For each word of each command, the conditions that only a shell can know and on which it
    depends."""
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
    words = []
    for command in _split_commands(text):
        for word in command:
            if isinstance(word, tuple):
                words.append(_text_of(word))
    return words


# Open `if` and `case`


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

        fits = any(fnmatchcase(self.subject, pattern) for pattern in self.patterns)
        self.read = fits and not self.matched
        self.matched = self.matched or fits

    def end_branch(self) -> None:
        """Expect the patterns of the next branch."""
        self.expects = True
        self.read = False
        self.patterns.clear()


@dataclass(slots=True)
class _If:
    """An open `if`."""

    read: bool | None
    """Whether the current branch is read; None if that is unknown."""
    taken: bool
    """Whether one of its branches was."""
    source: str

    def next_branch(self, truth: bool | None) -> None:
        """Decide about `elif`."""
        if self.read is None or truth is None:
            self.read = None
        else:
            self.read = truth and not self.taken
        self.taken = bool(self.taken or self.read)

    def last_branch(self) -> None:
        """Decide about `else`."""
        self.read = None if self.read is None else not self.taken


@dataclass(slots=True)
class _Condition:
    """Tests between `if` and `then`."""

    first: bool
    """Whether it is that of `if`, not of `elif`."""
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
        value_before, link = self.groups.pop()
        self.value = _combined(value_before, link, self.value)

    def add(self, link: str, source: str, truth: bool | None) -> None:
        """Add one test."""
        if link or self.groups:
            self.source = f"{self.source} {link} {source}"
        self.value = _combined(self.value, link, truth)


def _combined(left: bool | None, link: str, right: bool | None) -> bool | None:
    """Return the value of two conditions; None if it is unknown."""
    if not link:
        return right

    # One side alone decides: a true one of `||`, a false one of `&&`.
    deciding = link == "||"
    if left is deciding or right is deciding:
        return deciding
    if left is None or right is None:
        return None
    return not deciding


@dataclass(frozen=True, slots=True)
class _Piece:
    """Literal text of a part, or one of its variables."""

    text: str
    """The text, or a variable as it is written."""
    values: list[str] | None = None
    """Values of a variable; None for a text and for a variable that is unknown."""
    is_array: bool = False
    """Whether it is written `[@]`, which makes each item a word also within quotes."""


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
        self._follow(text)
        for name, values in self.values.items():
            if len(values) == 1:
                self.script.variables[name] = values[0]
        return self.script

    def _follow(self, text: str) -> None:
        for command in _split_commands(text):
            if len(command) == 1 and isinstance(command[0], str):
                self._follow_separator(command[0])
                continue

            link = self._link
            self._link = ""
            words = self._follow_keywords(command, link)
            if not words or not self._is_read():
                continue

            # `&&` goes on after a success, `||` after a failure.
            is_known = self._status is not None
            if link and is_known and self._status is not (link == "&&"):
                continue

            depends_on_status = bool(link) and not is_known
            self._follow_command(words, self._status_source if depends_on_status else "")

    # Branches

    def _follow_separator(self, separator: str) -> None:
        """Follow `&&`, `||`, `;;` or `)`."""
        case = self._cases[-1] if self._cases else None
        if separator in ("&&", "||"):
            self._link = separator
        elif separator == ")" and case is not None and case.expects:
            case.start_branch()
        elif separator == ";;" and case is not None:
            case.end_branch()

    def _is_read(self) -> bool:
        """Return whether all open branches are read; an unknown one is."""
        ifs_read = all(branch.read is not False for branch in self._ifs)
        return ifs_read and all(case.read is not False for case in self._cases)

    def _unknown_conditions(self) -> set[str]:
        ifs = {f"if {branch.source}" for branch in self._ifs if branch.read is None}
        cases = {f"case {case.source}" for case in self._cases if case.read is None}
        return ifs | cases

    def _follow_keywords(self, command: Sequence[Word | str], link: str) -> list[Word | str]:
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
                self._start_branch(self._condition)
                self._condition = None
            elif self._condition is not None and name not in ("if", "elif"):
                self._add_test(words, link)
                return []
            elif self._follow_head(name, words):
                return []
            elif not self._follow_end(name) and name not in _KEYWORDS:
                break
            words.pop(0)

        return words

    def _follow_head(self, name: str, words: Sequence[Word | str]) -> bool:
        """Follow the head of a compound command, or a command that is not executed; return whether
        it is one."""
        if name in ("if", "elif"):
            self._condition = _Condition(name == "if", _source(words[1:]))
            self._add_test(words[1:], "")
        elif name == "case":
            self._open_case(words)
        elif name == "for":
            self._follow_loop(words)
        elif name in ("source", "."):
            if self._is_read():
                self._source_script(words[1:])
        elif name in ("while", "until", "trap", "echo", "printf"):
            self._status = True
        else:
            return False
        return True

    def _follow_end(self, name: str) -> bool:
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
        subject_words = self._known_words(words[1:2])
        subject = None if subject_words is None else " ".join(subject_words)
        self._cases.append(_Case(subject, _source(words[1:2])))
        # The first patterns may stand in the same line, after `in`.
        self._add_patterns(words[3:])

    def _add_patterns(self, words: Sequence[Word | str]) -> None:
        for word in words:
            if isinstance(word, tuple):
                self._cases[-1].patterns.extend(self._expand(word, split=False))

    def _follow_loop(self, words: Sequence[Word | str]) -> None:
        """Set the variable of a loop over one word; with several it has no single value."""
        if len(words) < 2 or not isinstance(words[1], tuple):
            return

        name = _plain(words[1])
        items = self._expand_all(words[3:])
        self.values.pop(name, None)
        if len(items) == 1:
            self.values[name] = items

    def _source_script(self, words: Sequence[Word | str]) -> None:
        names = self._expand_all(words[:1])
        path = None if self._folder is None or not names else self._folder / names[0]
        if path is None or not path.is_file() or self._sourced >= MAX_SOURCED:
            self.script.not_found.extend(names)
            return

        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            self.script.not_found.extend(names)
            return

        if len(text) <= MAX_CHARACTERS:
            self._sourced += 1
            self._follow(text)

    # Conditions

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

    def _start_branch(self, condition: _Condition) -> None:
        """Follow `then`."""
        truth = condition.value
        if condition.first:
            if truth is None and self._is_read():
                self.script.notes.append(f"both branches of `if {condition.source}` are read")
            self._ifs.append(_If(truth, bool(truth), condition.source))
        elif self._ifs:
            self._ifs[-1].next_branch(truth)

    def _known_words(self, words: Sequence[Word | str]) -> list[str] | None:
        """Return the expanded words; None if one of them holds something unknown."""
        count_before = len(self.script.unresolved)
        expanded = []
        for word in words:
            expanded.append(" ".join(self._expand(word)) if isinstance(word, tuple) else word)

        # A variable that was reported already is not reported again, and stays with its `$`.
        is_known = len(self.script.unresolved) == count_before and not any(
            "$" in text for text in expanded
        )
        # What only a condition uses is in no setting.
        del self.script.unresolved[count_before:]
        return expanded if is_known else None

    def _test(self, words: Sequence[Word | str]) -> bool | None:
        """Return the truth of a test; None if only a shell can know it."""
        if words and isinstance(words[0], tuple) and _plain(words[0]) == "!":
            truth = self._test(words[1:])
            return None if truth is None else not truth

        test = self._known_words(words)
        if test is None:
            return None
        if test in (["true"], ["false"]):
            return test == ["true"]

        is_double = test[:1] == ["[["] or test[-1:] == ["]]"]
        if not is_double and test[:1] != ["["]:
            return None
        if test[:1] in (["["], ["[["]):
            test = test[1:]
        if test[-1:] in (["]"], ["]]"]):
            test = test[:-1]

        return _truth_of(test, is_double=is_double)

    # Commands and assignments

    def _follow_command(self, words: list[Word | str], unknown_status: str) -> None:
        """Follow a command.

        `unknown_status` shows the command before it, whose success is unknown and decides whether
        this one runs; it is empty where nothing does.
        """
        conditions = self._unknown_conditions()
        if unknown_status:
            conditions.add(f"if {unknown_status}")
        self._follow_assignments(words, conditions)
        expanded, doubts = self._expand_command(words, conditions)

        # Of all commands only a test can be decided; others count as a success.
        is_test = _is_test(expanded)
        self._status = self._test(words) if is_test else True
        self._status_source = _source(words)

        if expanded[:1] == ["eval"]:
            self._follow(" ".join(expanded[1:]))
        elif expanded and expanded[0] != ":" and not is_test:
            self.script.add(expanded, doubts)

    def _follow_assignments(self, words: list[Word | str], conditions: set[str]) -> None:
        """Follow the assignments at the start of a command, and take them away."""
        while words and isinstance(words[0], tuple):
            first = words[0]
            if _plain(first) in _PREFIXES:
                words.pop(0)
                _drop_options(words)
                continue

            match = None if first[0].quoted else _ASSIGNMENT.match(first[0].text)
            if match is None:
                break
            words.pop(0)
            self._assign(match, first, words, conditions)

    def _assign(
        self,
        match: re.Match[str],
        word: Word,
        following: list[Word | str],
        conditions: set[str],
    ) -> None:
        """Set the variable of one assignment; the brackets of an array are taken away from the
        words that follow it."""
        name, plus = match.groups()
        first, *others = word
        value = (Part(first.text[match.end() :], first.expands, first.quoted), *others)
        self._met = set(conditions)

        if following and following[0] == "(" and not _text_of(value):
            end = following.index(")") if ")" in following else len(following)
            values = self._expand_all(following[1:end])
            del following[: end + 1]
            if plus:
                values = [*self.values.get(name, []), *values]
        else:
            text = " ".join(self._expand(value, split=False))
            earlier = self.values.get(name, []) if plus else []
            values = ["".join((*earlier, text))]

        self._set(name, values, keeps_doubts=bool(plus or conditions))

    def _set(self, name: str, values: list[str], *, keeps_doubts: bool) -> None:
        """Set a variable, and the conditions on which its value depends."""
        if self.values.get(name) == values:
            # A branch that sets what is set already decides nothing.
            return

        doubts = self._doubts.get(name, frozenset()) if keeps_doubts else frozenset()
        self._doubts[name] = doubts | frozenset(self._met)
        self.values[name] = values

    # Expansion

    def _expand_command(
        self, words: Sequence[Word | str], conditions: set[str]
    ) -> tuple[list[str], list[frozenset[str]]]:
        """Return the words of a command after expansion, each with the unknown conditions on which
        it depends."""
        expanded: list[str] = []
        doubts: list[frozenset[str]] = []
        pending: set[str] = set()
        for word in _without_redirections(words):
            if not isinstance(word, tuple):
                continue

            self._met = set(conditions)
            new_words = self._expand(word)
            expanded += new_words

            # A word that is empty here may be some in another branch: the next one has its doubts.
            pending |= self._met
            if new_words:
                doubts += [frozenset(pending)] * len(new_words)
                pending = set()

        if pending and doubts:
            doubts[-1] |= pending
        return expanded, doubts

    def _expand_all(self, words: Sequence[Word | str]) -> list[str]:
        expanded = []
        for word in words:
            if isinstance(word, tuple):
                expanded += self._expand(word)
        return expanded

    def _expand(self, word: Word, *, split: bool = True) -> list[str]:
        """Return the words that a word becomes: an unquoted variable is split at blanks, an array
        has one for each item."""
        words = [""]
        # A word that is empty disappears, unless quotes hold it.
        is_held = False
        for part in word:
            if not part.expands:
                words[-1] += part.text
                is_held = is_held or part.quoted
                continue

            for piece in self._pieces(part.text):
                if piece.values is None:
                    words[-1] += piece.text
                    is_held = is_held or (part.quoted and bool(piece.text))
                    continue

                if part.quoted and piece.is_array:
                    items = piece.values
                    is_held = is_held or bool(items)
                elif part.quoted or not split:
                    items = [" ".join(piece.values)]
                    is_held = is_held or part.quoted
                else:
                    items = " ".join(piece.values).split()

                # The first item goes on with the text before it.
                if items:
                    words[-1] += items[0]
                    words += items[1:]

            is_held = is_held or (part.quoted and not part.text)
            if sum(map(len, words)) > MAX_EXPANSION:
                raise ConfigError(
                    f"a variable of the script expands to over {MAX_EXPANSION} characters"
                )

        return [] if words == [""] and not is_held else words

    def _pieces(self, text: str) -> Iterator[_Piece]:
        """Yield the literal texts and the variables of a text."""
        position = 0
        while position < len(text):
            start = text.find("$", position)
            if start < 0 or start + 1 == len(text):
                yield _Piece(text[position:])
                return

            yield _Piece(text[position:start])
            position, piece = self._variable(text, start)
            if piece.values is not None:
                yield piece
                continue

            written = piece.text
            if written.startswith("$("):
                # Without blanks, which would split the word when it is used.
                first_word = (written[2:-1].split() or [""])[0]
                written = f"$({first_word}...)"
            if written not in self.script.unresolved:
                self.script.unresolved.append(written)
            yield _Piece(written)

    def _variable(self, text: str, start: int) -> tuple[int, _Piece]:
        """Return the position after a variable, and the variable."""
        next_char = text[start + 1]
        is_array = False
        values: list[str] | None
        if text.startswith("$((", start):
            end = _closing(text, start + 1, "(", ")")
            result = self._arithmetic(text[start + 3 : end - 2])
            values = None if result is None else [str(result)]
        elif next_char == "(":
            end = _closing(text, start + 1, "(", ")")
            folder = self._printed_folder(text[start + 2 : end - 1])
            values = None if folder is None else [folder]
        elif next_char == "{":
            end = _closing(text, start + 1, "{", "}")
            is_array = "[@]" in text[start:end]
            values = self._braced(text[start + 2 : end - 1])
        elif next_char in "@*":
            # Arguments of the script: none are given.
            end = start + 2
            is_array = next_char == "@"
            values = []
        elif next_char.isdigit() or next_char in "#?!$-":
            end = start + 2
            values = None
        else:
            match = _VARIABLE.match(text, start + 1)
            if match is None:
                end = start + 1
                values = ["$"]
            else:
                end = match.end()
                self._met |= self._doubts.get(match.group(), frozenset())
                values = self.values.get(match.group())

        return end, _Piece(text[start:end], values, is_array)

    def _printed_folder(self, command: str) -> str | None:
        """Return the folder that a substitution such as `$(cd "$(dirname "$0")/.." && pwd)` names;
        None for another one."""
        if self._folder is None:
            return None

        names_script = any(name in command for name in ("BASH_SOURCE", "$0", "${0}"))
        if "dirname" in command and names_script:
            above = re.search(r"/((?:\.\./?)+)", command)
            return str(resolved(above.group(1) if above else ".", self._folder))

        match = _FOLDER_COMMAND.fullmatch(command)
        if match is None:
            return None

        count_before = len(self.script.unresolved)
        path_word = (Part(match.group(1).strip(), expands=True, quoted=True),)
        path = " ".join(self._expand(path_word))
        is_known = len(self.script.unresolved) == count_before
        # The substitution as a whole is reported, not what stands in it.
        del self.script.unresolved[count_before:]
        return str(resolved(path)) if is_known and path.startswith("/") else None

    def _braced(self, inside: str) -> list[str] | None:
        """Return the values of `${inside}`; None if they are unknown."""
        length = _LENGTH.fullmatch(inside)
        if length is not None:
            values = self.values.get(length[1])
            if values is None:
                return None
            count = len(values) if length[2] else len(" ".join(values))
            return [str(count)]

        match = _BRACED.fullmatch(inside)
        if match is None:
            return [] if inside[:1] in ("@", "*") else None

        name, index, sign, default, edit, pattern = match.groups()
        self._met |= self._doubts.get(name, frozenset())
        values = self.values.get(name)
        if values is not None and index is not None and index[1:-1].isdigit():
            item = int(index[1:-1])
            values = values[item : item + 1]

        if edit is not None:
            if values is None:
                return None
            return [_edited(value, edit, pattern) for value in values]

        has_text = values is not None and any(values)
        if sign is not None and sign.endswith("+"):
            if not has_text:
                return []
            return [" ".join(self._expand(_default(default), split=False))]

        # With a colon, as in `:-`, a variable that is empty counts as one that is not set.
        needs_text = sign is not None and sign.startswith(":")
        if values is not None and (has_text or not needs_text):
            return values
        if sign is None or sign.endswith("?"):
            return [] if index else None

        default_values = [" ".join(self._expand(_default(default), split=False))]
        if sign.endswith("="):
            self.values[name] = default_values
        return default_values

    def _arithmetic(self, text: str) -> int | None:
        """Compute integers, variables that hold integers, and ``+ - * / % ( )``; None for anything
        else."""
        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
        for name in re.findall(r"[A-Za-z_]\w*", plain):
            self._met |= self._doubts.get(name, frozenset())
        if len(plain) > 1000:
            return None

        first_values = {name: values[0] for name, values in self.values.items() if values}
        try:
            return _compute(ast.parse(plain, mode="eval").body, first_values)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


# Values

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _compute(node: ast.expr, values: Mapping[str, str], depth: int = 0) -> int:
    """Return the value of an expression of integers; raise `ValueError` for another one."""
    if depth > 50:
        raise ValueError

    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if _INTEGER.fullmatch(values.get(name, "")):
            return int(values[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand, values, depth + 1)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            left_value = _compute(left, values, depth + 1)
            right_value = _compute(right, values, depth + 1)
            result = _OPERATORS[type(sign)](left_value, right_value)
            if abs(result) < 10**18:
                return result
    raise ValueError


def _truth_of(test: Sequence[str], *, is_double: bool) -> bool | None:
    """Return the truth of a test without its brackets; None for an operator that is not known here.

    Within `[[ ]]`, which is a double test, the right side is a pattern.
    """
    match test:
        case [left, "=" | "==", right]:
            return fnmatchcase(left, right) if is_double else left == right
        case [left, "!=", right]:
            return not fnmatchcase(left, right) if is_double else left != right
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


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def _compared(left: str, sign: str, right: str) -> bool | None:
    """Return the truth of a comparison; None for texts that are no integers."""
    if not (_INTEGER.fullmatch(left) and _INTEGER.fullmatch(right)):
        return None
    return bool(_COMPARISONS[sign](int(left), int(right)))


def _edited(text: str, edit: str, pattern: str) -> str:
    """Return a value after `${name%pattern}`, `${name#pattern}` (doubled: the longest match) or
    `${name/old/new}`."""
    if edit[0] == "/":
        old, _, new = pattern.partition("/")
        count = -1 if edit == "//" else 1
        return text.replace(old, new, count) if old else text

    # The first cut that fits is taken: the shortest match comes first, the longest if doubled.
    positions = range(len(text) + 1)
    cuts: Iterable[int]
    if edit[0] == "%":
        cuts = positions if edit == "%%" else reversed(positions)
        for cut in cuts:
            if fnmatchcase(text[cut:], pattern):
                return text[:cut]
    else:
        cuts = reversed(positions) if edit == "##" else positions
        for cut in cuts:
            if fnmatchcase(text[:cut], pattern):
                return text[cut:]
    return text


# Words of a command


def _is_test(words: Sequence[str]) -> bool:
    return words[:1] in (["["], ["[["]) or words[-1:] == ["]]"]


def _drop_options(words: list[Word | str]) -> None:
    """Take away the options that follow `declare` and the like."""
    while words and isinstance(words[0], tuple):
        if re.fullmatch(r"-[A-Za-z]+", _plain(words[0])) is None:
            return
        words.pop(0)


def _without_redirections(words: Sequence[Word | str]) -> list[Word | str]:
    """Return the words without `2>&1`, `> file`, `<<EOF` and the like."""
    kept: list[Word | str] = []
    is_target = False
    for word in words:
        text = word[0].text if isinstance(word, tuple) and not word[0].quoted else ""
        redirection = _REDIRECTION.match(text)
        if redirection is None and not is_target:
            kept.append(word)

        # The next word is the target where this one ends with the operator.
        has_more_parts = isinstance(word, tuple) and len(word) > 1
        is_target = (
            redirection is not None and redirection.end() == len(text) and not has_more_parts
        )
    return kept


def _plain(word: Word) -> str:
    """Return the text of a word without quotes; empty for another one."""
    return word[0].text if len(word) == 1 and not word[0].quoted else ""


def _text_of(word: Word) -> str:
    return "".join(part.text for part in word)


def _source(words: Sequence[Word | str]) -> str:
    """Return words as a note shows them."""
    text = " ".join(word if isinstance(word, str) else _text_of(word) for word in words)
    return text if len(text) <= 60 else text[:57] + "..."


# Text to words


def _split_commands(text: str) -> Iterator[list[Word | str]]:
    """Yield each command's words, and separators that decide something (`&&`, `;;`, `)`) as
    commands of one text.

    The brackets of an array are texts of their own within its command; its line breaks separate
    items.
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
        elif token == "(" and command and _opens_array(command[-1]):
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


def _opens_array(word: Word | str) -> bool:
    """Return whether a bracket after a word is that of an array."""
    if isinstance(word, str):
        return False
    last_part = word[-1]
    return last_part.text.endswith("=") and not last_part.quoted


def _without_heredocs(text: str) -> str:
    """Return a text without here documents and lines that are comments."""
    kept: list[str] = []
    end = ""
    for line in text.split("\n"):
        if end:
            if line.strip() == end:
                end = ""
            continue
        if line.lstrip().startswith("#"):
            continue

        kept.append(line)
        heredoc = _HEREDOC.search(line)
        if heredoc is not None:
            end = heredoc.group(2)
    return "\n".join(kept)


def _tokens(text: str) -> Iterator[Word | str]:
    """Yield words, brackets, and separators; a line break is `;`."""
    position = 0
    while position < len(text):
        char = text[position]
        if char in "()":
            yield char
            position += 1
        elif text[position : position + 2] in ("&&", "||", ";;"):
            yield text[position : position + 2]
            position += 2
        elif char in _BREAKS:
            # `2>&1` and `&>file` are redirections.
            before = text[position - 1 : position]
            after = text[position + 1 : position + 2]
            is_redirection = char == "&" and (before in ("<", ">") or after == ">")
            if not is_redirection:
                yield "|" if char == "|" else ";"
            position += 1
        elif char == "#":
            end_of_line = text.find("\n", position)
            position = len(text) if end_of_line < 0 else end_of_line
        elif char in " \t":
            position += 1
        elif text.startswith("\\\n", position):
            position += 2
        else:
            parts: list[Part] = []
            position = _add_word(text, position, parts)
            if parts:
                yield tuple(parts)


def _add_word(text: str, position: int, parts: list[Part]) -> int:
    """Add the parts of the word at a position; return the position after it."""
    while position < len(text) and text[position] not in " \t()" + _BREAKS:
        char = text[position]
        if char == "\\":
            escaped = text[position + 1 : position + 2]
            if escaped != "\n":
                parts.append(Part(escaped, expands=False, quoted=True))
            position += 2
        elif char == "'":
            end = text.find("'", position + 1)
            if end < 0:
                raise ConfigError("the script has a ' without its end")
            parts.append(Part(text[position + 1 : end], expands=False, quoted=True))
            position = end + 1
        elif char == '"':
            position = _add_double_quoted(text, position + 1, parts)
        elif char == "`":
            end = text.find("`", position + 1)
            if end < 0:
                end = len(text)
            parts.append(Part(f"$({text[position + 1 : end]})", expands=True, quoted=False))
            position = end + 1
        else:
            end = _unquoted_end(text, position)
            parts.append(Part(text[position:end], expands=True, quoted=False))
            position = end
    return position


def _add_double_quoted(text: str, position: int, parts: list[Part]) -> int:
    """Add the parts of a text in double quotes; return the position after it."""
    pending: list[str] = []

    def add_pending() -> None:
        parts.append(Part("".join(pending), expands=True, quoted=True))
        pending.clear()

    while position < len(text) and text[position] != '"':
        escaped = text[position + 1 : position + 2]
        if text[position] == "\\" and escaped in ('"', "\\", "$", "`", "\n"):
            if escaped != "\n":
                add_pending()
                parts.append(Part(escaped, expands=False, quoted=True))
            position += 2
        elif text.startswith(("$(", "${"), position):
            end = _substitution_end(text, position)
            pending.append(text[position:end])
            position = end
        else:
            pending.append(text[position])
            position += 1

    if position >= len(text):
        raise ConfigError('the script has a " without its end')
    add_pending()
    return position + 1


def _default(text: str) -> Word:
    """Return the default of a variable as one word; blanks belong to it."""
    parts: list[Part] = []
    position = 0
    while position < len(text):
        end = _add_word(text, position, parts)
        if end == position:
            # A blank, a bracket or a separator, which ends a word elsewhere.
            parts.append(Part(text[position], expands=False, quoted=True))
            end += 1
        position = end
    return tuple(parts) or (Part("", expands=False, quoted=True),)


def _unquoted_end(text: str, position: int) -> int:
    """Return the end of the unquoted text at a position; brackets of a variable or a substitution
    belong to it."""
    while position < len(text) and text[position] not in " \t()\\'\"`" + _BREAKS:
        if text.startswith(("$(", "${"), position):
            position = _substitution_end(text, position)
        else:
            position += 1
    return position


def _substitution_end(text: str, start: int) -> int:
    """Return the position after `$(...)` or `${...}`."""
    opening = text[start + 1]
    closing = ")" if opening == "(" else "}"
    return _closing(text, start + 1, opening, closing)


def _closing(text: str, start: int, opening: str, closing: str) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == opening) - (text[position] == closing)
        if depth == 0:
            return position + 1
    return len(text)
