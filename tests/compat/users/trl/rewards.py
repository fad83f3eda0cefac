"""Reward functions and tools of a GRPOTrainer."""


def exact(completions, answer, **kwargs):
    return [
        float(messages[-1]["content"] == str(one))
        for messages, one in zip(completions, answer, strict=True)
    ]


def brief(completion_ids, log_metric=None, log_extra=None, **kwargs):
    if log_extra:
        log_extra("ids", completion_ids)
    if log_metric:
        log_metric("ids", len(completion_ids[0]))
    return [-float(len(ids)) / 100 for ids in completion_ids]


async def said(environments, prompts, **kwargs):
    return [float(one.said == "hello") if hasattr(one, "said") else None for one in environments]


def calls(completions, **kwargs):
    return [
        float(sum(len(message.get("tool_calls") or ()) for message in messages))
        for messages in completions
    ]


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def two(completions, **kwargs):
    return [1.0, 2.0]


def nothing(number):
    return [number]


def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        Their product.
    """
    return a * b
