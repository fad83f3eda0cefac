"""Search: two-hop questions over a small generated corpus, ranked by BM25.

::

    user       Who founded the town where Mira Dovel was born?
    assistant  <search>Mira Dovel born</search>
    user       1. Mira Dovel was born in Kelmor. 2. ...
    assistant  <search>Kelmor founded</search>
    user       1. Kelmor was founded by Tarn Obask. 2. ...
    assistant  <answer>Tarn Obask</answer>

The reward is 1 when the answer is exactly the founder. Each town is equally often correct in both
splits and has its own founder, so the best success rate without a search is 1 / `towns`. Needs the
extra `search` (bm25s).
"""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from turnwright.envs.builtin.common import require_extra
from turnwright.envs.env import Action, Env, Step
from turnwright.envs.spec import check_split
from turnwright.errors import ConfigError, EnvError, InvalidAction
from turnwright.types import Message, Task

_FIRST = (
    "Mira",
    "Tarn",
    "Elsu",
    "Joren",
    "Pila",
    "Oskar",
    "Runa",
    "Bela",
    "Dorit",
    "Faro",
    "Ilke",
    "Nuri",
)
_SYLLABLES = ("dov", "kel", "mor", "bask", "tir", "lun", "gar", "vesh", "pol", "ran", "sid", "hul")
_REPLY = re.compile(r"(?P<kind>search|answer)>(?P<text>[^<>]*)</(?P=kind)>")
_HELD_OUT_SHARE = 4
_MAX_QUERY_WORDS = 50


class Search(Env):
    """Two-hop questions over a local corpus.

    Args:
        towns: number of towns, each with a founder.
        people: number of people born in each town.
        results: maximum documents per search.
        corpus_seed: seed of the corpus.
        rules: open with a system message that states the rules.
    """

    max_turns: ClassVar[int] = 5
    rule: ClassVar[str] = (
        "Say <search>WORDS</search> to search, <answer>NAME</answer> to answer; one of them a "
        "turn, at the end."
    )

    def __init__(
        self,
        towns: int = 20,
        people: int = 16,
        results: int = 2,
        corpus_seed: int = 0,
        rules: bool = False,
    ) -> None:
        if not (2 <= towns <= 100 and _HELD_OUT_SHARE <= people <= 100 and 1 <= results <= 10):
            raise ConfigError(
                "search: towns are 2 to 100, people of each town 4 to 100, results 1 to 10"
            )
        require_extra("search", "bm25s")
        self._size = (towns, people, corpus_seed)
        self._results = results
        self._rules = rules
        self.single_turn_best = 1.0 / towns
        self._answer: str | None = None

    def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        if task.info.get("corpus") != list(self._size) or not task.answer:
            raise EnvError(
                f"task {task.id} is not of this corpus; take search's own tasks, with the same "
                "arguments"
            )
        _index(*self._size)
        self._answer = str(task.answer)
        return (Message("system", self.rule), *task.messages) if self._rules else task.messages

    def step(self, action: Action) -> Step:
        """Search, or end with an answer; a reply ends with exactly one of them."""
        before, _, tag = action.text.strip().partition("<")
        reply = _REPLY.fullmatch(tag)
        if reply is None or ">" in before:
            raise InvalidAction("Say <search>WORDS</search> or <answer>NAME</answer>.")
        if reply["kind"] == "search":
            return Step(self._search(reply["text"]))
        is_right = reply["text"].strip() == self._answer
        return Step(reward=float(is_right), terminated=True, info={"right": is_right})

    def _search(self, query: str) -> str:
        """Return the best documents for a query, numbered."""
        documents, index = _index(*self._size)
        words = _words(query)[:_MAX_QUERY_WORDS]
        if not words:
            return "nothing found"
        scores = [float(score) for score in index.get_scores(words)]
        ranked = sorted(range(len(documents)), key=lambda number: (-scores[number], number))
        best = [number for number in ranked[: self._results] if scores[number] > 0.0]
        lines = [f"{rank}. {documents[number]}" for rank, number in enumerate(best, 1)]
        return " ".join(lines) or "nothing found"

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return up to `n` questions, at most one per person; the splits have different people."""
        check_split(split)
        _, people, _ = self._size
        facts = _facts(*self._size)
        held_out_people = people // _HELD_OUT_SHARE
        rng = random.Random(f"search/{split}/{seed}")
        tasks: list[Task] = []
        for number in rng.sample(range(people), people):
            if (number < held_out_people) != (split == "eval"):
                continue
            for town, founder, born in rng.sample(facts, len(facts)):
                question = f"Who founded the town where {born[number]} was born?"
                info = {"corpus": list(self._size), "town": town}
                tasks.append(Task(question, answer=founder, info=info))
        return tasks[: n or None]

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally: search for the person, then for the town, then answer."""
        texts = [message.text for message in messages if message.role == "user"]
        person = texts[0].removeprefix("Who founded the town where ").removesuffix(" was born?")
        founded = re.search(r" was founded by (\w+ \w+)\.", texts[-1])
        if founded and re.match(r"1\. (\w+) was founded", texts[-1]):
            return f"<answer>{founded[1]}</answer>"
        born = re.search(rf"{person} was born in (\w+)\.", texts[-1])
        if born:
            return f"<search>{born[1]} founded</search>"
        return f"<search>{person} born</search>"

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: with probability 0.5 answer with a name from the last message instead of
        searching."""
        reply = Search.solver(messages, rng)
        if reply.startswith("<search>") and rng.random() < 0.5:
            names = re.findall(r"[A-Z]\w+ [A-Z]\w+", messages[-1].text)
            return f"<answer>{rng.choice(names or ['Mira Dovkel'])}</answer>"
        return reply


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _name(rng: random.Random, taken: set[str], has_first: bool) -> str:
    """Draw a name that is not taken, of a person with a first name or of a town."""
    while True:
        count = 2 if has_first else 3
        name = "".join(rng.choice(_SYLLABLES) for _ in range(count)).capitalize()
        if has_first:
            name = f"{rng.choice(_FIRST)} {name}"
        if name not in taken:
            taken.add(name)
            return name


@functools.lru_cache(maxsize=8)
def _facts(towns: int, people: int, seed: int) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return (town, founder, people born there) of every town."""
    rng = random.Random(f"search corpus {towns} {people} {seed}")
    taken: set[str] = set()
    facts = []
    for _ in range(towns):
        town = _name(rng, taken, False)
        founder = _name(rng, taken, True)
        born = tuple(_name(rng, taken, True) for _ in range(people))
        facts.append((town, founder, born))
    return tuple(facts)


@functools.lru_cache(maxsize=8)
def _index(towns: int, people: int, seed: int) -> tuple[list[str], Any]:
    """Return the documents and their BM25 index."""
    bm25s: Any = importlib.import_module("bm25s")
    facts = _facts(towns, people, seed)
    documents = [f"{town} was founded by {founder}." for town, founder, _ in facts]
    documents += [f"{person} was born in {town}." for town, _, born in facts for person in born]
    index = bm25s.BM25()
    index.index([_words(text) for text in documents], show_progress=False)
    return documents, index
