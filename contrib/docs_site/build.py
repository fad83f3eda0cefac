"""Build the documentation site: `make docs`, into build/docs.

A warning of the generator is an error, and so is a dead link, a page that no link leads to, or a
request to another machine (`crawl.py`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from contrib.docs_site.crawl import problems
from contrib.docs_site.staging import ROOT, stage

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    args = parser.parse_args()
    return build(args.out)


def build(out: Path) -> int:
    """Build the site into a folder; return an exit status."""
    from sphinx.cmd.build import main as sphinx_build

    sources = out.with_name(f"{out.name}-sources")
    shutil.rmtree(out, ignore_errors=True)
    stage(sources)

    status: int = sphinx_build(
        [
            *("-b", "html", "-c", str(HERE), "--quiet"),
            *("--fail-on-warning", "--keep-going", "--doctree-dir", f"{sources}/.doctrees"),
            *(str(sources), str(out)),
        ]
    )
    if status:
        return status

    (out / "_static" / "webpack-macros.html").unlink()  # a template of the theme, no page
    found = problems(out)
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        return 1
    pages = len(list(out.rglob("*.html")))
    print(f"{out / 'index.html'}: {pages} pages, every link leads somewhere")
    return 0


if __name__ == "__main__":
    sys.exit(main())
