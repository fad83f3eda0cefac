"""The judge of recipes/compat/slime_radar.toml: an HTTP server that takes some milliseconds and
now and then answers 503.

`python recipes/compat/slime_judge.py` serves on port 8799; name it by
`[env.args] args = { judge = "127.0.0.1:8799" }`. Without one, the environment starts its own.
"""

import json
import random
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WAYS = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}
SECONDS, FAILS = 0.03, 0.02


class Judge(BaseHTTPRequestHandler):
    """Answers whether a word leads from the middle of a picture to its goal."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rng = random.Random(0)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(SECONDS)
        right, up = WAYS.get(asked["reply"], (0, 0))
        score = float(right * asked["goal"][0] + up * asked["goal"][1] > 0)
        failed = self.rng.random() < FAILS
        body = json.dumps({"error": "overloaded"} if failed else {"score": score}).encode()
        self.send_response(503 if failed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Log nothing: there are thousands of requests."""


class Server(ThreadingHTTPServer):
    """Takes the requests of many episodes that ask at once."""

    daemon_threads = True
    request_queue_size = 128


def start():
    """Start a judge in this process, and return its address."""
    server = Server(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"


def ask(address, goal, reply):
    """Return the judge's score of a reply; wait for it."""
    connection = HTTPConnection(address, timeout=30)
    try:
        connection.request("POST", "/score", json.dumps({"goal": goal, "reply": reply}))
        answer = connection.getresponse()
        body = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != 200:
        raise ConnectionError(f"judge {address} answered {answer.status}: {body['error']}")
    return body["score"]


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 8799), Judge).serve_forever()
