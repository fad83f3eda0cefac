"""The page's modules as one script: in the order of their imports, without imports and exports."""

from __future__ import annotations

import re

import pytest

from turnwright_view.web import bundle


def write(folder, **modules):
    for name, text in modules.items():
        path = folder / (name.replace("__", "/") + ".js")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder / "main.js"


def test_modules_come_after_those_that_they_import(tmp_path):
    main = write(
        tmp_path,
        main="import {b} from './b.js';\nimport {c} from './views/c.js';\nrun(b, c);\n",
        b="import {a} from './a.js';\nexport function b() {\n  return a;\n}\n",
        a="// `export const` in a comment stays.\nexport const a = 'export const';\n",
        views__c="import {a} from '../a.js';\nimport {b} from '../b.js';\n"
        "export async function c() {}\n",
    )
    assert bundle.joined(main) == (
        "'use strict';\n(() => {\n// `export const` in a comment stays.\nconst a = 'export const';"
        "\n\nfunction b() {\n  return a;\n}\n\nasync function c() {}\n\nrun(b, c);\n})();\n"
    )


def test_modules_that_import_each_other_are_each_there_once(tmp_path):
    main = write(
        tmp_path,
        main="import {a} from './a.js';\nexport function m() {}\na();\n",
        a="import {m} from './main.js';\nexport function a() {\n  m();\n}\n",
    )
    assert bundle.joined(main).count("function") == 2


WRONG = {
    "import a from './a.js';": "an import is",
    "import {a as b} from 'elsewhere';": "an import is",
    "import * as a from './a.js';": "an import is",
    "import './a.js';": "an import is",
    "import {\n  a,\n} from './a.js';": "an import is",
    "export default 3;": "before a declaration",
    "export {a};": "before a declaration",
    "import {a} from './a.js';\nconst {b, a} = window;": "the name a is in",
    "import {a} from './a.js';\nfunction a() {}": "the name a is in",
    "import {a} from './a.js';\nconst {x: a} = window;": "the name a is in",
}


@pytest.mark.parametrize("code", WRONG)
def test_what_cannot_be_joined_is_named(tmp_path, code):
    main = write(tmp_path, main=code + "\n", a="export const a = 1;\n")
    with pytest.raises(RuntimeError, match=WRONG[code]):
        bundle.joined(main)


def test_the_page_s_own_modules_are_joined_and_those_of_others_are_whole():
    code = bundle.script()
    assert not re.search(r"^(import|export)\b", code, re.MULTILINE)
    assert "render(" in code
    vendor = bundle.vendor_script()
    assert "sourceMappingURL" not in vendor
    for name in bundle.VENDOR:
        assert (bundle.ASSETS / "vendor" / name).read_text()[:200].strip() in vendor
    assert bundle.style().startswith((bundle.ASSETS / "base.css").read_text())


def test_every_module_is_part_of_the_page():
    files = {path for path in bundle.ASSETS.rglob("*.js") if path.parent.name != "vendor"}
    modules: dict = {}
    bundle._follow((bundle.ASSETS / "main.js").resolve(), modules, ())
    assert set(modules) == {path.resolve() for path in files}


def test_nothing_of_a_run_is_taken_for_a_mark_of_the_page():
    page = bundle.page("<meta>", "<p>text with <!--HEAD--> and <!--BODY--></p>")
    assert page.count("<meta>") == 1
    assert "<p>text with <!--HEAD--> and <!--BODY--></p>" in page
