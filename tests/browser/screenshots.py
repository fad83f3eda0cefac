"""Take the pictures of docs/images/ from runs of both quickstarts.

.venv/bin/python tests/browser/screenshots.py runs/quickstart runs/quickstart-vlm docs/images
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from turnwright_view.web import ViewerServer
from turnwright_view.web.index import IndexEntry

WIDTH, HEIGHT = 1280, 860


def chosen(server: ViewerServer, run: int, wanted: Callable[[IndexEntry], bool]) -> IndexEntry:
    """The last trajectory of a run that is wanted, or its last one."""
    store = server.stores[run]
    store.update()
    fit = [entry for entry in store.entries if wanted(entry)]
    return (fit or store.entries)[-1]


def take(
    page: Page, out: Path, name: str, address: str, then: Callable[[Page], Any] = lambda page: None
) -> None:
    """One picture of the page at an address."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("main[data-ready]")
    then(page)
    page.wait_for_timeout(300)
    page.screenshot(path=str(out / f"{name}.png"))


def shoot(page: Page, server: ViewerServer, out: Path, dark: Page) -> None:
    """All pictures."""
    url = server.url
    seen = chosen(server, 1, lambda e: e.phase == "train" and e.turns > 2 and e.images > 0)
    text = chosen(server, 0, lambda e: e.phase == "train" and e.reward == 0.0 and e.turns > 1)
    take(page, out, "viewer-overview", url)
    take(page, out, "viewer-list", url + "#/list/0?phase=train&reward_max=0&newest=1")
    take(page, out, "viewer-conversation", f"{url}#/t/1/{seen.at}")
    take(
        page,
        out,
        "viewer-tokens",
        f"{url}#/t/0/{text.at}/tokens",
        lambda p: p.hover(".span.model .tok >> nth=-2"),
    )
    take(
        page,
        out,
        "viewer-siblings",
        f"{url}#/t/0/{text.at}/siblings",
        lambda p: p.wait_for_selector(".sibling.here"),
    )
    take(dark, out, "viewer-dark", f"{url}#/t/0/{text.at}")


def main() -> None:
    """Serve two runs, and look at them."""
    runs, out = [Path(word) for word in sys.argv[1:3]], Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    server = ViewerServer(runs)
    server.start()
    try:
        with sync_playwright() as playwright:
            where = os.environ.get("CHROMIUM") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
            size: Any = {"viewport": {"width": WIDTH, "height": HEIGHT}}
            page, dark = browser.new_page(**size), browser.new_page(**size, color_scheme="dark")
            shoot(page, server, out, dark)
            browser.close()
    finally:
        server.close()


if __name__ == "__main__":
    main()
