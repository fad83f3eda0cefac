"""An agent in mini-swe-agent's form, which knows nothing of Turnwright: a bash command each turn;
its output is the answer."""

import http.client
import json
import os
import re
import subprocess
import sys
from urllib.parse import urlsplit

SYSTEM = "You work in a shell. Reply with one command:\n```bash\nCOMMAND\n```\nTo end, print DONE."
OUTPUT = "<returncode>{}</returncode>\n<output>\n{}</output>"


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's reply."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc)
    body = json.dumps({"model": "any", "messages": messages})
    connection.request(
        "POST", f"{url.path}/chat/completions", body, {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(answer.read().decode())
    return json.load(answer)["choices"][0]["message"]["content"]


def main(task: str) -> None:
    """Work on a task until the model prints DONE, for at most six turns."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(6):
        reply = ask(messages)
        commands = re.findall(r"```bash\n(.*?)\n```", reply, re.DOTALL)
        text = "Reply with one command."
        if len(commands) == 1:
            pipes = {
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "stdin": subprocess.DEVNULL,
            }
            ran = subprocess.run(
                ["bash", "-c", commands[0]],
                text=True,
                errors="replace",
                timeout=20,
                check=False,
                **pipes,
            )
            if ran.stdout.startswith("DONE"):
                return
            text = OUTPUT.format(ran.returncode, ran.stdout[:400])
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": text}]


if __name__ == "__main__":
    main(sys.argv[1])
