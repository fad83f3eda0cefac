"""Word problems in the columns of GSM8K, for recipes/compat:
`python recipes/compat/gsm8k_rows.py verl` (or `skyrl`, or both) writes gsm8k/*.jsonl.

The problems add two small numbers, so that a tiny model can learn them. The warm-up's conversations
are mostly wrong: what is left to learn is the sum. Those of SkyRL come from its own environment's
observations, those of verl from its own tool.
"""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from turnwright.envs.foreign import import_object

NAMES = ("Ava", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon")
THINGS = ("apples", "books", "coins", "dolls", "eggs", "figs", "hats", "keys")
TURNS = 3
RIGHT, VERL_RIGHT = 0.2, 0.3
TOOL = "calc_gsm8k_reward"
SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Check.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "A number."}},
            "required": ["answer"],
        },
    },
}


def problems() -> list[tuple[str, int, int]]:
    """All questions with their two numbers, in one random order."""
    found = []
    for name in NAMES:
        for thing in THINGS:
            for first in range(1, 6):
                for second in range(1, 6):
                    found.append(
                        (
                            f"{name} has {first} {thing} and gets {second} more. How many now?",
                            first,
                            second,
                        )
                    )
    random.Random(0).shuffle(found)
    return found


def guess(first: int, second: int, rng: random.Random, right: float = RIGHT) -> str:
    """A demonstrator's answer, mostly wrong by at most two."""
    wrong = rng.choice([one for one in range(-2, 3) if one])
    return str(first + second + (0 if rng.random() < right else wrong))


def say(first: int, second: int, answer: str) -> str:
    return f"{first} + {second} = {answer}\n#### {answer}"


def skyrl_row(question: str, first: int, second: int) -> dict:
    return {
        "prompt": [{"role": "user", "content": question}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": str(first + second)},
        "extra_info": {},
    }


def skyrl_conversation(question: str, first: int, second: int, rng: random.Random) -> dict:
    try:
        from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv
    except ImportError as error:
        sys.exit(f"the rows of skyrl need its environment ({error}); pip install skyrl-gym")
    row = skyrl_row(question, first, second)
    env = GSM8kMultiTurnEnv(extras={**row, "max_turns": TURNS})
    messages = list(row["prompt"])
    done = False
    while not done:
        reply = say(first, second, guess(first, second, rng))
        step = env.step(reply)
        messages += [{"role": "assistant", "content": reply}, *step["observations"]]
        done = step["done"]
    return {"messages": messages}


def verl_row(question: str, first: int, second: int) -> dict:
    truth = str(first + second)
    kwargs = {TOOL: {"create_kwargs": {"ground_truth": truth}}}
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"need_tools_kwargs": True, "tools_kwargs": kwargs},
    }


def verl_tool() -> Any:
    """verl's tool; our stand-in where the installed release has none."""
    schemas = import_object("verl.tools.schemas:OpenAIFunctionToolSchema", "verl")
    return import_object("verl.tools.gsm8k_tool:Gsm8kTool", "verl")(
        {}, schemas.model_validate(SCHEMA)
    )


async def verl_conversation(
    tool: Any, question: str, first: int, second: int, rng: random.Random
) -> dict:
    instance, _ = await tool.create(ground_truth=str(first + second))
    answer = guess(first, second, rng, VERL_RIGHT)
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"answer": answer}}}
    response, _, _ = await tool.execute(instance, {"answer": answer})
    messages = [
        *verl_row(question, first, second)["prompt"],
        {"role": "assistant", "content": f"{first} + {second}", "tool_calls": [call]},
        {"role": "tool", "content": response.text},
        {"role": "assistant", "content": f"#### {answer}"},
    ]
    return {"messages": messages, "tools": [SCHEMA]}


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def verl_conversations(found: list[tuple[str, int, int]], rng: random.Random) -> list[dict]:
    tool = verl_tool()
    return [await verl_conversation(tool, *problem, rng) for problem in found]


def main(kinds: list[str]) -> None:
    folder = Path(__file__).parent / "gsm8k"
    folder.mkdir(exist_ok=True)
    found = problems()
    train, held_out = found[256:], found[:256]
    for kind in kinds:
        row = {"skyrl": skyrl_row, "verl": verl_row}[kind]
        write(folder / f"{kind}_train.jsonl", [row(*problem) for problem in train])
        write(folder / f"{kind}_eval.jsonl", [row(*problem) for problem in held_out])
        rng = random.Random(1)
        if kind == "skyrl":
            talks = [skyrl_conversation(*problem, rng) for problem in train * 3]
        else:
            talks = asyncio.run(verl_conversations(train * 3, rng))
        write(folder / f"{kind}_warmup.jsonl", talks)


if __name__ == "__main__":
    main(sys.argv[1:] or ["verl", "skyrl"])
