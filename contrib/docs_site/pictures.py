"""Take pictures of five pages of the site with a real browser: `build/docs` into a folder.

Each page by day and by night, on a telephone and on a desk; needs `make docs`, the extra `browser`
and Chromium. A page that is wider than its screen, a script that fails, or a request to another
machine ends it with status 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PAGES = {
    "home": "index.html",
    "guide": "docs/environments.html",
    "keys": "docs/reference/keys.html",
    "api": "api/rollouts.html",
    "troubleshooting": "docs/troubleshooting.html",
}
SCREENS = {"phone": (390, 844), "desk": (1280, 900)}
LOCAL = ("file:", "data:", "blob:")


def main() -> int:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "docs")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    found: list[str] = []
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for screen in SCREENS:
            for scheme in ("light", "dark"):
                found += take(browser, args.site, args.out, screen, scheme)
        browser.close()

    for problem in dict.fromkeys(found):
        print(problem, file=sys.stderr)
    return 1 if found else 0


def take(browser: Any, site: Path, out: Path, screen: str, scheme: str) -> list[str]:
    """Take the pictures of a screen; return what is wrong."""
    width, height = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    found: list[str] = []

    def watch(request: Any) -> None:
        if not request.url.startswith(LOCAL):
            found.append(f"{page.url}: requests {request.url}")

    page.on("request", watch)
    page.on("pageerror", lambda error: found.append(f"{page.url}: {error}"))
    for name, path in PAGES.items():
        page.goto((site / path).resolve().as_uri())
        page.wait_for_timeout(300)  # until the theme has set its colors
        page.screenshot(path=out / f"{name}-{screen}-{scheme}.png")
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            found.append(f"{path} on a {screen}: {wide} pixels wide")
    context.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
