"""A tiny OpenAI-style chat server, a process of its own, that fails as it is told.

The model's name says what the requests of each question meet, in order, the last one from then on:
`500,500,ok`. It judges as the prompts of `turnwright.envs.rewards.judge` ask for: 10 where the last
reply is 42, else 0; before that it repeats the reply.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MET: Counter[str] = Counter()
LOCK = threading.Lock()
OVER = threading.Event()


def judge(messages: list[dict[str, str]]) -> str:
    """An honest and talkative judge: what it is shown it says again, then comes its verdict."""
    rules = messages[0]["content"]
    mark = rules.rpartition("VERDICT ")[2].split()[0]
    shown = messages[1]["content"].partition(f"BEGIN {mark}\n")[2].rpartition(f"\nEND {mark}")[0]
    rows = [json.loads(line) for line in shown.split("\n")]
    last = [row["content"] for row in rows if row["role"] == "assistant"][-1]
    return (
        f"The assistant said:\n{last}\nThat settles it.\nVERDICT {mark} "
        f"{10 if last.strip() == '42' else 0}"
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        plan = body["model"].split(",")
        with LOCK:
            name = json.dumps(body)
            met, MET[name] = MET[name], MET[name] + 1
        getattr(self, f"do_{plan[min(met, len(plan) - 1)].partition(':')[0]}")(
            body, plan[min(met, len(plan) - 1)]
        )

    def say(self, data: Any, status: int = 200, **headers: str) -> None:
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for key, value in {"content-length": str(len(raw)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(raw)

    def do_ok(self, body: Any, fault: str) -> None:
        text = (
            judge(body["messages"])
            if "VERDICT" in body["messages"][0]["content"]
            else f"echo {body['messages'][-1]['content']}"
        )
        self.say(
            {
                "choices": [{"message": {"role": "assistant", "content": text}}],
                "usage": {"total_tokens": 7},
            }
        )

    def do_status(self, body: Any, fault: str) -> None:
        self.say(
            {"error": f"no; you sent {self.headers.get('authorization')}"}, int(fault.split(":")[1])
        )

    def do_later(self, body: Any, fault: str) -> None:
        self.say({"error": "too many"}, 429, **{"retry-after": fault.split(":")[1]})

    def do_slow(self, body: Any, fault: str) -> None:
        time.sleep(float(fault.split(":")[1]))
        self.do_ok(body, fault)

    def do_hang(self, body: Any, fault: str) -> None:
        OVER.wait(60)

    def do_drip(self, body: Any, fault: str) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        for _ in range(1000):
            self.wfile.write(b" ")
            self.wfile.flush()
            if OVER.wait(0.05):
                break

    def do_garbage(self, body: Any, fault: str) -> None:
        self.say(b"<html>\xff\xfe bad gateway")

    def do_deep(self, body: Any, fault: str) -> None:
        self.say(b"[" * 100_000)

    def do_schema(self, body: Any, fault: str) -> None:
        self.say({"choices": []})

    def do_null(self, body: Any, fault: str) -> None:
        self.say({"choices": [{"message": {"content": None}}]})

    def do_huge(self, body: Any, fault: str) -> None:
        self.say(b" " * 20_000_000)

    def do_uncounted(self, body: Any, fault: str) -> None:
        self.say({"choices": [{"message": {"content": "hello"}}]})

    def do_cut(self, body: Any, fault: str) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        self.wfile.write(b'{"choices"')
        self.close_connection = True

    def do_mumble(self, body: Any, fault: str) -> None:
        asked_again = len(body["messages"]) > 2
        said = judge(body["messages"]) if asked_again else "I would say Score: 10. VERDICT 10"
        self.say({"choices": [{"message": {"content": said}}]})

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    threading.Thread(
        target=lambda: (sys.stdin.read(), OVER.set(), server.shutdown()), daemon=True
    ).start()
    server.serve_forever()
