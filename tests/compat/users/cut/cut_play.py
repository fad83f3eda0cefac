"""A play function: two replies at most; a cut reply ends the conversation and is punished."""


async def play(task, model):
    messages = list(task.messages)
    for _ in range(2):
        reply = await model.generate(messages)
        messages += [reply.message, {"role": "user", "content": "Again."}]
        if reply.finish == "length":
            return -1.0
    return float("good" in reply.text)
