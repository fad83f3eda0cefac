"""A page of another origin, in a real browser, and `turnwright serve` on the same machine."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("torch")
from turnwright.config import ModelConfig
from turnwright.training import create_tiny_model
from turnwright_serve import make_service
from turnwright_serve.server import JsonHttpServer

pytestmark = pytest.mark.browser
TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(60)
]
ATTACK = """async (url) => {
  const told = [];
  const paths = ['/update_weight_version', '/pause', '/sleep', '/collective_rpc', '/v1/completions', '/reset_prefix_cache'];
  const body = JSON.stringify({new_version: 'evil', method: 'reload_weights', kwargs: {weights_path: '/tmp'}, prompt: [5]});
  for (const path of paths)
    for (const type of ['text/plain', 'application/json', 'application/x-www-form-urlencoded', ''])
      for (const mode of ['no-cors', 'cors'])
        try {
          const content = type ? body : new Blob([body]);
          const headers = type ? {'Content-Type': type} : {};
          const signal = AbortSignal.timeout(2000);
          const answer = await fetch(url + path, {method: 'POST', mode, headers, body: content, signal});
          told.push([path, answer.type, answer.status]);
        } catch (error) { told.push([path, 'error', 0]); }
  const form = document.createElement('form');
  Object.assign(form, {method: 'POST', action: url + '/pause?mode=abort', enctype: 'text/plain', target: 'inner'});
  document.body.append(Object.assign(document.createElement('iframe'), {name: 'inner'}), form);
  form.submit();
  await new Promise(done => setTimeout(done, 500));
  return told;
}"""  # noqa: E501


@pytest.fixture
def running(tmp_path):
    ready, held = threading.Event(), {}

    async def work():
        app, engine = make_service(
            create_tiny_model(ModelConfig(hidden=32, layers=1), TEXTS, tmp_path / "model", seed=3),
            context=64,
            device="cpu",
        )
        server = JsonHttpServer(app.routes("vllm"), host="127.0.0.1", port=0)
        await server.start()
        held.update(
            app=app,
            url=server.url,
            token=server.token,
            loop=asyncio.get_running_loop(),
            over=asyncio.Event(),
        )
        ready.set()
        await held["over"].wait()
        await server.close()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    ready.wait()
    yield held
    held["loop"].call_soon_threadsafe(held["over"].set)
    thread.join()


@pytest.fixture
def elsewhere():
    class Page(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>evil</title><body>")

    web = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://localhost:{web.server_address[1]}/"
    web.shutdown()
    web.server_close()


def test_a_page_of_another_origin_changes_nothing(page, running, elsewhere):
    page.goto(elsewhere)
    told = page.evaluate(ATTACK, running["url"])
    assert len(told) == 48
    assert {status for _, _, status in told} == {0}, "a page read an answer"
    connection = http.client.HTTPConnection(running["url"].removeprefix("http://"), timeout=20)
    access = {"authorization": f"Bearer {running['token']}"}
    connection.request("GET", "/weight_info", headers=access)
    assert json.loads(connection.getresponse().read()) == {"weight_version": "default"}
    connection.request("GET", "/is_sleeping", headers=access)
    assert json.loads(connection.getresponse().read()) == {"is_sleeping": False}, "it was paused"
    content = json.dumps({"prompt": [5, 6]})
    connection.request(
        "POST", "/v1/completions", content, access | {"content-type": "application/json"}
    )
    assert connection.getresponse().status == 200
    connection.close()
    assert not running["app"].released
