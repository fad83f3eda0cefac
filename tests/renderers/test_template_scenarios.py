"""The benchmark's conversations: what they try, and that they notice a wrong prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.corpus import template_of
from kit.templates import OWN_TEMPLATES
from template_reads import read_replies
from template_scenarios import switching_words
from template_turns import Player, examine, scenarios

from turnwright.renderers import ChatRenderer
from turnwright.types import Message

QUICK = ("shots", "parallel", "values", "empty results", "cut text", "text and call")


def played(name, *chosen):
    source = OWN_TEMPLATES[name]
    return examine(source, template_of(name, source), lambda scenario: scenario.name in chosen)


def places(tally):
    return {
        (fault.scenario, fault.history, fault.place.partition(" ")[0]) for fault in tally.faults
    }


def test_a_plain_template_is_played_without_a_fault():
    tally = played("plain", *QUICK)
    assert tally.faults == []
    assert tally.counts["equal"] > 100
    assert tally.conversations > 20


def test_the_words_that_a_template_tests_are_read_from_its_source():
    source = OWN_TEMPLATES["a word switches the thinking off"]
    assert switching_words(template_of("words", source)) == [
        "/no_think",
        "/think",
        "/quiet",
        "/loud",
    ]

    keys = (
        "{% for m in messages %}{% if 'tool_calls' in m and '<think>' in m.content %}{% "
        "endif %}{% endfor %}"
    )
    assert switching_words(template_of("keys", keys)) == ["/no_think", "/think"]


def test_a_word_that_the_renderer_does_not_see_is_noticed(monkeypatch):
    def deaf(render):
        def rendered(self, messages, tools=()):
            return render(
                self,
                [replace(m, content=m.text.replace("/quiet", "quiet!")) for m in messages],
                tools,
            )

        return rendered

    monkeypatch.setattr(ChatRenderer, "open", deaf(ChatRenderer.open))
    source = OWN_TEMPLATES["a word switches the thinking off"]
    tally = examine(
        source, template_of("words", source), lambda s: s.name == "words" and "'/quiet'" in s.detail
    )
    assert ("words", "append", "opening") in places(tally)
    fault = next(fault for fault in tally.faults if fault.place == "opening")
    assert fault.outcome == "wrong"
    assert fault.built != fault.wanted


@pytest.mark.parametrize("history", ["append", "template"])
def test_an_id_too_many_is_noticed_at_each_turn_and_in_each_mode(monkeypatch, history):
    def longer(found):
        return found._replace(ids=[*found.ids, found.ids[-1]])

    if history == "append":
        right = ChatRenderer.extend
        monkeypatch.setattr(
            ChatRenderer, "extend", lambda self, *given: longer(right(self, *given))
        )
    else:
        made = Player.__init__

        def make(self, *given):
            made(self, *given)
            compose = self.renderer.compose
            self.renderer.compose = lambda *rest: longer(compose(*rest))

        monkeypatch.setattr(Player, "__init__", make)
    tally = played("plain", "parallel")
    assert places(tally) == {("parallel", history, "turn")}
    assert {fault.outcome for fault in tally.faults} == {"wrong"}


def test_a_result_that_is_dropped_from_an_opening_is_noticed(monkeypatch):
    shown = ChatRenderer.open

    def dropping(self, messages, tools=()):
        return shown(self, [m for m in messages if m.role != "tool"], tools)

    monkeypatch.setattr(ChatRenderer, "open", dropping)
    assert ("shots", "append", "opening") in places(played("plain", "shots"))


def test_what_is_known_of_an_earlier_conversation_must_not_change_a_later_one():
    groups = scenarios(template_of("late", OWN_TEMPLATES["late state"]))
    names = [scenario.name for scenario in groups[0]]
    assert names.index("late") < names.index("results")

    lengths = {}
    for scenario in groups[0]:
        if scenario.name in ("late", "results"):
            size = len(scenario.opening)
            for turn in scenario.turns:
                if turn.reply.tool_calls:
                    lengths.setdefault(scenario.name, set()).add(size)
                size += 1 + len(turn.new)
    assert {1 + 2 * number for number in range(15, 20)} <= lengths["late"] & lengths["results"]


def test_a_call_that_is_not_read_is_counted_as_said_or_as_silent(monkeypatch):
    source = OWN_TEMPLATES["plain"]
    reads = read_replies(source, template_of("plain", source))
    assert reads.counts["calls_read"] == reads.counts["calls_rendered"] == 9
    assert reads.faults == []

    blind = lambda self, ids, *rest: Message("assistant", self.decode(ids))  # noqa: E731
    monkeypatch.setattr(ChatRenderer, "parse", blind)
    monkeypatch.setattr(ChatRenderer, "unread_replies", ())
    reads = read_replies(source, template_of("plain", source))
    faults = [fault for fault in reads.faults if "call" in fault.detail]
    assert reads.counts["calls_silent"] == reads.counts["calls_rendered"] == len(faults) == 9

    unread = property(lambda self: ("hermes", "<call>"))
    monkeypatch.setattr(ChatRenderer, "call_format", unread)
    reads = read_replies(source, template_of("plain", source))
    assert reads.counts["calls_warned"] == reads.counts["calls_rendered"]


@pytest.mark.parametrize("name", OWN_TEMPLATES)
def test_prompts_are_those_of_transformers(name):
    """Words, examples, late state, cut-off thinking, odd contents: what is not
    equal is what `check` says."""
    classes = (
        "shots",
        "shots thinking",
        "words",
        "results",
        "unclosed limit",
        "unclosed stop",
        "cut text",
        "empty results",
    )
    tally = played(name, *classes, "parts", "text and call", "parallel")
    assert tally.faults == []
    assert tally.counts["equal"] > 50
    known = {"two parts, each with a stop": {"ends inside"}, "calls end the reply": {"not read"}}
    assert set(tally.explained) <= known.get(name, set())
