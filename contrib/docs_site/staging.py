"""The sources of the site: the pages of the repository, with what a generator needs around them.

Pages keep their paths and their text. What is added: a page for each section, one for each topic of
the API, and, where the repository has no published address, a page for each file that a page links
to, so that no link is dead.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from contrib.docs_site.navigation import SECTIONS, TOPICS, Section, Topic, full_name

ROOT = Path(__file__).parents[2]

LANGUAGES = {
    ".css": "css",
    ".ipynb": "json",
    ".js": "javascript",
    ".jinja": "jinja",
    ".json": "json",
    ".jsonl": "text",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
}
"""Languages of files that pages link to, by their ending; others are text."""

FENCED = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence) *$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)")
LINK = re.compile(r"(?P<opening>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def repository_address() -> str:
    """Return `project.urls.Repository` of pyproject.toml; empty while there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project.get("urls", {}).get("Repository", "")).rstrip("/")


def all_pages() -> list[str]:
    """Return the paths of all pages of the sections."""
    return [page for section in SECTIONS for page in section.pages]


def stage(folder: Path) -> None:
    """Write the sources of the site into a folder, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "images", folder / "docs" / "images")

    stager = Stager(folder, repository_address())
    stager.home()
    for section in SECTIONS:
        for page in section.pages:
            stager.page(page)
        stager.section(section)
    for topic in TOPICS:
        stager.topic(topic)
    stager.linked_files()


class Stager:
    """Writes pages, and remembers which other files of the repository they link to."""

    def __init__(self, folder: Path, repository: str) -> None:
        self.folder = folder
        self.repository = repository
        self.pages = {*all_pages(), "README.md"}
        self.linked: dict[str, None] = {}  # in the order of the links

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def home(self) -> None:
        """README is the first page; the sections are behind it."""
        text = self.with_links((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")
        sections = "\n".join(f"{section.title} <{section.name}>" for section in SECTIONS)
        self.write("index.md", f"{text}\n{toctree(sections)}")

    def page(self, path: str) -> None:
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".ipynb"):
            text = notebook_text(text)
        self.write(staged(path), self.with_links(text, path))

    def section(self, section: Section) -> None:
        """The page of a section: what its pages are about, in their own words."""
        lines = [f"# {section.title}", "", section.about, ""]
        for page in section.pages:
            title, about = title_and_opening((self.folder / staged(page)).read_text("utf-8"))
            lines.append(f"- [{title}]({staged(page)}){': ' if about else ''}{about}")

        is_reference = section.name == "reference"
        caption = "Tables and rules" if is_reference else ""
        entries = [staged(page).removesuffix(".md") for page in section.pages]
        lines += ["", toctree("\n".join(entries), caption)]
        if is_reference:
            lines += ["## Python", "", "The public names, from their docstrings.", ""]
            lines += [f"- [{topic.title}](api/{topic.name}.rst): {topic.about}" for topic in TOPICS]
            lines += ["- {ref}`All names <genindex>`, in the order of the alphabet.", ""]
            lines += [toctree("\n".join(f"api/{topic.name}" for topic in TOPICS), "Python")]
        self.write(f"{section.name}.md", "\n".join(lines))

    def topic(self, topic: Topic) -> None:
        """A page of the API: docstrings, which the generator reads from the code."""
        lines = [topic.title, "=" * len(topic.title), "", topic.about, ""]
        if topic.name == "algorithms":
            lines += [".. highlight:: text", ""]  # formulas
        for name in topic.names:
            lines += [*directive(full_name(name)), ""]
        self.write(f"api/{topic.name}.rst", "\n".join(lines) + "\n")

    def linked_files(self) -> None:
        """A page for each file that pages link to. Folders list their files, which have pages
        too."""
        waiting = list(self.linked)
        written = set()
        while waiting:
            path = waiting.pop(0)
            if path in written:
                continue
            written.add(path)
            if (ROOT / path).is_dir():
                files = [str(file.relative_to(ROOT)) for file in files_of(ROOT / path)]
                waiting += files
                self.write(file_page(path), folder_text(path, files))
            else:
                self.write(file_page(path), file_text(path))

    def with_links(self, text: str, page: str) -> str:
        """Return a page's text with links to files that are no pages leading to their copies, or to
        the repository."""

        def changed(match: re.Match[str]) -> str:
            target = self.target(match["target"], page, is_image=bool(match["opening"]))
            return f"{match['opening']}[{match['text']}]({target})"

        pieces = []
        position = 0
        for code in code_spans(text):
            pieces += [LINK.sub(changed, text[position : code.start()]), code.group()]
            position = code.end()
        return "".join([*pieces, LINK.sub(changed, text[position:])])

    def target(self, target: str, page: str, *, is_image: bool) -> str:
        if is_image or "://" in target or target.startswith(("#", "mailto:")):
            return target

        path, hash_sign, anchor = target.partition("#")
        linked = os.path.normpath(os.path.join(os.path.dirname(page), path))
        here = os.path.dirname(staged(page))
        if linked in self.pages:
            return os.path.relpath(staged(linked), here) + hash_sign + anchor
        if linked.startswith("docs/images/"):
            return target
        if self.repository:
            return f"{self.repository}/blob/main/{linked}{hash_sign}{anchor}"
        self.linked[linked] = None
        return os.path.relpath(file_page(linked), here)


def staged(page: str) -> str:
    """Return where a page of the repository is among the sources."""
    if page == "README.md":
        return "index.md"
    if page.endswith(".ipynb"):
        return page.removesuffix(".ipynb") + ".md"
    return page


def file_page(path: str) -> str:
    return f"files/{path}.md"


def code_spans(text: str) -> Iterator[re.Match[str]]:
    """Yield fenced blocks and code within lines that has brackets, which are no links.

    Code inside the text of a link is a part of the link."""
    blocks = list(FENCED.finditer(text))
    spans = []
    position = 0
    for block in [*blocks, None]:
        end = len(text) if block is None else block.start()
        for code in INLINE_CODE.finditer(text, position, end):
            if "](" in code.group():
                spans.append(code)
        if block is not None:
            spans.append(block)
            position = block.end()
    yield from spans


def toctree(entries: str, caption: str = "") -> str:
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return f"```{{toctree}}\n{options}\n{entries}\n```\n"


def directive(name: str) -> list[str]:
    """Return the lines that put the docstring of an object, or of a module, onto a page."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        value = getattr(importlib.import_module(module), last)
    else:
        title = name.rpartition(".")[2]
        return [title, "-" * len(title), "", f".. automodule:: {name}"]

    if inspect.isclass(value) and issubclass(value, BaseException):
        return [f".. autoexception:: {name}", "   :members:", "   :show-inheritance:"]
    if inspect.isclass(value):
        return [f".. autoclass:: {name}", "   :members:"]
    return [f".. autofunction:: {name}"]


def title_and_opening(text: str) -> tuple[str, str]:
    """Return a page's title, and the first sentence of its opening paragraph."""
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert title is not None
    paragraph = text[title.end() :].strip().partition("\n\n")[0]
    words = LINK.sub(lambda link: link["text"], " ".join(paragraph.split()))
    if words.startswith(("#", "|", "`", "<", "-", "Written by")):
        return title[1], ""

    sentence = re.match(r".*?[.:](?= |$)", words)
    opening = sentence.group() if sentence else words
    opening = re.sub(r"^After this page you (can|know) ", "", opening.rstrip(".:"))
    return title[1], f"{opening[:1].upper()}{opening[1:]}."


def notebook_text(text: str) -> str:
    """Return the cells of a notebook as a page: its words, its code and what that printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            printed = output.get("text") or output.get("data", {}).get("text/plain", "")
            if printed:
                parts.append(f"```text\n{''.join(printed).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def files_of(folder: Path) -> list[Path]:
    """Return the text files of a folder, without what was built there."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix in {*LANGUAGES, ".md", ".txt"}
    )


HEAD = "---\norphan: true\nno-search: true\nhtml_theme.sidebar_secondary.remove: true\n---\n\n"


def folder_text(path: str, files: list[str]) -> str:
    """Return a page that lists the files of a folder."""
    here = os.path.dirname(file_page(path))
    lines = [f"- [{file}]({os.path.relpath(file_page(file), here)})" for file in files]
    return "\n".join([f"{HEAD}# {path}", "", *lines, ""])


def file_text(path: str) -> str:
    """Return a page that shows a file as it is."""
    text = (ROOT / path).read_text(encoding="utf-8")
    ticks = "`" * (2 + max(map(len, re.findall(r"`+", text)), default=1))
    language = LANGUAGES.get(Path(path).suffix, "text")
    block = f"{ticks}{{code-block}} {language}\n:linenos:\n\n{text}\n{ticks}\n"
    return f"{HEAD}# {path}\n\n{block}"
