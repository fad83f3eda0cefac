"""placeholder"""


def html(value: object) -> str | None:
    return None
