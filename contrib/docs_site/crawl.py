"""Crawl a built site: dead links, pages that nothing leads to, and requests to other machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src"}
"""Elements that make a browser request what they name."""

IN_STYLE = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


@dataclass
class Page(HTMLParser):
    """What a page links to, what it loads, and which anchors it has."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if "id" in attributes:
            self.anchors.add(attributes["id"])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif tag == "form" and "action" in attributes:  # of the search
            self.links.append(attributes["action"])
        elif tag == "link" and "href" in attributes:
            self.loads.append(attributes["href"])
        elif LOADED.get(tag, "") in attributes:
            self.loads.append(attributes[LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return what is wrong with a site, a line for each."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    found = []
    reached: set[Path] = set()
    waiting = [site / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in reached or path not in pages:
            continue
        reached.add(path)
        for link in pages[path].links:
            there, fragment = target(path, link)
            if there is None:
                continue
            waiting.append(there)
            if not there.is_file():
                found.append(f"{path.relative_to(site)}: {link} leads nowhere")
            elif fragment and there in pages and fragment not in pages[there].anchors:
                found.append(f"{path.relative_to(site)}: {link} leads to no heading")

    for path in pages.keys() - reached:
        found.append(f"{path.relative_to(site)}: no link leads to it")
    found += loads_from_outside(site, pages)
    return sorted(set(found))


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def target(path: Path, link: str) -> tuple[Path | None, str]:
    """Return the file and the anchor that a link of a page leads to; None for another machine."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None, ""
    there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    return there, unquote(parts.fragment)


def loads_from_outside(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield what a browser would request from another machine, or not find here."""
    for path, page in pages.items():
        for address in page.loads:
            there, _ = target(path, address)
            if address.startswith("data:"):
                continue
            if there is None:
                yield f"{path.relative_to(site)}: loads {address} from another machine"
            elif not there.is_file():
                yield f"{path.relative_to(site)}: loads {address}, which is not there"

    for style in site.rglob("*.css"):
        for match in IN_STYLE.finditer(style.read_text(encoding="utf-8")):
            address = match[1] or match[2]
            if address.startswith(("http:", "https:", "//")):
                yield f"{style.relative_to(site)}: loads {address} from another machine"
