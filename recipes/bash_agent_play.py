"""A file task for bash_agent.py: each file names another one or has a code, which goes
into the file `code`."""

from pathlib import Path

from bash_agent import OUTPUT, SYSTEM

import turnwright as tw
from turnwright.envs.builtin.hop import Hop
from turnwright_serve import program


class Files(Hop):
    """What the agent's conversations look like, for tasks and demonstrations; reinforcement
    plays the agent itself."""

    question, call, answer = (
        "Write the code of {} to the file code.",
        "```bash\ncat {}\n```",
        "```bash\necho {} > code; echo DONE\n```",
    )

    async def reset(self, task, *, seed=None):
        """Open with the agent's system message."""
        return tw.Message("system", SYSTEM), *await super().reset(task, seed=seed)

    async def step(self, action):
        """Answer the two commands that the players use; anything else needs the real shell."""
        words = action.text.split()
        if words[1:2] == ["echo"]:
            return self._judge(words[2])
        if words[1:2] == ["cat"] and words[2] in self._table:
            return tw.Step(OUTPUT.format(0, self._table[words[2]] + "\n"))
        raise tw.InvalidAction("Reply with one command.")

    @classmethod
    def solver(cls, messages, rng):
        """Follow the names, and write the code down."""
        text = messages[-1].text
        words = text.replace("the code of", "see").split()
        at = next(number for number, word in enumerate(words) if word in ("see", "code"))
        return (cls.answer if words[at] == "code" else cls.call).format(words[at + 1])


def right(result):
    """Whether the file that the agent left has the code."""
    written = result.directory / "code"
    return float(
        written.is_file() and written.read_text(errors="replace").strip() == result.task.answer
    )


def files(task):
    """Return the files of a task."""
    return {name: entry + "\n" for name, entry in task.info["table"].items()}


AGENT = str(Path(__file__).with_name("bash_agent.py").resolve())
play = program(["{python}", "-I", "-S", AGENT, "{task}"], score=right, files=files, sandbox=True)
