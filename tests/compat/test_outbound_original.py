"""Our rollouts inside the trainers' own packages, as far as they run without
GPUs. `make test-compat`."""

import asyncio
import json
import sys
import threading
import typing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typing_extensions
from kit import originals
from kit.outbound import LIMITS, Letters, Server, check_row, forks, make_model, run
from transformers import AutoTokenizer

import turnwright as tw

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module", autouse=True)
def packages():
    """On Python 3.11 pydantic wants the other TypedDict.

    Integrations that were imported before have bases of ours.
    """
    originals.use()
    typing.TypedDict = typing_extensions.TypedDict
    for name in [one for one in sys.modules if one.startswith("turnwright_compat.")]:
        if not name.endswith(".episodes"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


class HttpServer:
    """A server for clients that speak over a socket: answers a path with a
    coroutine over the model."""

    def __init__(self, answer):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(
                    self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"
                )
                work = answer(self.path, body, self.headers)
                found = json.dumps(
                    asyncio.run_coroutine_threadsafe(work, outer.loop).result()
                ).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(found)))
                self.end_headers()
                self.wfile.write(found)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.port = self.server.server_address[1]

    def close(self):
        self.server.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


def write_parquet(rows, path):
    from datasets import Dataset

    Dataset.from_list(rows).to_parquet(path)
    return str(path)


# SkyRL


def skyrl_output(path, folder, play, samples=2, **generator):
    """SkyRL's own configuration, dataset, engine client over a socket, and batch,
    around our generator."""
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import (
        get_sampling_params_for_backend,
    )
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.dataset import PromptDataset
    from skyrl.train.generators.utils import prepare_generator_input

    from turnwright_compat.skyrl.rollout import TurnwrightGenerator

    model, sessions = Server(path), []

    async def answer(url, body, headers):
        if url.startswith("/finish_session"):
            sessions.append(url)
            return {}
        assert url == "/inference/v1/generate"
        params = body["sampling_params"]
        found = await model.sample(
            headers["X-Session-ID"],
            body["token_ids"],
            params["max_tokens"],
            params["stop_token_ids"],
            params["temperature"],
            params.get("stop") or (),
        )
        ids, logprobs, finish = found
        content = [{"logprob": one} for one in logprobs]
        return {
            "choices": [
                {"token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}
            ]
        }

    server = HttpServer(answer)
    tokenizer = AutoTokenizer.from_pretrained(path)
    given = {
        "max_turns": 2,
        "max_input_length": 256,
        "sampling_params.max_generate_length": 12,
        **generator,
    }
    cfg = SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={path}",
            *(f"generator.{name}={value}" for name, value in given.items()),
        ]
    )
    client = RemoteInferenceClient(
        proxy_url=f"http://127.0.0.1:{server.port}",
        server_urls=[f"http://127.0.0.1:{server.port}"],
        data_parallel_size=1,
        model_name=str(path),
        tokenizer=tokenizer,
    )
    data = PromptDataset(
        write_parquet(play.rows(), folder / "train.parquet"), tokenizer, 256, num_workers=1
    )
    items = [data[number] for number in range(len(data))]
    rows = [
        dict(zip(("prompt", "env_class", "env_extras", "uid"), item, strict=True)) for item in items
    ]
    sampling = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    batch, _ = prepare_generator_input(rows, samples, sampling, "turnwright", "train", 5)
    found = TurnwrightGenerator(play, cfg, tokenizer, client)

    async def work():
        try:
            return await found.generate(batch)
        finally:
            await client.teardown()

    try:
        return run(work()), model, batch, tokenizer, sessions
    finally:
        server.close()


def test_skyrl_accepts_and_trains_what_its_engine_sampled(path, tmp_path):
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from skyrl.train.generators.base import GeneratorInterface
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from turnwright_compat.skyrl.rollout import SkyRLEpisodes, TurnwrightGenerator

    assert issubclass(TurnwrightGenerator, GeneratorInterface)
    play = SkyRLEpisodes(Letters, n_tasks=3, limits=LIMITS)
    output, model, batch, tokenizer, sessions = skyrl_output(path, tmp_path, play)
    validate_generator_output(len(batch["prompts"]), output)
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    for columns in zip(*(output[name] for name in names), strict=True):
        assert len(check_row(model.calls, *columns)) == 2
    assert len(sessions) == 6
    arguments = (
        output[name]
        for name in (
            "prompt_token_ids",
            "response_ids",
            "rewards",
            "loss_masks",
            "rollout_logprobs",
        )
    )
    tensors = convert_prompts_responses_to_batch_tensors(tokenizer, *arguments)
    ids, mask, rewards = tensors[0], tensors[4], tensors[3]
    trained = sum(len(call[2]) for call in model.calls.found)
    assert int(mask.sum()) == trained
    assert float(rewards.sum()) == pytest.approx(sum(one.reward for one in play.last), rel=1e-5)
    for number, (prompt, response) in enumerate(
        zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    ):
        assert ids[number, -len(prompt) - len(response) :].tolist() == [*prompt, *response]
    print(f"skyrl: {len(batch['prompts'])} episodes, {trained} sampled ids, all trained once")


def test_skyrl_takes_the_rows_of_an_episode_as_steps(path, tmp_path):
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from turnwright_compat.skyrl.rollout import SkyRLEpisodes

    play = SkyRLEpisodes(forks, [tw.Task("Write.", id=str(n)) for n in range(2)], limits=LIMITS)
    output, model, batch, _, _ = skyrl_output(path, tmp_path, play, step_wise_trajectories=True)
    validate_generator_output(len(batch["prompts"]), output, step_wise=True)
    assert output["is_last_step"] == [False, True] * 4
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    for columns in zip(*(output[name] for name in names), strict=True):
        check_row(model.calls, *columns)


# verl


def verl_batch(path, folder, play, server, loops, **overrides):
    """verl's own configuration, dataset and AgentLoopWorker around our loop."""
    import verl
    from hydra import compose, initialize_config_dir
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.protocol import DataProto
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
    from verl.workers.rollout.replica import TokenOutput

    class Client:
        async def generate(
            self, request_id, *, prompt_ids, sampling_params, image_data=None, **kwargs
        ):
            params = sampling_params
            ids, logprobs, _ = await server.sample(
                request_id,
                prompt_ids,
                params["max_tokens"],
                params["stop_token_ids"],
                params["temperature"],
            )
            fields = {"global_steps": 4, "min_global_steps": 4, "max_global_steps": 4}
            return TokenOutput(
                token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=fields
            )

    (folder / "loops.yaml").write_text(json.dumps(loops))
    train = write_parquet(play.rows(), folder / "train.parquet")
    given = {
        "actor_rollout_ref.model.path": path,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": folder / "loops.yaml",
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        **overrides,
    }
    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer/config"), version_base=None
    ):
        cfg = compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in given.items()])
    worker = AgentLoopWorker(cfg, Client())
    data = RLHFDataset(train, worker.tokenizer, cfg.data, worker.processor)
    batch = DataProto.from_single_dict(
        collate_fn([data[number] for number in range(len(data)) for _ in range(2)])
    )
    batch.meta_info["global_steps"] = 4
    return run(worker.generate_sequences(batch))


def test_verl_worker_pads_and_trains_what_its_servers_sampled(path, tmp_path):
    from turnwright_compat.verl.rollout import VerlEpisodes, _shared

    settings = {
        "env": "hop",
        "n_tasks": 3,
        "seed": 1,
        "limits": {"turns": 3, "turn_tokens": 12, "on_turn_length": "continue"},
    }
    loops = [
        {
            "name": "turnwright",
            "_target_": "turnwright_compat.verl.rollout.TurnwrightAgentLoop",
            **settings,
        }
    ]
    server = Server(path)
    lengths = {"data.max_prompt_length": 512, "data.max_response_length": 256}
    found = verl_batch(
        path, tmp_path, VerlEpisodes("hop", n_tasks=3, seed=1), server, loops, **lengths
    )
    batch, (play,) = found.batch, [_shared(json.dumps(settings, sort_keys=True))]
    assert tuple(batch["prompts"].shape) == (6, 512)
    assert tuple(batch["responses"].shape) == (6, 256)
    trained = 0
    for number in range(6):
        prompt = batch["prompts"][number][batch["attention_mask"][number][:512].bool()].tolist()
        length = int(batch["attention_mask"][number][512:].sum())
        columns = (batch[name][number, :length].tolist() for name in ("responses", "response_mask"))
        response, mask = columns
        logprobs = batch["rollout_log_probs"][number, :length]
        ids = [*prompt, *response]
        calls = server.calls.of(ids)
        assert len(calls) >= 1
        expected, sampled = [0] * len(ids), [0.0] * len(ids)
        for _, context, reply, values in calls:
            expected[len(context) : len(context) + len(reply)] = [1] * len(reply)
            sampled[len(context) : len(context) + len(reply)] = values
        assert mask == expected[len(prompt) :]
        assert logprobs.tolist() == pytest.approx(sampled[len(prompt) :], abs=1e-6)
        assert not batch["response_mask"][number, length:].any()
        score = batch["rm_scores"][number]
        assert float(score.sum()) == float(score[length - 1])
        trained += sum(mask)
    assert trained == sum(len(call[2]) for call in server.calls.found)
    assert len(play.tasks) == 3
    assert list(found.non_tensor_batch["min_global_steps"]) == [4] * 6
    print(f"verl: 6 episodes, {trained} sampled ids, all trained once")


# ms-swift


def swift_engine(path, server, template_type="chatml"):
    """ms-swift's engine as its schedulers call it: its own template, a model of ours."""
    from swift.infer_engine.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
        UsageInfo,
    )
    from swift.model import get_model_processor
    from swift.template import get_template

    _, tokenizer = get_model_processor(str(path), load_model=False, model_type="qwen3")
    template = get_template(tokenizer, template_type=template_type, default_system=None)
    # ms-swift closes a reply with that one alone.
    server.banned |= server.renderer.stop_ids - {tokenizer.eos_token_id}

    class Engine:
        def __init__(self):
            self.template, self.tokenizer, self.model_dir, self.requests = (
                template,
                tokenizer,
                str(path),
                [],
            )

        async def infer_async(self, infer_request, request_config, **kwargs):
            self.requests.append(infer_request)
            self.template.set_mode("vllm")
            ids = self.template.encode(infer_request)["input_ids"]
            session = infer_request.uuid
            found, logprobs, finish = await server.sample(
                session,
                ids,
                request_config.max_tokens,
                server.renderer.stop_ids,
                1.0,
                request_config.stop or (),
            )
            text = self.tokenizer.decode(found, skip_special_tokens=True)
            content = [{"logprob": one} for one in logprobs]
            choice = ChatCompletionResponseChoice(
                0, ChatMessage("assistant", text), finish, {"content": content}, found
            )
            return ChatCompletionResponse("m", [choice], UsageInfo(0, 0, 0), prompt_token_ids=ids)

    return Engine()


def swift_outputs(engine, play, rows, **given):
    from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest

    from turnwright_compat.swift.rollout import make_scheduler

    scheduler = make_scheduler(play)(infer_engine=engine, max_turns=2)
    config = RequestConfig(max_tokens=600, temperature=1.0, **given)

    def request(number, row):
        data = {key: value for key, value in row.items() if key != "messages"}
        return RolloutInferRequest(messages=row["messages"], data_dict=data, uuid=str(number))

    async def work():
        return await asyncio.gather(
            *(scheduler.run(request(number, row), config) for number, row in enumerate(rows))
        )

    return run(work())


def test_swift_trains_what_its_engine_sampled(path):
    from swift.rl_core.data import OnPolicySample
    from swift.rollout.multi_turn import MultiTurnScheduler

    from turnwright_compat.swift.rollout import SwiftEpisodes, make_scheduler

    server, play = Server(path), SwiftEpisodes(Letters, n_tasks=8)
    assert issubclass(make_scheduler(play), MultiTurnScheduler)
    engine, trained, turns = swift_engine(path, server), 0, []
    rows = [row for row in play.rows() for _ in range(2)]
    for output in swift_outputs(engine, play, rows):
        sample = OnPolicySample(
            messages=output.messages,
            response_token_ids=output.response_token_ids,
            response_loss_mask=output.response_loss_mask,
            rollout_logprobs=output.rollout_logprobs,
        )
        engine.template.set_mode("train")
        encoded = encode(sample, engine.template)
        ids, labels = encoded["input_ids"], encoded["labels"]
        mask = [int(label != -100) for label in labels]
        first = mask.index(1)
        logprobs = iter([one for turn in output.rollout_logprobs for one in turn])
        aligned = [next(logprobs) if one else 0.0 for one in mask[first:]]
        turns.append(len(check_row(server.calls, ids[:first], ids[first:], mask[first:], aligned)))
        assert next(logprobs, None) is None
        assert (0 in mask[first:]) == (turns[-1] == 2)
        assert output.rollout_infos["total_reward"] == output.rollout_infos["turnwright_reward"]
        assert (
            output.model_validate_json(output.model_dump_json()).response_token_ids
            == output.response_token_ids
        )
        trained += sum(mask)
    assert trained == sum(len(call[2]) for call in server.calls.found)
    assert turns.count(2) > 4
    print(
        f"ms-swift: {len(rows)} episodes, {turns.count(2)} of two turns, {trained} sampled ids, "
        "all trained once"
    )


def encode(sample, template):
    """Encode a sample as ms-swift's trainer does; the module around its function needs
    packages with kernels."""
    import ast
    import inspect

    import swift.rlhf_trainers
    from swift.template import StdTemplateInputs

    source = Path(inspect.getfile(swift.rlhf_trainers)).parent / "utils.py"
    names = ("get_response_prefix_ids", "encode_sample", "replace_assistant_response_with_ids")
    found = [
        node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") in names
    ]
    scope = {"StdTemplateInputs": StdTemplateInputs, **vars(typing)}
    code = "from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in found)
    exec(compile(code, str(source), "exec"), scope)
    return scope["encode_sample"](sample, template)


def test_swift_would_train_the_end_token_of_a_reply_that_was_cut(path):
    from turnwright.errors import UsageError
    from turnwright_compat.swift.rollout import SwiftEpisodes

    play = SwiftEpisodes(Letters, n_tasks=1, limits=LIMITS)
    with pytest.raises(
        UsageError, match=r'a reply without an end token.*limits.on_turn_length = "stop"'
    ):
        swift_outputs(swift_engine(path, Server(path)), play, play.rows())


def test_swift_another_template_is_refused(path):
    from turnwright.errors import EngineError
    from turnwright_compat.swift.rollout import SwiftEpisodes

    play = SwiftEpisodes(Letters, n_tasks=1, limits=LIMITS)
    engine = swift_engine(path, Server(path), "dummy")
    with pytest.raises(
        EngineError, match=r"ms-swift's template renders \d+ ids.*differ from id \d+ on.*--template"
    ):
        swift_outputs(engine, play, play.rows())
