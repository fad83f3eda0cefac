"""Search: two-hop questions over a small generated corpus, ranked by BM25.

::

    user       Who founded the town where Mira Dovel was born?
    assistant  <search>Mira Dovel born</search>
    user       1. Mira Dovel was born in Kelmor. 2. ...
    assistant  <search>Kelmor founded</search>
    user       1. Kelmor was founded by Tarn Obask. 2. ...
    assistant  <answer>Tarn Obask</answer>

The reward is 1 when the answer is exactly the founder. Each town is equally often correct in
both splits and has its own founder, so the best success rate without a search is 1 / `towns`.
Needs the extra `search` (bm25s).
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
        self._size, self._results, self._rules = (towns, people, corpus_seed), results, rules
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
        found = _REPLY.fullmatch(tag)
        if found is None or ">" in before:
            raise InvalidAction("Say <search>WORDS</search> or <answer>NAME</answer>.")
        if found["kind"] == "search":
            return Step(self._search(found["text"]))
        right = found["text"].strip() == self._answer
        return Step(reward=float(right), terminated=True, info={"right": right})

    def _search(self, query: str) -> str:
        documents, index = _index(*self._size)
        words = _words(query)[:_MAX_QUERY_WORDS]
        scores = index.get_scores(words) if words else [0.0] * len(documents)
        ranked = sorted(range(len(documents)), key=lambda i: (-float(scores[i]), i))[
            : self._results
        ]
        results = [documents[i] for i in ranked if float(scores[i]) > 0.0]
        return (
            " ".join(f"{rank}. {text}" for rank, text in enumerate(results, 1)) or "nothing found"
        )

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return up to `n` questions, at most one per person; the splits have different people."""
        check_split(split)
        _, people, _ = self._size
        facts = _facts(*self._size)
        held = people // _HELD_OUT_SHARE
        rng = random.Random(f"search/{split}/{seed}")
        asked: list[Task] = []
        for number in rng.sample(range(people), people):
            if (number < held) == (split == "eval"):
                for town, founder, born in rng.sample(facts, len(facts)):
                    info = {"corpus": list(self._size), "town": town}
                    asked.append(
                        Task(
                            f"Who founded the town where {born[number]} was born?",
                            answer=founder,
                            info=info,
                        )
                    )
        return asked[: n or None]

    @staticmethod
    def solver(messages: Sequence[Message], rng: random.Random) -> str:
        """Play optimally: search for the person, then for the town, then answer."""
        texts = [message.text for message in messages if message.role == "user"]
        person = texts[0].removeprefix("Who founded the town where ").removesuffix(" was born?")
        founded = re.search(r" was founded by (\w+ \w+)\.", texts[-1])
        if founded and re.match(r"1\. (\w+) was founded", texts[-1]):
            return f"<answer>{founded[1]}</answer>"
        if born := re.search(rf"{person} was born in (\w+)\.", texts[-1]):
            return f"<search>{born[1]} founded</search>"
        return f"<search>{person} born</search>"

    @staticmethod
    def demonstrator(messages: Sequence[Message], rng: random.Random) -> str:
        """Play poorly: with probability 0.5 answer with a name from the last message
        instead of searching."""
        reply = Search.solver(messages, rng)
        if reply.startswith("<search>") and rng.random() < 0.5:
            names = re.findall(r"[A-Z]\w+ [A-Z]\w+", messages[-1].text)
            return f"<answer>{rng.choice(names or ['Mira Dovkel'])}</answer>"
        return reply


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _name(rng: random.Random, taken: set[str], first: bool) -> str:
    while True:
        name = "".join(rng.choice(_SYLLABLES) for _ in range(2 if first else 3)).capitalize()
        name = f"{rng.choice(_FIRST)} {name}" if first else name
        if name not in taken:
            taken.add(name)
            return name


@functools.lru_cache(maxsize=8)
def _facts(towns: int, people: int, seed: int) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return (town, founder, people born there) of every town."""
    rng = random.Random(f"search corpus {towns} {people} {seed}")
    taken: set[str] = set()
    return tuple(
        (
            _name(rng, taken, False),
            _name(rng, taken, True),
            tuple(_name(rng, taken, True) for _ in range(people)),
        )
        for _ in range(towns)
    )


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
