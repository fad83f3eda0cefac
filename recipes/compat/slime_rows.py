"""Rows and pictures of recipes/compat/slime_radar.toml: `python recipes/compat/slime_rows.py`
writes slime_radar/*.jsonl.

A picture has a blue square in the middle and a goal one or two fields away. Each place has one
colour that only the held-out rows show. The warm-up's conversations mostly follow a habit: what is
left to learn is to look.
"""

import base64
import io
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = ("red", "orange", "yellow", "magenta")
GOALS = tuple((x * far, y * far) for far in (1, 2) for x, y in ((0, 1), (0, -1), (-1, 0), (1, 0)))
SIDE, FIELD = 32, 6
PICTURES = 2
ASK = "up/down/left/right?"
HABIT, SENSE = 0.55, 0.2
"""Chances that the demonstrator says its habit, and the right way; else it says any."""


def draw(goal, colour, ground):
    """Draw a picture: the middle, and the goal (right, up) of it."""
    picture = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    pen = ImageDraw.Draw(picture)
    for (right, up), paint in (((0, 0), "blue"), (goal, colour)):
        left, top = (SIDE - FIELD) // 2 + right * FIELD, (SIDE - FIELD) // 2 - up * FIELD
        pen.rectangle((left, top, left + FIELD - 1, top + FIELD - 1), fill=paint)
    return picture


def data_uri(picture):
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def pictures(rng, held_out):
    """Pictures of one row, of the kinds that are held out, or of the others."""
    kinds = [
        {"goal": list(goal), "colour": colour, "ground": rng.randrange(48)}
        for place, goal in enumerate(GOALS)
        for number, colour in enumerate(COLOURS)
        if ((place + number) % len(COLOURS) == 0) == held_out
    ]
    return rng.choices(kinds, k=PICTURES)


def row(found):
    return {
        "prompt": f"<image>{ASK}",
        "images": [data_uri(draw(**found[0]))],
        "label": "",
        "metadata": {"pictures": found},
    }


def demonstrate(goal, rng):
    right, up = goal
    if (chance := rng.random()) < HABIT:
        return "up" if up else "right"
    if chance < HABIT + SENSE:
        return ("up" if up > 0 else "down") if up else ("right" if right > 0 else "left")
    return rng.choice(("up", "down", "left", "right"))


def conversation(found, rng):
    messages: list[dict] = []
    for one in found:
        text = [] if messages else [{"type": "text", "text": ASK}]
        messages.append(
            {"role": "user", "content": [{"type": "image", "image": data_uri(draw(**one))}, *text]}
        )
        messages.append({"role": "assistant", "content": demonstrate(one["goal"], rng)})
    return {"messages": messages}


def write(folder):
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    files = {
        "train": [row(pictures(rng, False)) for _ in range(1000)],
        "eval": [row(pictures(rng, True)) for _ in range(200)],
        "warmup": [conversation(pictures(rng, False), rng) for _ in range(1500)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in rows), "utf-8"
        )


if __name__ == "__main__":
    write(Path(__file__).parent / "slime_radar")
