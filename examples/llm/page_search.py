"""Page search: questions about the boats of `harbor.txt`, a page of invented facts.

::

    user       (the rules) What does the boat of Captain Ross carry?
    assistant  search Ross
    user       Captain Ross sails the Lark.
    assistant  search Lark
    user       Captain Ross sails the Lark. The Lark is red, carries tea, lies at pier 4 and leaves
               on Friday.
    assistant  answer tea
"""

import functools
import random
import re
from collections import Counter
from pathlib import Path

from llm_kit import command

import turnwright as tw
from turnwright.envs.spec import check_split

PAGE = Path(__file__).with_name("harbor.txt")
BOAT = re.compile(r"The (\w+) is (\w+), carries (\w+), lies at pier (\w+) and leaves on (\w+)\.")
QUESTIONS = (
    "What color is the boat of Captain {}?",
    "What does the boat of Captain {} carry?",
    "At which pier is the boat of Captain {}?",
    "On which day does the boat of Captain {} leave?",
)
"""Questions in the order of a boat's facts."""
RULES = (
    "Answer a question about boats. You have a page of facts and can search it. Say one command "
    "each turn: search WORD shows lines with the word, answer WORD ends. Example: you look for the "
    'color of the boat of Captain Zorn. You say "search Zorn", I say "Captain Zorn sails the '
    'Gull.", you say "search Gull", I say "Captain Zorn sails the Gull. The Gull is pink, carries '
    'figs, lies at pier 9 and leaves on Sunday.", you say "answer pink". Now the question. '
)
HELP = "Say search WORD or answer WORD."
SHOWN = 2  # lines that a search shows
GIVE_UP = 0.35  # probability per turn that the demonstrator guesses an answer


@functools.cache
def page():
    """Return the lines of the page."""
    return tuple(PAGE.read_text(encoding="utf-8").splitlines())


def facts():
    """Return the four facts of the boat of each captain, in the order of the captains' names."""
    text = " ".join(page())
    boats = {name: boat_facts for name, *boat_facts in BOAT.findall(text)}
    pairs = re.findall(r"Captain (\w+) sails the (\w+)\.", text)
    return {captain: boats[boat] for captain, boat in pairs}


def words_of(text):
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def asked_fact(messages):
    """Return which of a boat's facts the question of a conversation is about."""
    question = next(message.text for message in messages if message.role == "user")
    starts = [form.partition("{}")[0] for form in QUESTIONS]
    asked = [start in question for start in starts]
    return asked.index(True)


def search(lines, words):
    """Return the lines that share most with the words; a rare word counts more."""
    counts = Counter(word for line in lines for word in set(words_of(line)))
    weights = {}
    for line in lines:
        shared = set(words) & set(words_of(line))
        if shared:
            weights[line] = sum(1 / counts[word] for word in shared)

    best = sorted(weights, key=weights.get, reverse=True)  # lines of one weight as on the page
    return " ".join(best[:SHOWN]) or "Nothing found. Search for a name."


class PageSearch(tw.Env):
    """The reward is 1 for the right answer. A third of the captains is held out.

    A task may bring a page of its own: `info["lines"]`.
    """

    single_turn_best = 9 / 64  # the likeliest answers: 1 in 8, and of six days 3 in 16
    max_turns = 6

    def reset(self, task, *, seed=None):
        self.answer = task.answer
        self.lines = task.info.get("lines") or page()
        return RULES + task.info["question"]

    def step(self, action):
        match command(action.text):
            case ["search", *words] if words:
                return tw.Step(search(self.lines, words_of(" ".join(words))))
            case ["answer", *words] if words:
                return tw.Step(reward=float(words[-1] == self.answer.lower()), terminated=True)
        raise tw.InvalidAction(HELP)

    @staticmethod
    def tasks(split, n, seed):
        """Return up to `n` questions of a split: of 128 to train with, or of 64 held out."""
        check_split(split)
        asked = []
        for number, (captain, boat_facts) in enumerate(facts().items()):
            if (number % 3 == 2) != (split == "eval"):
                continue
            for form, answer in zip(QUESTIONS, boat_facts, strict=True):
                asked.append(tw.Task(answer=answer, info={"question": form.format(captain)}))
        random.Random(f"page search {split} {seed}").shuffle(asked)
        return asked[: n or None]

    @staticmethod
    def solver(messages, rng):
        last = messages[-1].text.removeprefix(RULES)
        if boat := BOAT.search(last):
            return f"answer {boat[2 + asked_fact(messages)]}"
        name = re.search(r" sails the (\w+)\.$", last) or re.search(r"Captain (\w+)", last)
        return f"search {name[1]}"

    @staticmethod
    def demonstrator(messages, rng):
        reply = PageSearch.solver(messages, rng)
        if reply.startswith("answer") or rng.random() >= GIVE_UP:
            return reply
        # A guess is of the kind that was asked for.
        boat_facts = rng.choice(list(facts().values()))
        return f"answer {boat_facts[asked_fact(messages)]}"
