"""Whole conversations with every chat template, held against transformers' own rendering;
see `templates.py --turns`.

A reply is written as the template itself writes it where it comes last. The opening prompt has to
be transformers' rendering. In `append` mode what follows a reply has to be what transformers writes
behind the same conversation; in `template` mode the prompt has to be transformers' rendering of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kit.corpus import tokenizer_of
from template_reference import MARK, Reading, Reference, Refused
from template_scenarios import (
    QUESTION,
    USUAL_WORDS,
    Scenario,
    Turn,
    contents,
    late,
    plain,
    replies,
    shots,
    switching_words,
    worded,
)

from turnwright.errors import TemplateError
from turnwright.renderers import (
    Branch,
    ChatRenderer,
    ChatTemplate,
    Extend,
    HFTokenizer,
    SampledReply,
)
from turnwright.renderers.contract import SCENARIOS
from turnwright.renderers.template_history import REASONS
from turnwright.types import Message

COUNTS = ("equal", "branched", "refused", "explained", "wrong", "unexplained", "crashes")
_GROUPED_CHARS = 60
"""Characters by which crashes are grouped."""
_WINDOW_BEFORE, _WINDOW_AFTER = 12, 30
"""Ids shown before and after the first difference."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with one template."""

    scenario: str
    detail: str
    history: str
    place: str
    """`opening`, or the turn with the roles of its messages."""
    outcome: str
    said: str
    """What is wrong; empty where two texts differ."""
    built: str = ""
    wanted: str = ""

    @property
    def group(self) -> tuple[str, ...]:
        """Faults that look alike."""
        place = re.sub(r"\d+", "N", self.place)
        said = (
            self.said.partition(":")[0] if self.outcome != "crashes" else self.said[:_GROUPED_CHARS]
        )
        return (self.outcome, self.scenario, self.history, place, said or "differs")


@dataclass
class Tally:
    """What came of the turns of one template."""

    counts: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    """By class, what `turnwright check` says beforehand."""
    faults: list[Fault] = field(default_factory=list)
    """What was wrong, unexplained or crashed."""

    def add(self, fault: Fault) -> None:
        """Count an outcome, and keep a bad one."""
        self.counts[fault.outcome] += 1
        if fault.outcome in ("wrong", "unexplained", "crashes"):
            self.faults.append(fault)
        elif fault.outcome == "explained":
            self.explained[fault.said] += 1

    def merge(self, other: Tally) -> None:
        """Add what came of other turns."""
        self.counts.update(other.counts)
        self.conversations += other.conversations
        self.explained.update(other.explained)
        self.faults += other.faults

    @property
    def bad(self) -> int:
        """The number of faults."""
        return len(self.faults)


@dataclass
class Conversation:
    """A conversation while it is played."""

    scenario: Scenario
    history: str
    """`append` or `template`."""
    messages: list[Message]
    ids: list[int]
    replies: list[SampledReply] = field(default_factory=list)
    exact: bool = True
    """Whether the template itself writes all replies as they were sampled."""

    def sampled(self, reply: Message, ids: Sequence[int]) -> None:
        """Add a reply."""
        self.replies.append(SampledReply(len(self.messages), tuple(ids), len(self.ids)))
        self.messages.append(reply)
        self.ids += ids

    def answered(self, found: Extend | Branch, new: Sequence[Message]) -> None:
        """Add what answers it."""
        if isinstance(found, Branch):
            del self.ids[found.keep :]
        self.ids += found.ids
        if found.replies is not None:
            pairs = zip(self.replies, found.replies, strict=True)
            self.replies = [reply._replace(start=start) for reply, start in pairs]
        self.messages += new


class Player:
    """Plays conversations with one template."""

    def __init__(self, source: str, template: ChatTemplate) -> None:
        tokenizer = tokenizer_of(template)
        codec = HFTokenizer(tokenizer)
        self.renderer = ChatRenderer(
            codec, template, stop_ids=frozenset((codec.control["<|eos|>"],))
        )
        self.reference = Reference(source, self.renderer.template, tokenizer)
        self.tally = Tally()
        # What `check` says: the template's own replies are stopped before they end, or
        # end without their stop.
        self.ends_inside = any(
            unread.kind == "the end of a reply" for unread in self.renderer.unread_replies
        )
        self.control = re.compile(
            "|".join(map(re.escape, sorted(codec.control, key=len, reverse=True)))
        )
        asked = [Message("user", "Question, please.")]
        self.opens = self.reference.text(asked, [])[len(self.reference.text(asked, [], False)) :]
        self.stops = {self.renderer.decode([i]): i for i in self.renderer.stop_ids}

    def play(self, scenario: Scenario, history: str) -> None:
        """One conversation in one mode, in the reading of its messages that
        has the fewest faults."""
        best: Tally | None = None
        for reading in self.readings(scenario):
            self.reference.reading = reading
            self.reference.words = scenario.words
            self.reference.opening = len(scenario.opening)
            self.tally = Tally()
            self._play(scenario, history)
            if best is None or self.tally.bad < best.bad:
                best = self.tally
            if not best.bad:
                break
        self.reference.reading, self.reference.words, self.reference.opening = Reading(), (), 0
        self.tally = best or Tally()

    def readings(self, scenario: Scenario) -> Iterator[Reading]:
        """Yield the ways in which the messages of a scenario may be given to the template."""
        yield Reading()
        has_examples = any(m.reasoning is not None or m.tool_calls for m in scenario.opening)
        if has_examples:
            yield Reading(folds_examples=True)
        messages = [
            *scenario.opening,
            *(message for turn in scenario.turns for message in turn.new),
        ]
        roles = {message.role for message in messages if not isinstance(message.content, str)}
        # Results may go as a user's words.
        candidates = {*roles, "user"} if roles else roles
        listed = frozenset(
            role for role in candidates if self.reference.takes_parts(role, scenario.tools)
        )
        if listed:
            yield Reading(lists=listed)
        if listed and has_examples:
            yield Reading(lists=listed, folds_examples=True)

    def _play(self, scenario: Scenario, history: str) -> None:
        opened = self.opened(scenario, history)
        if history == "template":  # the opening is the same in both modes
            self.tally = Tally()
        if opened is None:
            return
        self.tally.conversations += 1
        talk = Conversation(scenario, history, list(scenario.opening), opened)
        for number, turn in enumerate(scenario.turns):
            new = list(turn.new)
            if turn.cut:
                cut = self.cut_reply(talk.messages, turn, new, scenario.tools)
                if cut is None:
                    return
                reply, sampled = cut
                talk.exact = False
            else:
                reply, sampled, canonical = self.reply(
                    talk.messages, turn.reply, new, scenario.tools
                )
                talk.exact = talk.exact and canonical
            if not reply.tool_calls:  # one that makes no calls is answered in words
                new = (
                    [Message("user", new[0].content or "And then?")]
                    if new[0].role == "tool"
                    else new
                )
            talk.sampled(reply, sampled)

            found = self.turn(
                talk, f"turn {number} ({' '.join(m.role for m in new)})", turn.cut, new
            )
            if found is None or (history == "template" and self.tally.bad):
                return  # what is wrong in a prompt is wrong in all later ones
            talk.answered(found, new)

    def opened(self, scenario: Scenario, history: str) -> list[int] | None:
        """Return the ids of the opening prompt; None if it cannot be gone on with."""
        heard = [message for message in scenario.opening if message.role != "assistant"]

        def fault(outcome: str, said: str = "", built: str = "", wanted: str = "") -> Fault:
            return Fault(
                scenario.name, scenario.detail, history, "opening", outcome, said, built, wanted
            )

        refused = False
        wanted: list[int] = []
        try:
            wanted = self.reference.ids(
                self.reference.shown(scenario.opening, scenario.tools, heard)
            )
        except Refused:
            refused = True
        try:
            ids = list(self.renderer.open(scenario.opening, scenario.tools).ids)
        except TemplateError as error:
            self.tally.add(
                fault(
                    "refused" if refused else "wrong",
                    f"refused here: {self.without_name(str(error))}",
                )
            )
            return None
        if refused:
            self.tally.add(fault("refused"))
            return None
        if ids != wanted:
            self.tally.add(fault("wrong", "", *self.windows(ids, wanted)))
        return ids

    def turn(
        self, talk: Conversation, place: str, cut: str, new: list[Message]
    ) -> Extend | Branch | None:
        """Count what came of one answer of the world, and return what was answered."""
        scenario, history = talk.scenario, talk.history

        def add(outcome: str, said: str = "", built: str = "", wanted: str = "") -> None:
            self.tally.add(
                Fault(scenario.name, scenario.detail, history, place, outcome, said, built, wanted)
            )

        wanted = self.wanted(talk, cut, new)
        found: Extend | Branch | None = None
        problem = ""
        try:
            if history == "append":
                found = self.renderer.extend(
                    talk.messages, talk.replies[-1].ids, new, scenario.tools
                )
            else:
                found = self.renderer.compose(
                    [*talk.messages, *new], talk.replies, talk.ids, scenario.tools
                )
        except TemplateError as error:
            problem = self.without_name(str(error))
        except Exception as error:
            add("crashes", f"{type(error).__name__}: {error}")
            return None

        if wanted is None:
            add("refused")
        elif found is not None:
            add(*self.judged(talk, new, found, wanted))
        elif self.says_refused(new):
            add("explained", "refused")
        else:
            add("wrong", f"refused here: {problem}")
        return found

    def wanted(self, talk: Conversation, cut: str, new: Sequence[Message]) -> list[int] | None:
        """Return the ids that are right; None if transformers cannot show the conversation."""
        tools = talk.scenario.tools
        try:
            if talk.history == "append":
                return self.tail(talk.messages, talk.replies[-1].ids, new, tools, cut)
            return self.reference.ids(self.reference.shown([*talk.messages, *new], tools, new))
        except Refused:
            return None

    def judged(
        self,
        talk: Conversation,
        new: Sequence[Message],
        found: Extend | Branch,
        wanted: Sequence[int],
    ) -> tuple[str, ...]:
        """Return the outcome of what was built, and what is said of it: at most a text, what was
        built and what is right."""
        kept = talk.ids[: found.keep] if isinstance(found, Branch) else talk.ids
        if talk.history == "append":
            if isinstance(found, Branch):
                return "wrong", "branched in append mode"
            if found.ids == wanted:
                return ("equal",)
            if explanation := self.explanation("append"):
                return "explained", explanation
            if self.moves_reply(talk.messages[-1], wanted, new):
                if self.renderer.contract.moves_text:
                    return "explained", "moves text"
                return (
                    "wrong",
                    "check does not say that the reply's text moves",
                    *self.windows(found.ids, wanted),
                )
            return "wrong", "", *self.windows(found.ids, wanted)

        built = [*kept, *found.ids]
        same = built == wanted
        if not same and not talk.exact:  # replies that the template would spell in another way
            decode = self.renderer.decode
            same = _without_space(decode(built)) == _without_space(decode(wanted))
        if not same:
            if explanation := self.explanation("template"):
                return "explained", explanation
            return "wrong", "", *self.windows(built, wanted, spaces=talk.exact)
        if isinstance(found, Branch):
            return "branched" if found.reason in REASONS else "unexplained", found.reason
        return ("equal",)

    def explanation(self, history: str) -> str:
        """What `check` says of the template that explains other prompts;
        empty if it says nothing."""
        if self.ends_inside:
            return "ends inside"
        if not self.renderer.contract.stops:
            return "plain text"
        return "not read" if history == "template" and self.renderer.call_format[1] else ""

    def without_name(self, problem: str) -> str:
        """An error without the name of the template."""
        return problem.removeprefix(f"{self.renderer.template.origin}: ")

    def says_refused(self, new: Sequence[Message]) -> bool:
        """Whether the contract says that such messages cannot be appended."""
        roles = ", ".join(dict.fromkeys(message.role for message in new))
        return roles in SCENARIOS and self.renderer.contract.appends[roles].startswith("refused")

    def moves_reply(self, reply: Message, wanted: Sequence[int], new: Sequence[Message]) -> bool:
        """Whether the template writes the text of a reply behind what answers it."""
        last = next(
            (core for message in reversed(new) for core in self.reference.cores(message) if core),
            "",
        )
        return (
            bool(last and reply.text)
            and reply.text in self.renderer.decode(wanted).rpartition(last)[2]
        )

    def windows(
        self, got: Sequence[int], wanted: Sequence[int], *, spaces: bool = True
    ) -> tuple[str, str]:
        """The texts around the first difference; around the first beside white space if
        `spaces` do not count."""
        decode = self.renderer.decode
        if spaces:
            pairs = enumerate(zip(got, wanted, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(wanted)))
            place = slice(max(0, at - _WINDOW_BEFORE), at + _WINDOW_AFTER)
            return decode(got[place]), decode(wanted[place])

        built, right = decode(got), decode(wanted)
        here = there = 0
        while here < len(built) and there < len(right):
            if built[here] == right[there]:
                here, there = here + 1, there + 1
            elif built[here].isspace():
                here += 1
            elif right[there].isspace():
                there += 1
            else:
                break
        before, after = 4 * _WINDOW_BEFORE, 4 * _WINDOW_AFTER
        return built[max(0, here - before) : here + after], right[
            max(0, there - before) : there + after
        ]

    def tail(
        self,
        messages: Sequence[Message],
        sampled: Sequence[int],
        new: Sequence[Message],
        tools: Any,
        cut: str = "",
    ) -> list[int]:
        """What transformers writes behind the last reply, as ids."""
        reply = messages[-1]
        calls = reply.tool_calls
        marked = [replace(reply, content=reply.text + MARK)]
        if calls:
            last = replace(
                calls[-1],
                arguments={**calls[-1].arguments, "key": f"{calls[-1].arguments.get('key')}{MARK}"},
            )
            marked = [replace(reply, tool_calls=(*calls[:-1], last)), *marked]
        if cut and reply.reasoning and not reply.text:
            # The template ends the thinking too, where it shows it.
            marked = [replace(reply, reasoning=reply.reasoning + MARK), *marked]
        for one in marked:
            text = self.reference.shown([*messages[:-1], one, *new], tools, new)
            if MARK in text:
                break
        else:
            raise Refused("does not show the reply")
        behind = text.rpartition(MARK)[2]
        if calls and not self.reference.reads_calls:  # they stand in the text
            behind = behind.partition("</tool_call>")[2]
        if cut == "limit":
            return self.reference.ids(text, len(text) - len(behind))

        said = next((core for message in new for core in self.reference.cores(message) if core), "")
        before = behind.partition(said)[0] if said else behind
        stop = self.renderer.decode(sampled[-1:])
        tokens = [match for match in self.control.finditer(before)]
        own = next((match for match in tokens if match.group() == stop), None)
        heads = self.renderer.contract.heads
        if own is not None:
            end = own.end()
        elif heads:  # another header than the one that was sampled is written in full
            end = next((match.start() for match in tokens if match.group() in self.stops), 0)
        elif found := next((match for match in tokens if match.group() in self.stops), None):
            end = found.end()
        elif tokens:
            end = tokens[0].end() if tokens[0].group() not in self.opens else tokens[0].start()
        else:  # closed by plain text, which stands behind a last reply too
            last = self.reference.shown([*messages[:-1], one], tools, prompt=False).rpartition(
                MARK
            )[2]
            pairs = enumerate(zip(last, behind, strict=False))
            end = next((i for i, (a, b) in pairs if a != b), min(len(last), len(behind)))
        return self.reference.ids(text, len(text) - len(behind) + end)

    def cut_reply(
        self, messages: Sequence[Message], turn: Turn, new: Sequence[Message], tools: Any
    ) -> tuple[Message, list[int]] | None:
        """Return a reply that is cut off in the middle, and its ids; None if the
        template shows no such reply."""
        try:
            text, stop = self.written(messages, turn.reply, new, tools)
        except Refused:
            return None
        whole = turn.reply.reasoning or turn.reply.text
        at = text.find(whole)
        if at < 0:
            return None
        ids = self.reference.ids(text[: at + len(whole) // 2])
        if turn.cut == "stop":
            ids.append(stop)
        return self.renderer.parse(ids, tools), ids

    def reply(
        self, messages: Sequence[Message], wanted: Message, new: Sequence[Message], tools: Any
    ) -> tuple[Message, list[int], bool]:
        """A reply, its ids, and whether the template itself writes it so where it comes last here.

        Its text is what the template writes for it here, or, where that is read in another
        way, behind a lone question.
        """
        for asked in (messages, [QUESTION]):
            try:
                text, stop = self.written(asked, wanted, new, tools)
            except Refused:
                continue
            if wanted.reasoning and self.reference.folds and wanted.reasoning not in text:
                # the model thinks all the same
                text = f"<think>\n{wanted.reasoning}\n</think>\n\n{text}"
            ids = [*self.reference.ids(text), stop]
            told = self.renderer.parse(ids, tools)
            if wanted.tool_calls and "look" not in text:  # a reply that ends before its calls
                return told, ids, False
            if len(told.tool_calls) != len(wanted.tool_calls) or any(
                call.error for call in told.tool_calls
            ):
                told = replace(wanted, reasoning=told.reasoning)  # in a format that nothing reads
            calls = tuple(
                replace(call, id=own.id)
                for call, own in zip(told.tool_calls, wanted.tool_calls, strict=True)
            )
            told = replace(told, tool_calls=calls)
            same_thinking = (told.reasoning or wanted.reasoning or "") == (wanted.reasoning or "")
            if told.text.strip() == wanted.text and same_thinking:
                break
        else:
            text = "It is so."
            ids, told = self.renderer.encode_reply(text), Message("assistant", text)
        return told, ids, text != "It is so." and self.canonical(messages, told, tools, text)

    def written(
        self, asked: Sequence[Message], wanted: Message, new: Sequence[Message], tools: Any
    ) -> tuple[str, int]:
        """The text of a reply behind a conversation as the template writes it where it
        comes last, and its stop."""
        prompt = self.reference.shown(asked, tools)
        shown = self.reference.shown([*asked, wanted], tools, prompt=False)
        text = shown[len(prompt) :]
        thought = shown
        if not shown.startswith(prompt):
            thought = self.reference.shown(
                [*asked, replace(wanted, reasoning=MARK)], tools, prompt=False
            )
        if not shown.startswith(prompt) and thought.startswith(prompt) and thought.count(MARK) == 1:
            # The prompt has opened the thinking.
            shown = thought.replace(MARK, wanted.reasoning or "")
            text = shown[len(prompt) :]
        elif not shown.startswith(prompt):
            said = asked[-1].text
            header, own = (text.rpartition(said)[2] if said else text for text in (prompt, shown))
            pairs = enumerate(zip(header, own, strict=False))
            size = next((i for i, (a, b) in pairs if a != b), min(len(header), len(own)))
            for side in (header, own):  # a difference inside of a token begins with the token
                size = next(
                    (m.start() for m in self.control.finditer(side) if m.start() < size < m.end()),
                    size,
                )
            opened = header.rfind("<think>") > header.rfind("</think>")
            text = own[size:]
            while (match := self.control.match(text)) and match.group() in header[size:]:
                text = text[match.end() :]
            if opened:
                text = f"{wanted.reasoning or ''}\n</think>\n\n" + text.removeprefix("<think>\n")
        ends = sorted((text.find(token), token) for token in self.stops if token in text)
        if ends:
            return text[: ends[0][0]], self.stops[ends[0][1]]
        last = self._following(shown, [*asked, wanted], new, tools)
        # Closed by plain text.
        return (text, last) if last is not None else (text.rstrip(), min(self.renderer.stop_ids))

    def canonical(self, messages: Sequence[Message], reply: Message, tools: Any, text: str) -> bool:
        """Whether the template writes a reply in this text."""
        try:
            prompt = self.reference.shown(messages, tools)
            shown = self.reference.shown([*messages, reply], tools, prompt=False)
        except Refused:
            return False
        rest = shown.removeprefix(prompt + text)
        return shown.startswith(prompt + text) and not (text[-1:].isspace() and rest[:1].isspace())

    def _following(
        self, shown: str, messages: Sequence[Message], new: Sequence[Message], tools: Any
    ) -> int | None:
        """The stop of a reply that what follows it ends, its header; None where nothing does."""
        try:
            longer = self.reference.shown([*messages, *new], tools, new)
        except Refused:
            longer = ""
        match = self.control.search(longer, len(shown)) if longer.startswith(shown) else None
        return self.stops.get(match.group()) if match else None


def _without_space(text: str) -> str:
    return "".join(text.split())


def scenarios(template: ChatTemplate) -> list[list[Scenario]]:
    """All conversations, in groups that are played with a renderer each.

    What a renderer keeps of a conversation must not change the next one, so
    words come first and last.
    """
    everything = [*plain(), *late(), *shots(), *replies(), *contents()]
    words = [word for word in switching_words(template) if word in template.source]
    if not words:
        return [[*everything, *worded(USUAL_WORDS[:1])]]
    said = list(worded(words))
    return [[*everything, *said], [*reversed(said), *list(plain())[:2]]]


def examine(
    source: str, template: ChatTemplate, only: Callable[[Scenario], bool] = lambda scenario: True
) -> Tally:
    """All conversations with one template, in both modes."""
    tally = Tally()
    for group in scenarios(template):
        chosen = [scenario for scenario in group if only(scenario)]
        if not chosen:
            continue
        try:
            player = Player(source, template)
        except TemplateError:
            tally.counts["refused"] += 1
            return tally
        for scenario in chosen:
            for history in ("append", "template"):
                try:
                    player.play(scenario, history)
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                    player.tally.add(
                        Fault(scenario.name, scenario.detail, history, "", "crashes", said)
                    )
                tally.merge(player.tally)
    return tally
