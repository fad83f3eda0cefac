"""Small HTTP servers, each a process of its own, that speak the wire formats of vLLM, SGLang,
llama.cpp and chat endpoints.

The model is a table: log p(next | last id) of 32 ids, made from the seed of the weights.
Faults are set over the socket, at `/fault`, so that a server misbehaves for a number of
answers and is well afterwards.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from array import array
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgpack

IDS = 32
END = 31
PAD, RUN = 30, 4
"""The placeholder of an image, and how many of them the server itself makes of one."""
PROMPT = list(range(3, 23))


def table(weights: int) -> list[list[float]]:
    """log p(next | last), one row per last id."""
    rng = random.Random(weights)
    rows = []
    for _ in range(IDS):
        logits = [rng.gauss(0, 1.5) for _ in range(IDS)]
        shift = math.log(sum(map(math.exp, logits)))
        rows.append([value - shift for value in logits])
    return rows


def tempered(row: list[float], temperature: float, banned=()) -> list[float]:
    scaled = [-math.inf if i in banned else value / temperature for i, value in enumerate(row)]
    shift = math.log(sum(math.exp(value) for value in scaled))
    return [value - shift for value in scaled]


def draw(rng, row, last_k=None) -> int:
    point, total = rng.random(), 0.0
    for token, value in enumerate(row):
        total += math.exp(value)
        if point < total:
            return token
    return IDS - 1


MODEL = os.environ.get("KIT_NAME", "tiny")  # of this process, if it is a server


class State:
    def __init__(self, kind: str, weights: int) -> None:
        self.kind, self.weights, self.name = kind, weights, "default"
        self.rows = table(weights)
        self.faults: list[dict] = []
        self.seen: list[dict] = []
        self.rng = random.Random(os.environ.get("KIT_DRAWS"))
        self.paused = False
        self.lock = threading.RLock()
        """Held by each request: a reply has the weights and the version of one moment."""
        self.named = threading.Event()
        """Unset between the two requests of an update of vLLM, of new weights and of their name:
        paused, it samples nothing."""
        self.named.set()
        self.adapters: dict[str, list[list[float]]] = {}
        """What it answers by each."""
        self.aborted: set[str] = set()
        """Names of requests that it was to end."""
        self.miscounted: set[str] = set()
        """Adapters whose requests SGLang counts for ever; once it is to unload one, it
        loads and unloads none."""
        self.stuck = False
        self.drafts = {"draft": 0, "accepted": 0}
        self.gone: set[str] = set()
        self.images: dict[str, int] = {}
        """Bytes of each that it keeps, by the name that it came under, the one
        longest not asked for first."""

    def sample(self, prompt, most, temperature, banned, stops, model=None):
        if self.gone:  # no weights, or no memory for keys and values
            os._exit(1)
        ids, logprobs, last, plain = [], [], prompt[-1], os.environ.get("KIT_RAW")
        rows = self.adapters.get(model, self.rows)
        while len(ids) < most:
            row = tempered(rows[last % IDS], temperature or 1.0, banned)
            token = draw(self.rng, row) if temperature else max(range(IDS), key=row.__getitem__)
            ids.append(token)
            logprobs.append(rows[last % IDS][token] if plain else row[token])
            last = token
            if token in stops:
                return ids, logprobs, "stop"
        return ids, logprobs, "length"

    def likeliest(self, prompt, ids, most, temperature, banned, model=None):
        """At each position the ids with the highest logprobs, those of impossible ids as servers
        report them."""
        rows, ranked = self.adapters.get(model, self.rows), []
        for last in [prompt[-1], *ids][: len(ids)]:
            row = tempered(rows[last % IDS], temperature or 1.0, banned)
            by_logprob = sorted(enumerate(row), key=lambda pair: -pair[1])
            ranked.append([(i, max(p, -9999.0)) for i, p in by_logprob][:most])
        return ranked

    def scores(self, ids, model=None):
        if self.gone:
            os._exit(1)
        rows = self.adapters.get(model, self.rows)
        return [rows[a % IDS][b % IDS] for a, b in itertools.pairwise(ids)]


def server_info(gigabytes):
    """What vLLM 0.32.0 tells of images that it keeps (of some 26 kilobytes)."""
    images = {"mm_processor_cache_gb": gigabytes, "mm_processor_cache_type": "lru"}
    processes = {
        "_api_process_count": 1,
        "data_parallel_size": 1,
        "data_parallel_external_lb": False,
    }
    return {
        "vllm_config": {"model_config": {"multimodal_config": images}, "parallel_config": processes}
    }


STATE: State


def experts(ids):
    """Six numbers for each id that depend on all ids up to it; the same as `kit.routes.experts`."""
    rows, so_far = [], 0
    for token in ids:
        so_far = zlib.crc32(array("q", [token]).tobytes(), so_far)
        rows.append([so_far >> shift & 255 for shift in (0, 5, 9, 13, 17, 21)])
    return rows


def npy(rows):
    """An .npy file of uint8 [positions, 3, 2]."""
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({len(rows)}, 3, 2), }}"
    head += " " * (64 - (10 + len(head) + 1) % 64) + "\n"
    return (
        b"\x93NUMPY\1\0"
        + struct.pack("<H", len(head))
        + head.encode()
        + bytes(itertools.chain.from_iterable(rows))
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5

    def log_message(self, *_):
        pass

    def say(self, body, status=200, raw=None):
        content = raw if raw is not None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        path, state = self.path.split("?")[0], STATE
        if path == "/seen":
            return self.say(state.seen)
        pages = {
            "vllm": {
                "/health": {},
                "/version": {"version": "0.32.0"},
                "/v1/models": {"data": [{"id": MODEL, "parent": None, "max_model_len": 256}]},
                "/weight_info": {"weight_version": state.name},
                "/is_sleeping": {"is_sleeping": state.paused or bool(state.gone)},
                "/server_info": server_info(float(os.environ.get("KIT_KEEPS") or 0)),
                "/openapi.json": {
                    "paths": dict.fromkeys(
                        [
                            "/v1/completions",
                            "/inference/v1/generate",
                            "/pause",
                            "/resume",
                            "/collective_rpc",
                            "/weight_info",
                            "/update_weight_version",
                            "/reset_prefix_cache",
                            "/abort_requests",
                            "/v1/load_lora_adapter",
                            *(
                                ["/v1/chat/completions/render"]
                                if os.environ.get("KIT_TAKES")
                                else []
                            ),
                            *(["/server_info"] if os.environ.get("KIT_KEEPS") else []),
                            "/sleep",
                            "/wake_up",
                            "/is_sleeping",
                        ]
                    )
                },
            },
            "sglang": {
                "/health": {},
                "/model_info": {"model_path": "tiny", "weight_version": state.name},
                "/server_info": {"version": "0.5.19", "context_length": 256, "enable_lora": True},
                "/openapi.json": {
                    "components": {
                        "schemas": {
                            "GenerateReqInput": {
                                "properties": {} if os.environ.get("KIT_OLD") else {"extra_key": {}}
                            }
                        }
                    }
                },
                "/v1/models": {"data": [{"id": MODEL, "parent": None, "max_model_len": 256}]},
            },
            "llamacpp": {
                "/health": {"status": "ok"},
                "/props": {"build_info": "b1-test", "default_generation_settings": {"n_ctx": 256}},
            },
            "chat": {"/models": {"data": []}},
        }[state.kind]
        if state.kind == "vllm" and os.environ.get("KIT_PLAIN"):
            # Without the tokens-only route and development routes.
            pages["/openapi.json"] = {"paths": {"/v1/completions": {}}}
            pages.pop("/weight_info")
        if path == "/v1/models":
            pages[path]["data"] += [{"id": name, "parent": "tiny"} for name in state.adapters]
        if path in pages:
            return self.say(pages[path])
        if (
            load := os.environ.get("KIT_LOAD")
        ) is not None:  # running, waiting, fraction of the cache
            running, waiting, cache = load.split()
            row = {"dp_rank": 0, "num_waiting_reqs": int(waiting)}
            labels = '{engine="0",model_name="a b"}'
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            rows = [
                f"vllm:{name}{labels} {float(value)}"
                for name, value in zip(names, load.split(), strict=True)
            ]
            if path == "/metrics" and state.kind == "vllm":
                return self.say(
                    None,
                    raw="\n".join(["# TYPE vllm:num_requests_running gauge", *rows, ""]).encode(),
                )
            if path == "/v1/loads" and state.kind == "sglang" and not os.environ.get("KIT_OLD"):
                return self.say(
                    {
                        "loads": [
                            row | {"num_running_reqs": int(running), "token_usage": float(cache)}
                        ]
                    }
                )
            if path == "/get_load" and state.kind == "sglang":
                return self.say([row | {"num_reqs": int(running) + int(waiting), "num_tokens": 9}])
        if path == "/metrics" and os.environ.get("KIT_DRAFTS"):
            rows = [
                f'vllm:spec_decode_num_{n}_tokens_total{{engine="0",model_name="a b"}} '
                f"{state.drafts[n]}.0"
                for n in state.drafts
            ]
            return self.say(
                None,
                raw="\n".join(
                    ["# HELP vllm:spec_decode_num_draft_tokens_total Number", *rows, ""]
                ).encode(),
            )
        return self.say({"detail": "Not Found"}, 404)

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(raw) if raw.strip() else {}
        path, state = self.path.split("?")[0], STATE
        if path == "/fault":
            state.faults.extend([body] * body.get("times", 1))
            return self.say({})
        state.seen.append({"path": self.path, "body": body, "headers": dict(self.headers)})
        handle = getattr(self, f"{state.kind}_{path.strip('/').replace('/', '_')}", None)
        if handle is None:
            return self.say({"detail": "Not Found"}, 404)
        asked = path in (
            "/v1/completions",
            "/inference/v1/generate",
            "/generate",
            "/completion",
            "/chat/completions",
        )
        scoring = (
            body.get("prompt_logprobs") == 0
            or body.get("logprob_start_len") == 0
            or "logprob_token_ids" in body
        )
        if asked and state.kind == "vllm" and body["model"] not in (MODEL, *state.adapters):
            return self.say(
                {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}},
                404,
            )
        if state.stuck and path.endswith("load_lora_adapter"):
            return self.wait(60)
        fault = state.faults.pop(0) if asked and not scoring and state.faults else {}
        return self.answer(handle, body, fault, asked and not scoring)

    def answer(self, handle, body, fault, asked):
        kind = fault.get("kind")
        if kind == "status":
            return self.say({"error": "no"}, fault["status"])
        if kind == "hang":
            return self.wait(fault["seconds"])
        if kind == "reset":
            self.close_connection = True
            return self.connection.close()
        answer = self.at_one_moment(handle, body, asked)
        if kind == "slow":
            time.sleep(fault["seconds"])
            kind = None
        if kind in ("endless", "queued"):  # it samples, or waits, until it is aborted
            self.until_aborted(body, answer, fault)
            kind = None
        if answer is None:
            return None
        if kind == "garbage":
            return self.say(None, raw=b'{"choices": [')
        if kind == "nan":
            return self.say(None, raw=json.dumps(self.broken(answer, "nan")).encode())
        if kind == "truncated":
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return self.connection.close()
        return self.say(self.broken(answer, kind) if kind else answer)

    def at_one_moment(self, handle, body, asked):
        """Handle a request; one for a reply (`asked`) not while the weights have no name, unless
        their client is gone."""
        end = time.monotonic() + (5 if asked else 0)
        while True:
            STATE.named.wait(max(0.0, end - time.monotonic()))
            with STATE.lock:
                if STATE.named.is_set() or time.monotonic() >= end:
                    return handle(body)

    def wait(self, seconds):
        """Say nothing, and notice when the client goes away."""
        import select

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.connection], [], [], 0.02)[0] and not self.connection.recv(1):
                STATE.seen.append({"path": "gone", "body": {}})
                break
        self.close_connection = True

    def until_aborted(self, body, answer, fault):
        """Cut the answer to three ids, or to none, when the request is aborted in time."""
        name, end = body.get("request_id") or body["rid"], time.monotonic() + fault["seconds"]
        while name not in STATE.aborted:
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        queued = fault["kind"] == "queued"
        if queued and STATE.kind == "sglang":
            STATE.miscounted.add(body.get("lora_path"))
        count = 0 if queued else 3
        row, spans = (
            (answer, answer.get("meta_info"))
            if STATE.kind == "sglang"
            else [answer["choices"][0]] * 2
        )
        spans["weight_versions"] = [{"version": STATE.name, "start": 0, "end": count}]
        ids = "output_ids" if STATE.kind == "sglang" else "token_ids"
        row[ids] = row[ids][:count]
        if STATE.kind == "sglang":
            message = "Abort in waiting queue" if queued else "Aborted"
            if queued:
                del spans["prompt_tokens"], spans["cached_tokens"]
            spans |= {"finish_reason": {"type": "abort", "message": message}}
            spans["output_token_logprobs"] = spans["output_token_logprobs"][:count]
        else:
            row["logprobs"]["content"] = row["logprobs"]["content"][:count]
            row["finish_reason"] = "abort"

    def broken(self, answer, kind):
        """The answer with one thing wrong, whatever the form that it has."""
        getattr(self, f"{STATE.kind}_broken")[kind](answer)
        return answer

    llamacpp_broken: ClassVar = {
        "echo": lambda a: a.update(tokens_evaluated=a["tokens_evaluated"] + 1),
        "no_logprobs": lambda a: a.pop("completion_probabilities"),
        "nan": lambda a: a["completion_probabilities"][0].update(logprob=math.nan),
        "finish": lambda a: a.update(stop_type="tired"),
        "count": lambda a: a["completion_probabilities"].append(
            a["completion_probabilities"][0] | {"id": 77}
        ),
        "long": lambda a: a["tokens"].extend([1] * 300),
        "drop": lambda a: a["completion_probabilities"].__delitem__(slice(1, None, 3)),
    }
    sglang_broken: ClassVar = {
        "no_likely": lambda a: a["meta_info"].pop("output_top_logprobs"),
        "twice_likely": lambda a: [
            row.append(row[0]) for row in a["meta_info"]["output_top_logprobs"]
        ],
        "echo": lambda a: a["meta_info"].update(prompt_tokens=a["meta_info"]["prompt_tokens"] + 1),
        "no_logprobs": lambda a: a["meta_info"].pop("output_token_logprobs"),
        "nan": lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, math.nan),
        "finish": lambda a: a["meta_info"].update(finish_reason={"type": "tired"}),
        "count": lambda a: a["meta_info"]["output_token_logprobs"].pop(),
        "long": lambda a: (
            a["output_ids"].extend([1] * 300),
            a["meta_info"]["output_token_logprobs"].extend([[-1.0, 1, None]] * 300),
        ),
        "version": lambda a: a["meta_info"].update(
            weight_version="another", weight_versions=[{"version": "another", "start": 0, "end": 1}]
        ),
    }
    vllm_broken: ClassVar = {
        "no_likely": lambda a: [row.pop("top_logprobs") for row in likely_rows(a)],
        "twice_likely": lambda a: [
            row["top_logprobs"].append(row["top_logprobs"][0]) for row in likely_rows(a)
        ],
        "echo": lambda a: (a if "prompt_token_ids" in a else a["choices"][0])[
            "prompt_token_ids"
        ].__setitem__(2, 1),
        "no_logprobs": lambda a: a["choices"][0].update(logprobs=None),
        "nan": lambda a: first_logprob(a, math.nan),
        "floor": lambda a: first_logprob(a, -9999.0),
        "finish": lambda a: a["choices"][0].update(finish_reason="tired"),
        "count": lambda a: next(iter(a["choices"][0]["logprobs"].values())).pop(),
        "long": lambda a: (
            a["choices"][0]["token_ids"].extend([1] * 300),
            a["choices"][0]["logprobs"]
            .get("content", [])
            .extend([{"token_id": 1, "logprob": -1.0}] * 300),
            a["choices"][0]["logprobs"].get("token_logprobs", []).extend([-1.0] * 300),
        ),
        "version": lambda a: a["choices"][0].update(
            weight_versions=[{"version": "another", "start": 0, "end": 1}]
        ),
    }

    # vLLM

    def vllm_v1_completions(self, body):
        prompt = body["prompt"]
        if body.get("seed") is not None:  # what a seed does to it on a CPU
            os._exit(1)
        scored = None
        if "logprob_token_ids" in body:
            (token,) = body["logprob_token_ids"]
            row = {f"token_id:{token}": STATE.scores([prompt[-1], token], body["model"])[0]}
            return {"choices": [{"index": 0, "logprobs": {"top_logprobs": [row]}}]}
        if body.get("prompt_logprobs") == 0:
            if body["model"] in STATE.adapters:  # as vLLM 0.32.0 on a CPU does beside other calls
                os._exit(1)
            scored = [None] + [
                {str(b): {"logprob": p}}
                for b, p in zip(prompt[1:], STATE.scores(prompt, body["model"]), strict=True)
            ]
        ids, logprobs, finish = self.sampled(prompt, body, body["model"])
        choice = {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "finish_reason": finish,
        }
        reported = {"token_logprobs": logprobs}
        if body.get("logprobs"):
            rows = self.beside_sampled(prompt, ids, logprobs, body, body["model"])
            reported["top_logprobs"] = [{f"token_id:{i}": p for i, p, _ in row} for row in rows]
        choice |= {"stop_reason": None, "logprobs": reported, "prompt_logprobs": scored}
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    def vllm_inference_v1_generate(self, body):
        if body["sampling_params"].get("seed") is not None:
            os._exit(1)
        prompt = body["token_ids"]
        if body.get("features") and not self.has_images(body["features"]):
            return self.say({"error": {"message": "Internal server error", "code": 500}}, 500)
        if body.get("content_parts"):  # it makes its own placeholders
            prompt = [token for one in prompt for token in [one] * (RUN if one == PAD else 1)]
        ids, logprobs, finish = self.sampled(prompt, body["sampling_params"], body["model"])
        content = [
            {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []}
            for i, p in zip(ids, logprobs, strict=True)
        ]
        sampling = body["sampling_params"]
        if sampling.get("logprobs"):
            rows = self.beside_sampled(prompt, ids, logprobs, sampling, body["model"])
            for entry, row in zip(content, rows, strict=True):
                entry["top_logprobs"] = [
                    {"token_id": i, "logprob": p, "rank": rank}
                    for i, p, rank in row[: sampling["logprobs"]]
                ]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": finish,
            "logprobs": {"content": content},
        }
        choice["weight_versions"] = [{"version": STATE.name, "start": 0, "end": len(ids)}]
        if os.environ.get("KIT_EXPERTS"):  # started with --enable-return-routed-experts
            choice["routed_experts"] = base64.b64encode(npy(experts([*prompt, *ids])[:-1])).decode()
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 16}}
        answer = {
            "request_id": body["request_id"],
            "prompt_token_ids": prompt,
            "choices": [choice],
            "usage": usage,
        }
        return answer | self.drafted(body["sampling_params"], len(ids))

    def has_images(self, features):
        """Whether all are there that are named alone; a server that keeps none ends
        itself at such a name."""
        room, kept = float(os.environ.get("KIT_KEEPS") or 0) * 2**30, STATE.images
        there = True
        for name, data in zip(
            features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True
        ):
            if data is None and not room:
                os._exit(1)
            if data is None and name not in kept:
                there = False
                continue
            size = kept.pop(name, 0)
            kept[name] = size if data is None else len(base64.b64decode(data))
            while sum(kept.values()) > room:
                kept.pop(next(iter(kept)))
        return there

    def drafted(self, sampling, count):
        """What vLLM tells of drafts: of each answer (`answers`), or of all
        together alone (`totals`)."""
        if not os.environ.get("KIT_DRAFTS"):
            return {}
        STATE.drafts["draft"] += 2 * count
        STATE.drafts["accepted"] += count // 2
        told = {
            "num_draft_tokens": 2 * count,
            "num_accepted_draft_tokens": count // 2,
            "acceptance_histogram": [1, 1],
        }
        return {
            "metrics": {
                "speculative_decoding": told if os.environ["KIT_DRAFTS"] == "answers" else None
            }
        }

    def vllm_v1_chat_completions_render(self, body):
        """As vLLM 0.32.0 packs what its processor made of an image (the pixels
        themselves left out)."""
        (part,) = body["messages"][0]["content"]
        assert part["image_url"]["url"].startswith("data:image/png;base64,")
        grid = {
            "data": ["int64", [3], msgpack.ExtType(3, b"")],
            "field": ["batched", {"keep_on_cpu": True}],
        }
        pixels = {
            "data": [os.environ["KIT_TAKES"], [16, 192], msgpack.ExtType(3, b"")],
            "field": ["flat", {}],
        }
        item = msgpack.packb({"image_grid_thw": grid, "pixel_values": pixels})
        return {
            "token_ids": [PAD],
            "features": {"kwargs_data": {"image": [base64.b64encode(item).decode()]}},
        }

    def sampled(self, prompt, sampling, model=None):
        banned = {int(token) for token in sampling.get("logit_bias") or {}}
        if STATE.kind == "vllm" and os.environ.get("KIT_DRAFTS"):
            assert not banned  # "not yet supported with speculative decoding"
            banned = set(range(IDS)) - set(sampling.get("allowed_token_ids") or range(IDS))
        stops = set(sampling.get("stop_token_ids") or ())
        most = sampling.get("max_tokens", sampling.get("max_new_tokens", 16))
        return STATE.sample(prompt, most, sampling["temperature"], banned, stops, model)

    def likeliest(self, prompt, ids, sampling, most, model=None):
        banned = {int(token) for token in sampling.get("logit_bias") or {}}
        return STATE.likeliest(prompt, ids, most, sampling["temperature"], banned, model)

    def beside_sampled(self, prompt, ids, logprobs, sampling, model):
        """As vLLM has them: the sampled id first, then the others of the most likely ones, each
        with its rank."""
        most = sampling["logprobs"]
        every = self.likeliest(prompt, ids, sampling, IDS, model)
        for id_, logprob, ranked in zip(ids, logprobs, every, strict=True):
            ranks = {other: rank for rank, (other, _) in enumerate(ranked, 1)}
            others = [(other, p) for other, p in ranked[:most] if other != id_]
            yield [(i, p, ranks[i]) for i, p in [(id_, logprob), *others]]

    def vllm_pause(self, body):
        STATE.paused = True
        return {"status": "paused"}

    def vllm_resume(self, body):
        STATE.paused = False
        STATE.named.set()
        return {"status": "resumed"}

    def vllm_sleep(self, body):
        STATE.paused, STATE.gone = True, {"weights", "kv_cache"}
        return {"status": "sleeping"}

    def vllm_wake_up(self, body):
        STATE.gone.discard(self.path.rpartition("tags=")[2])
        STATE.paused = bool(STATE.gone)
        return {"status": "sleeping" if STATE.gone else "awake"}

    def vllm_reset_prefix_cache(self, body):
        return self.say(None, raw=b"")

    def vllm_v1_load_lora_adapter(self, body):
        self.adapt(body)
        return self.say(None, raw=b"Success: LoRA adapter added.")

    def adapt(self, body):
        """One of weights of the tests' own answers by them, others as the model itself (or
        `KIT_DEAF`, whatever it is sent)."""
        weights = Path(body["lora_path"]) / "adapter_model.safetensors"
        if body["lora_path"] != "lost":
            known = weights.exists() and not os.environ.get("KIT_DEAF")
            STATE.adapters[body["lora_name"]] = (
                table(read_weights(weights)) if known else STATE.rows
            )

    def vllm_v1_unload_lora_adapter(self, body):
        if STATE.adapters.pop(body["lora_name"], None) is None:
            return self.say({"error": {"message": "not found", "code": 404}}, 404)
        return self.say(None, raw=b"Success: LoRA adapter removed.")

    def vllm_collective_rpc(self, body):
        assert body["method"] == "reload_weights"
        assert STATE.paused
        if "weights" in STATE.gone:
            os._exit(1)
        STATE.rows = table(read_weights(body["kwargs"]["weights_path"]))
        STATE.named.clear()
        return {"results": [None]}

    def vllm_update_weight_version(self, body):
        STATE.name = body["new_version"]
        STATE.named.set()
        return {"success": True}

    def vllm_abort_requests(self, body):
        return {"status": "aborted"}

    def vllm_inference_v1_abort_requests(self, body):
        STATE.aborted |= set(body["request_ids"])
        return {}

    # SGLang

    def sglang_generate(self, body):
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if body.get("lora_path") not in (None, *STATE.adapters):
            what = (
                f"Got LoRA adapter that has never been loaded: {body['lora_path']}\nAll loaded "
                "adapters: dict_keys([])."
            )
            return self.say({"error": {"message": what}}, 400)
        ids, logprobs, finish = self.sampled(prompt, sampling, body.get("lora_path"))
        meta = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(prompt),
            "cached_tokens": 4,
            "weight_version": STATE.name,
            "weight_versions": [{"version": STATE.name, "start": 0, "end": len(ids)}],
        }
        if body.get("return_routed_experts"):
            rows = experts([*prompt, *ids])[body["routed_experts_start_len"] : -1]
            flat = [number for row in rows for number in row]
            meta["routed_experts"] = base64.b64encode(struct.pack(f"<{len(flat)}i", *flat)).decode()
        if os.environ.get("KIT_DRAFTS"):
            meta |= {
                "spec_num_proposed_drafts": 2 * len(ids),
                "spec_num_correct_drafts": len(ids) // 2,
                "spec_verify_ct": 1,
            }
        meta["output_token_logprobs"] = [[p, i, None] for i, p in zip(ids, logprobs, strict=True)]
        if body.get("top_logprobs_num"):
            rows = self.likeliest(
                prompt, ids, sampling, body["top_logprobs_num"], body.get("lora_path")
            )
            meta["output_top_logprobs"] = [[[p, i, None] for i, p in row] for row in rows]
        if body.get("logprob_start_len") == 0:
            scores = [None, *STATE.scores(prompt, body.get("lora_path"))]
            named = [i if i < IDS - 1 else 0 for i in prompt]  # as SGLang 0.5.19 does
            meta["input_token_logprobs"] = [
                [p, i, None] for i, p in zip(named, scores, strict=True)
            ]
        return {"output_ids": ids, "meta_info": meta}

    def sglang_load_lora_adapter(self, body):
        if body["lora_name"] in STATE.adapters:
            what = f"Failed to load LoRA adapter {body['lora_name']} because it is already loaded"
            return self.say({"success": False, "error_message": what}, 400)
        self.adapt(body)
        return {
            "success": True,
            "error_message": "",
            "loaded_adapters": dict.fromkeys(STATE.adapters, ""),
        }

    def sglang_unload_lora_adapter(self, body):
        if body["lora_name"] in STATE.miscounted:
            STATE.stuck = True
        found = STATE.adapters.pop(body["lora_name"], None) is not None
        return self.say({"success": found}, 200 if found else 400)

    def sglang_abort_request(self, body):
        STATE.aborted.add(body["rid"])
        return {}

    def sglang_pause_generation(self, body):
        STATE.paused = True
        return {}

    def sglang_continue_generation(self, body):
        STATE.paused = False
        return {}

    def sglang_flush_cache(self, body):
        return self.say(None, raw=b"Cache flushed.\n")

    def sglang_update_weight_version(self, body):
        STATE.name = body["new_version"]
        return {"success": True}

    def sglang_release_memory_occupation(self, body):
        if STATE.gone or not STATE.paused:  # it asserts that it is idle
            os._exit(1)
        STATE.gone = set(body["tags"])
        return self.say(None, raw=b"null")

    def sglang_resume_memory_occupation(self, body):
        for part in body["tags"]:
            if part not in STATE.gone:  # a KeyError in its scheduler
                os._exit(1)
            STATE.gone.discard(part)
        return self.say(None, raw=b"null")

    def sglang_update_weights_from_disk(self, body):
        if "weights" in STATE.gone:
            os._exit(1)
        STATE.rows, STATE.name = table(read_weights(body["model_path"])), body["weight_version"]
        return {"success": True, "message": ""}

    # llama.cpp

    def llamacpp_completion(self, body):
        prompt = body["prompt"]
        banned = {token for token, _ in body.get("logit_bias", ())}
        behind = body["post_sampling_probs"]
        ids, logprobs, finish = STATE.sample(
            prompt, body["n_predict"], body["temperature"], banned, {END}
        )
        if not behind:
            logprobs = [STATE.rows[a][b] for a, b in zip([prompt[-1], *ids], ids, strict=False)]
        entry = (lambda p: {"prob": math.exp(p)}) if behind else (lambda p: {"logprob": p})
        rows = [{"id": i} | entry(p) for i, p in zip(ids, logprobs, strict=True)]
        if body["n_probs"] > 1:
            best = sorted(range(IDS), key=STATE.rows[prompt[-1]].__getitem__)[-8:]
            rows[0]["top_logprobs"] = [
                {"id": i, "logprob": STATE.rows[prompt[-1]][i]} for i in best
            ]
        answer = {
            "tokens": ids,
            "stop_type": {"stop": "eos", "length": "limit"}[finish],
            "completion_probabilities": rows,
        }
        return answer | {"tokens_evaluated": len(prompt), "truncated": False}

    # chat

    def chat_chat_completions(self, body):
        return {
            "choices": [{"message": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}]
        }


def first_logprob(answer, value) -> None:
    rows = answer["choices"][0]["logprobs"]
    if "content" in rows:
        rows["content"][0]["logprob"] = value
    else:
        rows["token_logprobs"][0] = value


def likely_rows(answer) -> list:
    """What holds `top_logprobs`: each position, or the logprobs of all."""
    rows = answer["choices"][0]["logprobs"]
    return rows.get("content") or [rows]


def read_weights(directory) -> int:
    """The seed of the table that a directory of weights holds, or a file of them."""
    path = Path(directory)
    raw = (path / "model.safetensors" if path.is_dir() else path).read_bytes()
    header = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + header])["seed"]["data_offsets"]
    return int(struct.unpack("<f", raw[8 + header + begin : 8 + header + end])[0])


class Server:
    """One server process, started anew on the same port as often as wanted."""

    count = itertools.count()

    def __init__(self, kind: str, weights: int = 1, **env: str) -> None:
        self.kind, self.weights, self.env, self.port = kind, weights, env, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, __file__, self.kind, str(self.weights), str(self.port)]
        draws = str(next(self.count))  # no two processes draw alike
        env = os.environ | self.env | {"PYTHONPATH": os.pathsep.join(sys.path), "KIT_DRAWS": draws}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def fault(self, kind: str, times: int = 1, **more) -> None:
        import httpx2  # not in the server: it would take its time to start

        httpx2.post(
            f"{self.url}/fault", json={"kind": kind, "times": times} | more
        ).raise_for_status()

    def seen(self, path: str | None = None) -> list[dict]:
        import httpx2

        return [
            row
            for row in httpx2.get(f"{self.url}/seen").json()
            if path in (None, row["path"].split("?")[0])
        ]


@contextmanager
def servers(*kinds: str, **env: str):
    """Server processes, killed at the end."""
    running = [Server(kind, **env) for kind in kinds]
    try:
        yield running if len(running) > 1 else running[0]
    finally:
        for server in running:
            if server.process.poll() is None:
                server.signal(signal.SIGCONT)
                server.kill()


def run(work):
    return asyncio.run(work)


if __name__ == "__main__":
    STATE = State(sys.argv[1], int(sys.argv[2]))
    ThreadingHTTPServer.request_queue_size = 256
    web = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Handler)
    web.daemon_threads = True
    print(web.server_address[1], flush=True)
    web.serve_forever()
