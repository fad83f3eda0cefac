"""A text adventure of six to eight turns: fetch the key and open the door, in eight rooms.

::

    user       (the rules) The key is in the attic and the door is in the garden. You are in the
               kitchen. Next: hall.
    assistant  go hall
    user       You are in the hall. Next: kitchen, cellar, garden, stairs.
    assistant  go stairs
    user       You are in the stairs. Next: attic, study, bedroom, hall.
    assistant  go attic
    user       You are in the attic. The key is here. Next: stairs.
    assistant  take key
"""

import re

from llm_kit import command

import turnwright as tw
from turnwright.envs.builtin.common import sample_tasks

ROOMS = (
    "attic", "bedroom", "cellar", "garage", "garden",
    "kitchen", "library", "office", "porch", "study",
)  # fmt: skip
SHORTEST = 6  # turns of a task at least
RULES = (
    "You are in a house. Fetch the key and open the door. Say one command each turn: go ROOM, take "
    "key, or open door. You can only go to a room that is next to you. Example: you are in the "
    'shed, next is the hall. You say "go hall", I say "You are in the hall. Next: shed, tower, '
    'pantry, stairs.", you say "go tower". Now the house is new. The key is in the {key} and the '
    "door is in the {door}. "
)
HELP = "Say go ROOM, take key, or open door."
FETCHED = 0.25  # reward for the key; the door gives the rest
LOST = 0.38  # probability per turn that the demonstrator says any command


def neighbors(room, rooms):
    """Return the rooms next to one; three of the six are at the hall, the others at the stairs."""
    if room == "hall":
        return [*rooms[:3], "stairs"]
    if room == "stairs":
        return [*rooms[3:], "hall"]
    return ["hall" if room in rooms[:3] else "stairs"]


def steps_between(one, other, rooms):
    """Return how many steps lead from a room to another."""
    reached, steps = {one}, 0
    while other not in reached:
        reached |= {room for place in reached for room in neighbors(place, rooms)}
        steps += 1
    return steps


class Adventure(tw.Env):
    """The reward is 0.25 for the key and 0.75 for the open door."""

    single_turn_best = 0.0
    max_turns = 10

    def reset(self, task, *, seed=None):
        self.rooms, self.room = task.info["rooms"], task.info["start"]
        self.key, self.door = task.info["key"], task.info["door"]
        self.has_key = False
        return RULES.format(key=self.key, door=self.door) + self.view()

    def view(self):
        """Describe the room."""
        key = " The key is here." if self.room == self.key and not self.has_key else ""
        door = " The door is here." if self.room == self.door else ""
        return f"You are in the {self.room}.{key}{door} {self.next_rooms()}"

    def next_rooms(self):
        """Name the rooms that are next."""
        return f"Next: {', '.join(neighbors(self.room, self.rooms))}."

    def step(self, action):
        match command(action.text):
            case ["go", room] if room in neighbors(self.room, self.rooms):
                self.room = room
                return tw.Step(self.view())
            case ["go", _]:
                return tw.Step(f"You cannot go there. {self.next_rooms()}")
            case ["take", "key"]:
                return self.take()
            case ["open", "door"]:
                return self.open()
        raise tw.InvalidAction(f"{HELP} {self.next_rooms()}")

    def take(self):
        if self.has_key:
            return tw.Step(f"You have the key. {self.next_rooms()}")
        if self.room != self.key:
            return tw.Step(f"There is no key here. {self.next_rooms()}")
        self.has_key = True
        return tw.Step(f"You have the key. {self.next_rooms()}", reward=FETCHED)

    def open(self):
        if self.room != self.door:
            return tw.Step(f"There is no door here. {self.next_rooms()}")
        if not self.has_key:
            return tw.Step(f"You need the key. {self.next_rooms()}")
        return tw.Step(reward=1.0 - FETCHED, terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        """Return houses; no start with the same places of key and door is in both splits."""

        def draw(rng):
            while True:
                rooms = rng.sample(ROOMS, 6)
                start, key, door = rng.choice(("hall", "stairs", *rooms)), *rng.sample(rooms, 2)
                turns = steps_between(start, key, rooms) + 1 + steps_between(key, door, rooms) + 1
                if turns >= SHORTEST and start not in (key, door):
                    info = {"rooms": rooms, "start": start, "key": key, "door": door}
                    return f"{start} {key} {door}", tw.Task(info=info)

        return sample_tasks("adventure", split, n, seed, draw)

    @staticmethod
    def solver(messages, rng):
        texts = [message.text for message in messages if message.role == "user"]
        places = re.search(r"The key is in the (\w+) and the door is in the (\w+)\.", texts[0])
        key, door = places.groups()
        here = re.findall(r"You are in the (\w+)\.", " ".join(texts))[-1]
        next_rooms = texts[-1].rpartition("Next: ")[2].strip(".").split(", ")

        has_key = any(text.startswith("You have the key.") for text in texts)
        goal = door if has_key else key
        if here == goal:
            return "open door" if has_key else "take key"
        # The way to what is not next leads over the hall and the stairs, which are named last.
        return f"go {goal if goal in next_rooms else next_rooms[-1]}"

    @staticmethod
    def demonstrator(messages, rng):
        if rng.random() >= LOST:
            return Adventure.solver(messages, rng)
        next_rooms = messages[-1].text.rpartition("Next: ")[2].strip(".").split(", ")
        return rng.choice([*(f"go {room}" for room in next_rooms), "take key", "open door"])
