"""Every chat template at hand: what it does, and how a conversation is appended to with it, played on ids.

    python benchmarks/templates.py            # reads .cache/templates; --fetch downloads the packages first
    python benchmarks/templates.py --table    # the table of docs/templates.md

The tokenizers are trained here, their added tokens are each template's own markers. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from corpus import TOOLS, distinct, fetch, template_of, templates, tokenizer_of  # noqa: E402

from turnwise.errors import TemplateError  # noqa: E402
from turnwise.render import Branch  # noqa: E402
from turnwise.render.chat import ChatRenderer  # noqa: E402
from turnwise.render.codec import TokenizerCodec  # noqa: E402
from turnwise.render.contract import SCENARIOS, Contract  # noqa: E402
from turnwise.render.template import Template  # noqa: E402
from turnwise.types import Message, ToolCall  # noqa: E402

USER = Message("user", "Look up amber, please.")


@dataclass
class Row:
    """What was found of one template."""

    name: str
    contract: Contract | None = None
    refused: str = ""
    append: dict[str, str] = field(default_factory=dict)
    template: dict[str, str] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)


def messages_of(roles: Sequence[str]) -> list[Message]:
    """What the world says behind a reply."""
    told = Message("tool", "amber is a resin", tool_call_id="call00000", name="look")
    return [told if role == "tool" else Message("user", "And then?") for role in roles]


def reply_of(template: Template, roles: Sequence[str], tools: Sequence[Any]) -> Message:
    """A reply that these roles can follow; with thinking where the generation prompt or the template asks for it."""
    calls = (ToolCall("look", {"key": "amber"}, "call00000"),) if "tool" in roles else ()
    plain = Message("assistant", "" if calls else "It is a resin.", tool_calls=calls)
    prompt = template.render([USER], tools, generation_prompt=True)
    for reply in (replace(plain, reasoning="Hm-hm"), plain):
        shown = template.render([USER, reply], tools)
        if shown.startswith(prompt) and ("Hm-hm" in shown) == (reply.reasoning is not None):
            return reply
    return plain


def sampled(renderer: ChatRenderer, prompt: str, shown: str) -> list[int]:
    """The ids of a reply as the template shows it behind its prompt, canonical."""
    text = shown[len(prompt) :] if shown.startswith(prompt) else "It is a resin."
    codec = renderer._codec
    ids = codec.encode(text)
    end = next((i for i, token in enumerate(ids) if token in renderer.stop_ids), None)
    return ids[: end + 1] if end is not None else ids


def play(renderer: ChatRenderer, roles: Sequence[str], row: Row, name: str) -> None:
    """One append in both modes, with the sampled ids of a reply that the template itself wrote."""
    contract = renderer.contract
    tools = TOOLS if "tool" in roles else ()
    template, messages = renderer._template, messages_of(roles)
    try:
        reply = reply_of(template, roles, tools)
        opened = renderer.open([USER], tools).ids
        prompt = template.render([USER], tools, generation_prompt=True)
        ids = sampled(renderer, prompt, template.render([USER, reply], tools))
        answer = renderer.extend([USER, reply], ids, messages, tools)
    except TemplateError as error:
        row.append[name] = f"refused: {str(error).partition(': ')[2] or error}"
        return
    if isinstance(answer, Branch):
        row.append[name] = f"branch: {answer.reason}"
        return
    row.append[name] = f"extend ({contract.appends[name]})"
    if contract.append_only and contract.appends[name] == "append":
        whole = renderer._codec.encode(template.render([USER, reply, *messages], tools, generation_prompt=True))
        if [*opened, *ids, *answer.ids] != whole:
            row.unequal.append(name)


def examine(name: str, source: str) -> Row:
    """All that can be said of one template."""
    row = Row(name)
    template = template_of(name, source)
    try:
        codec = TokenizerCodec(tokenizer_of(template))
        renderer = ChatRenderer(codec, template, stop_ids=frozenset((codec.control["<|eos|>"],)))
        row.contract = renderer.contract
    except TemplateError as error:
        row.refused = str(error).rpartition(": ")[2]
        return row
    for scenario, roles in SCENARIOS.items():
        play(renderer, roles, row, scenario)
    return row


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line a template."""
    lines = ["| template | class | close tail | prefix | user | tool | tool, user |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        name = row.name.partition("/")[2]
        if row.contract is None:
            lines.append(f"| {name} | refused: {row.refused} | | | | | |")
            continue
        flags = {"prefilled": row.contract.prefilled, "folds tools": row.contract.folds_tools}
        flags |= {"swaps the close": row.contract.swaps_close and row.contract.kind != "swaps the close"}
        flags["impure"] = bool(row.contract.impure)
        kind = ", ".join([row.contract.kind, *(flag for flag, holds in flags.items() if holds)])
        cells = [kind, _code(row.contract.tail), _code(row.contract.prefix), *(row.append.get(s, "") for s in SCENARIOS)]
        lines.append(f"| {name} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text!r}`" if text else ""


def main() -> None:
    """Examine all, print a table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fetch", action="store_true", help="download the packages that the templates are read from")
    args = parser.parse_args()
    if args.fetch or not templates():
        fetch()
    rows: list[Row] = []
    crashes: list[str] = []
    for name, source in distinct():
        try:
            rows.append(examine(name, source))
        except Exception as error:
            crashes.append(f"{name}: {type(error).__name__}: {error}")
    print(table(rows))
    outcomes = Counter(text.partition(" ")[0].rstrip(":") for row in rows for text in row.append.values())
    kinds = Counter(row.contract.kind if row.contract else "refused" for row in rows)
    print("\nclasses:", dict(kinds))
    for crash in crashes:
        print("crash:", crash)
    unequal = [f"{row.name} ({', '.join(row.unequal)})" for row in rows if row.unequal]
    print("append-only, but other ids than the full render:", unequal or "none")
    figures = {
        "files": len(templates()),
        "templates": len(distinct()),
        "extended": outcomes["extend"],
        "branched": outcomes["branch"],
        "refused": outcomes["refused"],
        "unexplained": sum(outcomes.values()) - outcomes["extend"] - outcomes["branch"] - outcomes["refused"],
        "crashes": len(crashes),
        "unequal": len(unequal),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
