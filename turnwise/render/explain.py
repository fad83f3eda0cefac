"""A template's contract in words, for people."""

from __future__ import annotations

from turnwise.render.contract import TemplateContract


def explain_contract(contract: TemplateContract, history: str = "append") -> list[tuple[bool | None, str]]:
    """The contract in words: (whether it is as it should be, None for a remark; a line).

    Args:
        history: the mode that is asked for.
    """
    rows: list[tuple[bool | None, str]] = [(None, f"class: {contract.kind}{_flags(contract)}")]
    ends = ", ".join(map(repr, contract.stops)) or f"plain text {contract.close!r}: give stop strings (rollout.stop)"
    rows.append((None, f"a reply ends with {ends}{', the header of what follows' if contract.heads else ''}"))
    if contract.tail:
        rows.append((None, f"behind it the template writes {contract.tail!r}, which nobody samples: it begins the next append"))
    opened = " (thinking is open already)" if contract.thinks else ""
    rows.append((None, f"a reply is opened by {contract.prefix!r}{opened}"))
    if not all(contract.thinking.values()):
        kept = [name for name in ("user", "tool") if contract.thinking[name]]
        dropped = [name for name in ("user", "tool") if not contract.thinking[name]]
        said = f"kept behind {' and '.join(kept)} messages" if kept else "never kept"
        rows.append((None, f"thinking is {said}{f', dropped behind {chr(32).join(dropped)}' if kept and dropped else ''}"))
    rows += [(None, f"[model.template_args] {name}: {effect}") for name, effect in contract.switches.items()]
    for name, proof in contract.appends.items():
        rows.append(_append_row(name, proof))
    if contract.stateful:
        names = " and of ".join(contract.stateful)
        rows.append((None, f"what is appended of {names} depends on earlier turns: it is worked out behind each conversation"))
    if contract.tool_images is False:
        rows.append(
            (None, "a tool's message loses its images: they are shown in a user's message behind it (tool_media_moved)")
        )
    if contract.system != "shown":
        where = " to the user's last message" if contract.system == "moved" else ""
        rows.append((None, f"a system message is {contract.system}{where}"))
    rows += [(None, f"depends on {name}: frozen while a run lasts") for name in contract.impure]
    rows += [(None, f"encoded apart, other ids at: {name}") for name in contract.seams]
    rows.append(_verdict(contract, history))
    return rows


def _flags(contract: TemplateContract) -> str:
    flags = {
        "swaps the close": contract.swaps_close and contract.kind != "swaps the close",
        "prefilled": contract.prefilled and contract.kind != "prefilled",
        "folds tools": contract.folds_tools,
        "impure": bool(contract.impure),
    }
    return "".join(f", {name}" for name, holds in flags.items() if holds)


def _append_row(name: str, proof: str) -> tuple[bool | None, str]:
    if proof.startswith("refused"):
        return None, f"appending {name} is {proof}"
    words = {
        "append": "is exact: all that was written before stays",
        "tail": "is exact from the reply on; something earlier would be shown in another way, and is kept as it was",
        "swap": "is exact behind the reply; the template would close the reply in another way, and what was sampled is kept",
    }
    proof, _, as_user = proof.partition(" ")
    told = "; results of tools are shown as a user's words, since the template does not show them" if as_user else ""
    return True, f"appending {name} {words[proof]}{told}"


def _verdict(contract: TemplateContract, history: str) -> tuple[bool | None, str]:
    """Whether the mode that is asked for can be exact."""
    refused = contract.appends["user"].startswith("refused") and contract.appends["tool"].startswith("refused")
    if history == "append" and refused:
        return False, 'history = "append" cannot be exact: nothing can follow a reply; use "inline"'
    if history == "template" and refused:
        return False, 'history = "template" cannot be exact: the template refuses whatever follows a reply; use "inline"'
    if history == "template":
        cost = "never branches" if contract.append_only else "branches where earlier replies are shown in another way"
        return True, f'history = "template" is exact: it {cost}'
    if history == "inline":
        ends = "give stop strings (rollout.stop) that end a step" if contract.stops else "replies end by stop strings alone"
        return True, f'history = "inline" is exact; {ends}'
    return True, f'history = "{history}" is exact' + (
        "" if contract.append_only else ": earlier turns stay as they were sampled"
    )
