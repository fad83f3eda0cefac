"""What the tasks of this folder share: how a reply is read."""

import re

LONGEST = 120  # characters of a reply that are read


def first_line(text):
    """Return the first line of a reply, without quotes and stops around it."""
    lines = text.strip()[:LONGEST].splitlines()
    return lines[0].strip(" \t\"'`.,!") if lines else ""


def command(text):
    """Return the words of the first line, in lower case."""
    return first_line(text).lower().split()


def only_number(text):
    """Return the number of the first line; None where it has none, or several."""
    numbers = re.findall(r"-?\d+", first_line(text), re.ASCII)
    return int(numbers[0]) if len(numbers) == 1 else None
