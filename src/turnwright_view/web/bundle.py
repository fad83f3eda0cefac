"""The page's code as one script: modules are joined in the order of their imports, without a build
step.

Each import is one line, `import {a, b} from './x.js';`, and no two modules have a top-level name in
common, so that imports and `export` can simply be left out.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"

VENDOR = ("preact.js", "hooks.js", "htm.js", "uplot.js")
"""Scripts of others, whole, in the order in which they need each other."""

_IMPORT = re.compile(r"^import \{[^}]*\} from '(\.{1,2}/[\w./-]+\.js)';$", re.MULTILINE)
_ANY_IMPORT = re.compile(r"^import\b.*", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async |const |function |let |class ))", re.MULTILINE)
_ANY_EXPORT = re.compile(r"^export\b.*", re.MULTILINE)
_NAME = re.compile(
    r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+|\{[^}]*\})", re.MULTILINE
)
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


def joined(main: Path) -> str:
    """Return a module and all that it imports as one script, in which each comes after what it
    imports; raise `RuntimeError` for what cannot be joined."""
    modules: dict[Path, str] = {}
    _follow(main.resolve(), modules, ())
    names: dict[str, Path] = {}
    texts = []
    for path, text in modules.items():
        for name in _top_level_names(text):
            if name in names:
                raise RuntimeError(f"{path}: the name {name} is in {names[name]} too; rename one")
            names[name] = path
        texts.append(_EXPORT.sub("", _IMPORT.sub("", text)).strip())
    return "'use strict';\n(() => {\n" + "\n\n".join(texts) + "\n})();\n"


def _follow(path: Path, modules: dict[Path, str], above: tuple[Path, ...]) -> None:
    """Add a module behind those that it imports; functions may need each other in a circle."""
    if path in modules or path in above:
        return
    text = path.read_text(encoding="utf-8")
    for line in _ANY_IMPORT.findall(text):
        if not _IMPORT.fullmatch(line):
            raise RuntimeError(f"{path}: {line}: an import is `import {{a, b}} from './x.js';`")
    for line in _ANY_EXPORT.findall(text):
        if not _EXPORT.match(line):
            raise RuntimeError(f"{path}: {line}: `export` stands before a declaration")
    for name in _IMPORT.findall(text):
        _follow((path.parent / name).resolve(), modules, (*above, path))
    modules[path] = text


def _top_level_names(text: str) -> list[str]:
    names: list[str] = []
    for declared in _NAME.findall(text):
        parts = declared.strip("{}").split(",")
        names += [part.partition(":")[2].strip() or part.strip() for part in parts]
    return names


@cache
def script() -> str:
    """Return the page's code."""
    return joined(ASSETS / "main.js")


@cache
def style() -> str:
    """Return the page's style sheet: `base.css`, then those of the views."""
    files = sorted(ASSETS.glob("*.css"), key=lambda file: (file.name != "base.css", file.name))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def vendor_script() -> str:
    """Return the code of others that the page's code needs."""
    texts = [(ASSETS / "vendor" / name).read_text(encoding="utf-8") for name in VENDOR]
    return "\n".join(_SOURCE_MAP.sub("", text).strip() for text in texts) + "\n"


@cache
def vendor_style() -> str:
    """Return the style sheets of others."""
    files = sorted((ASSETS / "vendor").glob("*.css"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def page(head: str, body: str) -> str:
    """Return the page's HTML with more in its head and at the end of its body."""
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    before, _, rest = text.partition("<!--HEAD-->")
    between, _, after = rest.partition("<!--BODY-->")
    return "".join([before, head, between, body, after])
