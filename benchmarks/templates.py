"""Every chat template at hand: what it does, and how a conversation is appended
to with it, played on ids.

    python benchmarks/templates.py            # reads .cache/templates; --fetch downloads the packages first
    python benchmarks/templates.py --write    # writes docs/template_table.md too
    python benchmarks/templates.py --turns    # whole conversations in both modes, against transformers (about 15 minutes)
    python benchmarks/templates.py --turns --only qwen3 --scenario words    # some of them, without those made up: --made 0

The tokenizers are trained here, their added tokens are each template's own markers. Last line JSON.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from hypothesis import given, settings  # noqa: E402
from kit.corpus import PACKAGES, TOOLS, distinct, fetch, template_of, templates, tokenizer_of  # noqa: E402

from turnwright.errors import TemplateError  # noqa: E402
from turnwright.renderers import (  # noqa: E402
    Branch,
    ChatRenderer,
    ChatTemplate,
    Extend,
    HFTokenizer,
    SampledReply,
)
from turnwright.renderers.contract import SCENARIOS, TemplateContract  # noqa: E402
from turnwright.renderers.template_history import REASONS  # noqa: E402
from turnwright.types import Message, ToolCall  # noqa: E402

if TYPE_CHECKING:
    from template_reads import Reads
    from template_scenarios import Scenario
    from template_turns import Fault, Tally

USER = Message("user", "Look up amber, please.")
_SHOWN_FAULTS = 6
"""Faults of a group that are printed in full."""


@dataclass
class Row:
    """What was found of one template."""

    name: str
    contract: TemplateContract | None = None
    refused: str = ""
    append: dict[str, str] = field(default_factory=dict)
    template: dict[str, str] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)


def messages_of(roles: Sequence[str]) -> list[Message]:
    """What the world says behind a reply."""
    told = Message("tool", "amber is a resin", tool_call_id="call00000", name="look")
    return [told if role == "tool" else Message("user", "And then?") for role in roles]


def reply_of(template: ChatTemplate, roles: Sequence[str], tools: Sequence[Any]) -> Message:
    """A reply that these roles can follow; with thinking where the generation prompt or the
    template asks for it."""
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
    codec = renderer.codec
    ids = codec.encode(text)
    end = next((i for i, token in enumerate(ids) if token in renderer.stop_ids), None)
    return ids[: end + 1] if end is not None else ids


def play(renderer: ChatRenderer, roles: Sequence[str], row: Row, name: str) -> None:
    """One append in both modes, behind the ids of a reply that the template itself wrote."""
    contract = renderer.contract
    tools = TOOLS if "tool" in roles else ()
    template, messages = renderer.template, messages_of(roles)
    try:
        reply = reply_of(template, roles, tools)
        opened = renderer.open([USER], tools).ids
        prompt = template.render([USER], tools, generation_prompt=True)
        ids = sampled(renderer, prompt, template.render([USER, reply], tools))
    except TemplateError as error:
        row.append[name] = row.template[name] = refusal(error)
        return
    try:
        answer = renderer.extend([USER, reply], ids, messages, tools)
    except TemplateError as error:
        row.append[name] = refusal(error)
    else:
        row.append[name] = outcome(answer, contract.appends[name])
        if contract.append_only and contract.appends[name] == "append":
            encoded = renderer.codec.encode(
                template.render([USER, reply, *messages], tools, generation_prompt=True)
            )
            if [*opened, *ids, *answer.ids] != encoded:
                row.unequal.append(name)
    try:
        sample = SampledReply(1, ids, len(opened))
        answer = renderer.compose([USER, reply, *messages], [sample], [*opened, *ids], tools)
    except TemplateError as error:
        row.template[name] = refusal(error)
    else:
        row.template[name] = outcome(answer, "")


def outcome(answer: Extend | Branch, proof: str) -> str:
    """Return the result of an append in a few words."""
    if isinstance(answer, Branch):
        return (
            f"branch: {answer.reason}"
            if answer.reason in REASONS
            else f"unexplained: {answer.reason}"
        )
    return f"extend ({proof})" if proof else "extend"


def refusal(error: TemplateError) -> str:
    """A template's refusal, without its name."""
    return f"refused: {str(error).partition(': ')[2] or error}"


def examine(name: str, source: str) -> Row:
    """Derive the contract of one template and play its appends."""
    row = Row(name)
    template = template_of(name, source)
    try:
        codec = HFTokenizer(tokenizer_of(template))
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
    heads = [
        "template",
        "class",
        "close tail",
        "prefix",
        *(f"{mode}: {s}" for mode in ("append", "template") for s in SCENARIOS),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        name = row.name.partition("/")[2]
        if row.contract is None:
            lines.append(f"| {name} | refused: {row.refused} |" + " |" * (len(heads) - 2))
            continue
        flags = {"prefilled": row.contract.prefilled and row.contract.kind != "prefilled"}
        flags |= {"folds tools": row.contract.folds_tools}
        flags |= {
            "swaps the close": row.contract.swaps_close and row.contract.kind != "swaps the close"
        }
        flags["impure"] = bool(row.contract.impure)
        kind = ", ".join([row.contract.kind, *(flag for flag, holds in flags.items() if holds)])
        cells = [kind, _code(row.contract.tail), _code(row.contract.prefix)]
        cells += [
            found.get(scenario, "")
            for found in (row.append, row.template)
            for scenario in SCENARIOS
        ]
        lines.append(f"| {name} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text!r}`" if text else ""


def main() -> None:
    """Examine all, print a table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--fetch",
        action="store_true",
        help="download the packages that the templates are read from",
    )
    parser.add_argument("--write", action="store_true", help="write docs/template_table.md")
    parser.add_argument(
        "--turns",
        action="store_true",
        help="hold whole conversations against transformers' own rendering",
    )
    parser.add_argument(
        "--made",
        type=int,
        default=100,
        help="--turns: templates made up to keep state across turns",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT,...",
        help="--turns: templates with one of these in their names",
    )
    parser.add_argument(
        "--scenario",
        default="",
        metavar="NAME",
        help="--turns: these, with commas; `reads` parses alone",
    )
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="--turns: every Nth template, from the Ith"
    )
    parser.add_argument("--jobs", type=int, default=2, help="--turns: processes")
    args = parser.parse_args()
    if args.fetch:
        fetch()
    elif not templates():
        fetch(*PACKAGES)
    if args.turns:
        number, _, count = args.part.partition("/")
        chosen = args.only.split(",")
        every = every_template(args.made)
        work = [
            (name, source, args.scenario)
            for name, source in every
            if any(text in name for text in chosen)
        ]
        turns(work[int(number) :: int(count)], args.jobs)
        return
    rows: list[Row] = []
    crashes: list[str] = []
    for name, source in distinct():
        try:
            rows.append(examine(name, source))
        except Exception as error:
            crashes.append(f"{name}: {type(error).__name__}: {error}")
    if args.write:
        (ROOT / "docs" / "template_table.md").write_text(page(rows), encoding="utf-8")
    print(table(rows))
    for name, count in Counter(
        row.contract.kind if row.contract else "refused" for row in rows
    ).most_common():
        print(f"{count:4} {name}")
    for crash in crashes:
        print("crash:", crash)
    unequal = [f"{row.name} ({', '.join(row.unequal)})" for row in rows if row.unequal]
    print("append-only, but other ids than the full render:", ", ".join(unequal) or "none")
    twins = sum(name.endswith("_training") for name, _ in distinct())
    figures: dict[str, int] = {
        "files": len(templates()),
        "templates": len(distinct()),
        "training_twins": twins,
    }
    for mode in ("append", "template"):
        counts = Counter(
            re.split("[ :]", text)[0] for row in rows for text in getattr(row, mode).values()
        )
        for word in ("extend", "branch", "refused", "unexplained"):
            name = {"extend": "extended", "branch": "branched"}.get(word, word)
            figures[f"{mode}_{name}"] = counts[word]
            figures[name] = figures.get(name, 0) + counts[word]
    print(json.dumps(figures | {"crashes": len(crashes), "unequal": len(unequal)}))


def turns(work: Sequence[tuple[str, str, str]], jobs: int) -> None:
    """Play whole conversations with templates in both modes: each a name, a source, and the
    scenario to play or all."""
    from template_reads import READ_COUNTS
    from template_turns import COUNTS, Tally

    total = Tally()
    names: dict[Fault, list[str]] = {}
    figures: Counter[str] = Counter(templates=0)
    reads: Counter[str] = Counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for (name, *_), (tally, found) in zip(work, pool.map(examined, work), strict=True):
            figures["templates"] += 1
            reads.update(found.counts)
            total.merge(tally)
            for fault in (*tally.faults, *found.faults):
                names.setdefault(fault, []).append(name)
            counted = [f"{word} {tally.counts[word]}" for word in COUNTS if tally.counts[word]]
            counted += [
                f"{word} {found.counts[word]}" for word in READ_COUNTS if found.counts[word]
            ]
            print(f"{name}: {', '.join(counted)}", flush=True)

    print_faults(names)
    row: dict[str, Any] = {"files": len(templates(more=True)), **figures}
    row |= {"conversations": total.conversations, **{word: total.counts[word] for word in COUNTS}}
    row["explained_as"] = dict(total.explained)
    print(json.dumps(row | {word: reads[word] for word in READ_COUNTS}))


def every_template(made: int) -> list[tuple[str, str]]:
    """The templates of all packages at hand, our own, and some that are made up to
    keep state across turns."""
    from kit.stateful import sources
    from kit.templates import OWN_TEMPLATES

    rows = [
        *distinct(more=True),
        *((f"own/{name}", source) for name, source in OWN_TEMPLATES.items()),
    ]
    if made:

        @settings(max_examples=made, derandomize=True, database=None, deadline=None)
        @given(sources())
        def collect(source: str) -> None:
            rows.append((f"made up/{len(rows)}", source))

        collect()
    return rows


def examined(work: tuple[str, str, str]) -> tuple[Tally, Reads]:
    """Play one template's conversations, and read its replies; in a process of its own."""
    from template_reads import Reads, read_replies
    from template_turns import examine

    name, source, names = work
    chosen = names.split(",") if names else []
    template = template_of(name, source)
    of_state = ("all", "tools", "users", "rounds", "late")

    def wanted(scenario: Scenario) -> bool:
        if name.startswith("made up/") and scenario.name not in of_state:
            return False
        return not chosen or scenario.name in chosen

    tally = examine(source, template, wanted)
    return tally, read_replies(source, template) if not chosen or "reads" in chosen else Reads()


def print_faults(names: Mapping[Fault, Sequence[str]]) -> None:
    """Print the faults by group, the largest first: each with what was built and
    what transformers wrote."""
    groups: dict[tuple[str, ...], list[Fault]] = {}
    for fault in names:
        groups.setdefault(fault.group, []).append(fault)

    def size(faults: Sequence[Fault]) -> int:
        return sum(len(names[fault]) for fault in faults)

    for group, faults in sorted(groups.items(), key=lambda row: -size(row[1])):
        of_group = sorted({name for fault in faults for name in names[fault]})
        print(
            f"\n{size(faults)} x {' | '.join(group)}: {len(of_group)} templates: "
            f"{', '.join(of_group)[:600]}"
        )
        for fault in faults[:_SHOWN_FAULTS]:
            print(
                f"    {names[fault][0]} | {fault.scenario} ({fault.detail}) | {fault.history} | "
                f"{fault.place}"
            )
            if fault.said:
                print(f"        {fault.said[:400]}")
            if fault.built or fault.wanted:
                print(f"        built  {fault.built!r}\n        wanted {fault.wanted!r}")


def page(rows: Sequence[Row]) -> str:
    """Return the documentation page with the table."""
    return (
        "# Templates in use\n\nWritten by `python benchmarks/templates.py --write`, which reads "
        f"the chat templates of the packages `trl` and `llama-cpp-python`: {len(templates())} "
        f"files, {len(distinct())} that differ, "
        f"{sum(name.endswith('_training') for name, _ in distinct())} of them variants for "
        "training (`_training`). [The columns](templates.md#the-contract). Identical templates "
        "are listed under the first name. Templates were refused only by their own rules.\n\n"
        + table(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
