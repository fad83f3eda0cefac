"""SkyRL-Gym's own environments, unedited: our episodes against those of SkyRL's own
generator. `make test-compat`."""

import asyncio
import http.server
import json
import sqlite3
import textwrap
import threading
import typing
from types import SimpleNamespace

import pytest
import test_skyrl_conventions as conventions
import typing_extensions
from kit import originals
from kit.rollouts import bpe, renderer
from kit.stand_ins import USERS
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.envs.resolve import as_env_spec, load_object
from turnwright.renderers import CHATML
from turnwright_compat.skyrl.adapter import FRAMEWORK

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def skyrl():
    """The generator and its configuration; on Python 3.11 pydantic wants the other TypedDict."""
    originals.use()
    typing.TypedDict = typing_extensions.TypedDict
    from skyrl.train.config.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

    found = GeneratorConfig, SamplingParams, SkyRLGymConfig, SkyRLGymGenerator
    return SimpleNamespace(**{one.__name__: one for one in found})


@pytest.fixture(scope="module")
def tokenizer():
    """Our tokenizer as one of transformers."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe(), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    made.chat_template = CHATML
    return made


class Client:
    """Answers SkyRL's generator with the replies of a script, and keeps the contexts."""

    def __init__(self, replies, stop, encode=None):
        self.replies, self.stop, self.contexts = list(replies), stop, []
        self.encode = encode or renderer("bpe").encode_reply

    async def generate(self, batch, model=None):
        (ids,) = batch["prompt_token_ids"]
        self.contexts.append(list(ids))
        text = self.replies[len(self.contexts) - 1]
        found = self.encode(text)
        ended = any(text.endswith(one) for one in self.stop)
        reply = found[:-1] if ended else found
        return {
            "responses": [text],
            "response_ids": [reply],
            "stop_reasons": ["stop"],
            "response_logprobs": [[0.0] * len(reply)],
        }

    async def finish_session(self, session):
        pass


def theirs(
    skyrl,
    tokenizer,
    name,
    row,
    replies,
    *,
    turns,
    stop=(),
    inline=False,
    settings=None,
    config=None,
):
    sampling = skyrl.SamplingParams(stop=list(stop) or None)
    generation = skyrl.GeneratorConfig(
        max_turns=turns,
        max_input_length=4096,
        sampling_params=sampling,
        use_conversation_multi_turn=not inline,
    )
    client = Client(replies, stop)
    gym = skyrl.SkyRLGymConfig()
    if config is not None:
        setattr(gym, name, config)
    for key, value in (settings or {}).items():
        setattr(getattr(gym, name), key, value)
    generator = skyrl.SkyRLGymGenerator(generation, gym, client, tokenizer)
    prompt = [{"role": "user", "content": "Go."}]
    out = asyncio.run(generator.agent_loop(prompt, name, dict(row), 1024, 4096))
    return out, client.contexts


def ours(name, row, replies, *, turns, stop=(), inline=False, settings=None):
    made = as_env_spec(FRAMEWORK.find(name), where=f"skyrl:{name}", args=settings or {})
    engine = tw.ScriptedEngine(list(replies))
    (found,) = tw.rollout(
        made.factory,
        [tw.Task("Go.", info=row)],
        engine,
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=turns, turn_tokens=1024),
        stop=list(stop),
        history="inline" if inline else "append",
    )
    assert found.error is None, found.error
    (sample,) = found.samples()
    return found, sample


def compare(skyrl, tokenizer, *args, appended=(), config=None, **kwargs):
    """Compare ids, mask, contexts and rewards; `appended`: the end token that SkyRL puts behind the
    last reply; `config`: settings of an environment of the user's, an object in SkyRL.
    """
    out, contexts = theirs(skyrl, tokenizer, *args, config=config, **kwargs)
    found, sample = ours(*args, **kwargs)
    opening = found.turns[0].context
    assert [found.prompt_ids(n) for n in range(len(found.turns))] == contexts
    assert out.prompt_ids == sample.ids[:opening]
    tail = len(appended)
    assert out.response_ids[len(out.response_ids) - tail :] == list(appended)
    assert out.response_ids[: len(out.response_ids) - tail] == sample.ids[opening:]
    assert out.loss_mask[: len(out.loss_mask) - tail] == sample.mask[opening:]
    assert sum(out.reward) == pytest.approx(found.reward)
    rewards = list(out.reward)
    if tail:  # the reward stands on the appended token, here on the last sampled one
        rewards = [*rewards[: -tail - 1], rewards[-tail - 1] + sum(rewards[-tail:])]
    token_rewards = [0.0] * len(rewards)
    for turn in found.turns:
        token_rewards[found.spans[turn.spans[-1]].end - 1 - opening] += turn.reward
    assert found.turns
    assert rewards == pytest.approx(token_rewards)
    return found, out


def truth(value, **row):
    return {"reward_spec": {"method": "rule", "ground_truth": value}, **row}


def test_gsm8k(skyrl, tokenizer):
    found, _ = compare(skyrl, tokenizer, "gsm8k", truth("12"), ["so #### 12"], turns=1)
    assert found.reward == 1.0
    assert compare(skyrl, tokenizer, "gsm8k", truth("12"), ["no idea"], turns=1)[0].reward == 0.0


def test_gsm8k_in_several_turns(skyrl, tokenizer):
    replies = ["is it #### 3", "or no number", "it is #### 7"]
    found, _ = compare(
        skyrl, tokenizer, "gsm8k_multi_turn", truth("7", extra_info={}), replies, turns=5
    )
    assert len(found.turns) == 3
    found, _ = compare(
        skyrl, tokenizer, "gsm8k_multi_turn", truth("8", extra_info={}), replies, turns=3
    )
    assert found.reward == pytest.approx(2 * 0.2 / 3)
    assert found.metrics["environment/steps"] == 3


class Retriever(http.server.BaseHTTPRequestHandler):
    """A retrieval service as the search environment calls it."""

    def do_POST(self):
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        document = {"document": {"contents": f'"{query}"\nIt comes from the Baltic.'}, "score": 1.0}
        body = json.dumps({"result": [[document]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def retriever():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("inline", [False, True])
def test_search(skyrl, tokenizer, retriever, inline):
    replies = [
        "I look. <search>amber</search>",
        "<search>more</search>",
        "So <answer>the Baltic</answer>",
    ]
    settings = {"search_url": retriever, "topk": 1}
    end = (tokenizer.eos_token_id,)
    found, out = compare(
        skyrl,
        tokenizer,
        "search",
        truth({"target": ["the Baltic"]}),
        replies,
        turns=4,
        stop=["</search>", "</answer>"],
        settings=settings,
        inline=inline,
        appended=end,
    )
    assert found.reward == 1.0
    assert len(found.turns) == 3
    # In one message SkyRL trains the end token that it wrote itself.
    assert out.loss_mask[-1] == int(inline)


def test_sql(skyrl, tokenizer, tmp_path):
    folder = tmp_path / "spider/database/shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as connection:
        connection.executescript("create table sold(n int); insert into sold values (3), (4);")
    row = truth("select sum(n) from sold", db_id="shop", data="spider")
    replies = [
        "<think>a</think><sql>select n from sold where n = 4</sql>",
        "<think>b</think><solution>select sum(n) from sold</solution>",
    ]
    stop = ["</sql>", "</solution>"]
    end = (tokenizer.eos_token_id,)
    found, _ = compare(
        skyrl,
        tokenizer,
        "text2sql",
        row,
        replies,
        turns=5,
        stop=stop,
        settings={"db_path": str(tmp_path)},
        appended=end,
    )
    assert len(found.turns) == 2


@pytest.fixture(scope="module")
def registered(skyrl):
    """Returns the id under which SkyRL-Gym's own registry has a class of a user file."""
    import skyrl_gym

    def add(use):
        made, name = load_object(use, base=USERS / "skyrl"), f"users_{use.partition('.')[0]}"
        assert issubclass(made, skyrl_gym.Env)
        if name not in skyrl_gym.registry:
            skyrl_gym.register(id=name, entry_point=made)
        return name

    return add


@pytest.mark.parametrize(
    ("use", "row", "replies", "reward"),
    [
        ("digits.py:DigitsEnv", truth("12"), ["so #### 12"], 1.0),
        ("guess.py:GuessEnv", truth("7"), ["5", "9", "7"], 1.0 + 0.2 / 4),
        ("guess.py:GuessEnv", truth("7"), ["5", "none", "9", "6"], 0.3 / 4),
        ("interview.py:InterviewEnv", {"questions": ["Why?", "How?"]}, ["a", "b", "c"], 1.5),
        ("multiply.py:MultiplyEnv", truth("42"), ["6 * 7", "\\boxed{41}", "\\boxed{42}"], 1.0),
        ("multiply.py:MultiplyEnv", truth("42"), ["\\boxed{41}"] * 4, 0.5),
    ],
)
def test_user_files(skyrl, tokenizer, registered, use, row, replies, reward):
    """The user files of the tests with stand-ins, now of SkyRL-Gym's own base class."""
    found, _ = compare(skyrl, tokenizer, registered(use), row, replies, turns=4)
    assert found.reward == pytest.approx(reward)
    assert len(found.turns) == len(replies)


def test_a_user_file_with_tools_and_stop_texts(skyrl, tokenizer, registered):
    name = registered("lookup.py:LookupEnv")
    replies = ["<search>amber</search>", "<search>nil</search>", "<answer>the Baltic</answer>"]
    row = truth({"target": "the Baltic"})
    config = load_object("lookup.py:LookupConfig", base=USERS / "skyrl")
    kwargs = {"turns": 4, "stop": ["</search>", "</answer>"], "appended": (tokenizer.eos_token_id,)}
    found, _ = compare(skyrl, tokenizer, name, row, replies, config=config(), **kwargs)
    assert found.reward == 1.0
    assert len(found.turns) == 3


def test_a_user_file_with_a_database(skyrl, tokenizer, registered, tmp_path):
    (tmp_path / "spider").mkdir()
    with sqlite3.connect(tmp_path / "spider/shop.sqlite") as connection:
        connection.executescript("create table sold(n int); insert into sold values (3), (4);")
    name, row = registered("ledger.py:LedgerEnv"), truth("7", db_id="shop", data="spider")
    replies = [
        "<sql>select sum(n) from sold</sql>",
        "<sql>nonsense</sql>",
        "<solution>7</solution>",
    ]
    settings = {"db_path": str(tmp_path)}
    found, _ = compare(
        skyrl,
        tokenizer,
        name,
        row,
        replies,
        turns=4,
        config=SimpleNamespace(**settings),
        settings=settings,
    )
    assert found.reward == 1.0


@pytest.mark.parametrize(
    ("name", "reward"), [("turnwright_echo", 1.0), ("turnwright_echo_bonus", 1.5)]
)
def test_a_user_file_that_registers_its_environments(skyrl, tokenizer, registered, name, reward):
    registered("registered.py:EchoEnv")
    found, _ = compare(skyrl, tokenizer, name, {"word": "amber"}, ["so amber"], turns=1)
    assert found.reward == reward


def test_a_user_file_that_changes_the_action(skyrl, tokenizer, registered):
    """On purpose: SkyRL trains the changed text, encoded again; we keep what was sampled.

    Everything else is equal.
    """
    name, replies = registered("trim.py:TrimEnv"), ["<think>a</think> and more", "stop"]
    out, contexts = theirs(skyrl, tokenizer, name, {}, replies, turns=3)
    found, sample = ours(name, {}, replies, turns=3)
    opening = found.turns[0].context
    assert contexts[0] == found.prompt_ids(0)
    header = "<|im_start|>assistant\n"
    assert renderer("bpe").decode(out.response_ids) == f"<think>a</think>{header}stop"
    assert (
        renderer("bpe").decode(sample.ids[opening:])
        == f"{replies[0]}<|im_end|>\n{header}stop<|im_end|>"
    )
    assert renderer("bpe").decode(
        [one for one, mask in zip(out.response_ids, out.loss_mask, strict=True) if mask]
    ) == ("<think>a</think>stop")
    assert sum(out.reward) == found.reward == 1.0


def test_a_user_file_with_images(skyrl, registered, tmp_path):
    """SkyRL's loop writes one id for an image; ours, expanded for the model, is the same
    with each block as one."""
    from transformers import AutoTokenizer

    directory = tiny_vlm_directory(tmp_path / "vlm")
    sees, tokenizer = tw.load_renderer(directory), AutoTokenizer.from_pretrained(directory)
    parts = "part.type == 'image'"  # released templates take OpenAI's name, too
    tokenizer.chat_template = tokenizer.chat_template.replace(
        parts, "part.type in ('image', 'image_url')"
    )
    name, replies = registered("sketch.py:SketchEnv"), ["show", "red"]
    client = Client(replies, (), encode=sees.encode_reply)
    generation = skyrl.GeneratorConfig(
        max_turns=3, max_input_length=4096, use_conversation_multi_turn=True
    )
    generator = skyrl.SkyRLGymGenerator(generation, skyrl.SkyRLGymConfig(), client, tokenizer)
    out = asyncio.run(
        generator.agent_loop([{"role": "user", "content": "Go."}], name, {}, 1024, 4096)
    )
    made = as_env_spec(FRAMEWORK.find(name), where=f"skyrl:{name}", args={})
    limits = tw.Limits(turns=3, turn_tokens=1024)
    (found,) = tw.rollout(
        made.factory, [tw.Task("Go.")], tw.ScriptedEngine(replies), renderer=sees, limits=limits
    )
    assert found.error is None, found.error
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (row,) = found.samples()
    once = [one for at, one in enumerate(row.ids) if one != pad or row.ids[at - 1] != pad]
    assert len(row.media) == 1
    assert pad in once
    assert [*out.prompt_ids, *out.response_ids] == once
    assert (sum(out.reward), sum(out.loss_mask)) == (found.reward, sum(row.mask))


def test_a_users_own_generator(skyrl, tokenizer):
    """The same file under SkyRL's own base class, over a client of SkyRL and over our engine."""
    replies, row = ["a draft", "it is 12"], {"reward_spec": {"ground_truth": "12"}}
    made = load_object("own_generator.py:DraftGenerator", base=USERS / "skyrl")
    assert made.__mro__[1].__module__ == "skyrl.train.generators.base"
    generation = skyrl.GeneratorConfig(
        max_turns=2, max_input_length=4096, sampling_params=skyrl.SamplingParams()
    )

    class Of2025:
        """The tokenizer, whose templates returned ids then."""

        encode = staticmethod(lambda text: tokenizer.encode(text, add_special_tokens=False))

        def apply_chat_template(self, *args, **kwargs):
            return tokenizer.apply_chat_template(*args, **{"return_dict": False, **kwargs})

    client = Client(replies, ())
    generator = made(generation, skyrl.SkyRLGymConfig(), client, Of2025(), "m")
    batch = {"prompts": [[{"role": "user", "content": "Go."}]], "env_extras": [row]}
    out = asyncio.run(generator.generate(batch))
    limits = tw.Limits(turns=4, turn_tokens=1024)
    spec = as_env_spec(
        load_object("own_generator.py:DraftGenerator", base=USERS / "skyrl"), where="own", args={}
    )
    task = tw.Task("Go.", info=row)
    (found,) = tw.rollout(
        spec.agent_function,
        [task],
        tw.ScriptedEngine(replies),
        renderer=renderer("bpe"),
        limits=limits,
    )
    assert found.error is None, found.error
    (sample,) = found.samples()
    opening = found.turns[0].context
    assert [found.prompt_ids(n) for n in range(2)] == client.contexts
    assert (out["prompt_token_ids"][0], out["response_ids"][0]) == (
        sample.ids[:opening],
        sample.ids[opening:],
    )
    assert [float(one) for one in out["loss_masks"][0]] == sample.weights[opening:]
    assert out["rewards"][0] == (sample.token_rewards or [])[opening:]


# Conventions: lists changed in place, several samples, pictures of rows, replies that are
# cut, masks of a generator


@pytest.fixture
def user_env(skyrl, tmp_path):
    """Returns the id under which SkyRL-Gym's own registry has a class of a file
    that is written here."""
    import skyrl_gym

    def add(source, name):
        path = tmp_path / f"written_{tmp_path.name}.py"
        path.write_text(conventions.HEAD + source)
        made = load_object(f"{path.name}:{name}", base=tmp_path)
        assert issubclass(made, skyrl_gym.Env)
        skyrl_gym.register(id=path.stem, entry_point=made)
        return path.stem

    return add


@pytest.mark.parametrize("change", sorted(conventions.CHANGES))
def test_a_list_that_is_changed_in_place(skyrl, tokenizer, user_env, change):
    """SkyRL renders its list again for each step where trajectories are step-wise, and so shows
    what an environment changed."""
    code, _ = conventions.CHANGES[change]
    source = conventions.HISTORY + f"\n    def change(self):\n        {code}\n"
    if change == "an earlier one goes":
        source = source.replace("self.turns == 3", "self.turns == 2")
    name = user_env(source, "Env")
    generation = skyrl.GeneratorConfig(
        max_turns=8, max_input_length=4096, step_wise_trajectories=True
    )
    client = Client("abc", ())
    generator = skyrl.SkyRLGymGenerator(generation, skyrl.SkyRLGymConfig(), client, tokenizer)
    out = asyncio.run(
        generator.agent_loop([{"role": "user", "content": "Go."}], name, {}, 1024, 4096)
    )
    made = as_env_spec(FRAMEWORK.find(name), where=f"skyrl:{name}", args={})
    limits = tw.Limits(turns=8, turn_tokens=1024)
    (found,) = tw.rollout(
        made.factory,
        [tw.Task("Go.")],
        tw.ScriptedEngine(list("abc")),
        renderer=renderer("bpe"),
        limits=limits,
    )
    assert found.error is None, found.error
    assert [found.prompt_ids(n) for n in range(len(found.turns))] == client.contexts
    assert found.reward == sum(sum(one.reward) for one in out.step_outputs)
    trained = sum(sum(one.loss_mask) for one in out.step_outputs)
    assert sum(sum(1 for weight in row.weights if weight) for row in found.samples()) == trained


def test_several_samples_of_a_row(skyrl, tokenizer, registered):
    """Each sample of a row has an environment of its own."""
    from skyrl.train.generators.base import BatchMetadata, TrajectoryID

    name, row, replies = registered("guess.py:GuessEnv"), truth("7"), ["5", "9", "7"]

    class ByTurn(Client):
        async def generate(self, batch, model=None):
            (ids,) = batch["prompt_token_ids"]
            self.replies = replies[
                renderer("bpe").decode(ids).count("<|im_start|>assistant\n") - 1 :
            ]
            self.contexts.clear()
            return await super().generate(batch, model)

    generation = skyrl.GeneratorConfig(max_turns=4, max_input_length=4096)
    generator = skyrl.SkyRLGymGenerator(
        generation, skyrl.SkyRLGymConfig(), ByTurn(replies, ()), tokenizer
    )
    batch = {
        "prompts": [[{"role": "user", "content": "Go."}] for _ in range(3)],
        "env_classes": [name] * 3,
        "env_extras": [dict(row) for _ in range(3)],
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID("one", number) for number in range(3)],
        "batch_metadata": BatchMetadata(0, "train"),
    }
    out = asyncio.run(generator.generate(batch, disable_tqdm=True))
    made = as_env_spec(FRAMEWORK.find(name), where=f"skyrl:{name}", args={})
    found = tw.rollout(
        made.factory,
        [tw.Task("Go.", info=row)],
        tw.ScriptedEngine(replies),
        samples=3,
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=4, turn_tokens=1024),
    )
    for number, one in enumerate(found):
        (sample,) = one.samples()
        opening = one.turns[0].context
        assert out["response_ids"][number] == sample.ids[opening:]
        assert out["loss_masks"][number] == sample.mask[opening:]
        assert sum(out["rewards"][number]) == pytest.approx(one.reward)


def test_a_picture_of_a_row(skyrl, user_env, tmp_path):
    from transformers import AutoTokenizer

    directory = tiny_vlm_directory(tmp_path / "vlm")
    sees, reads = tw.load_renderer(directory), AutoTokenizer.from_pretrained(directory)
    parts = "part.type == 'image'"
    reads.chat_template = reads.chat_template.replace(parts, "part.type in ('image', 'image_url')")
    (prompt,) = conventions.rows(tmp_path)["a data URL"].values()
    name = user_env(conventions.PICTURE, "Look")
    client = Client(["green"], (), encode=sees.encode_reply)
    generation = skyrl.GeneratorConfig(max_turns=2, max_input_length=4096)
    generator = skyrl.SkyRLGymGenerator(generation, skyrl.SkyRLGymConfig(), client, reads)
    out = asyncio.run(generator.agent_loop(json.loads(json.dumps(prompt)), name, {}, 1024, 4096))
    made = as_env_spec(FRAMEWORK.find(name), where=f"skyrl:{name}", args={})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt}))
    (found,) = tw.rollout(
        made.factory,
        tw.load_tasks(tmp_path / "rows.jsonl"),
        tw.ScriptedEngine(["green"]),
        renderer=sees,
        limits=tw.Limits(turns=2, turn_tokens=1024),
    )
    assert found.error is None, found.error
    pad = reads.convert_tokens_to_ids("<|image_pad|>")
    (row,) = found.samples()
    once = [one for at, one in enumerate(row.ids) if one != pad or row.ids[at - 1] != pad]
    assert len(row.media) == 1
    assert [*out.prompt_ids, *out.response_ids] == once
    assert sum(out.reward) == found.reward == 1.0


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_reply_that_is_cut(skyrl, tokenizer, size):
    """The environment sees what there is of it; it is rewarded and trained."""

    class Cuts(Client):
        async def generate(self, batch, model=None):
            out = await super().generate(batch, model)
            ids = out["response_ids"][0][:size]
            text = renderer("bpe").decode(ids)
            return out | {
                "responses": [text],
                "response_ids": [ids],
                "stop_reasons": ["length"],
                "response_logprobs": [[0.0] * len(ids)],
            }

    reply, row = "#### 12 and then much more", truth("12")
    generation = skyrl.GeneratorConfig(max_turns=1, max_input_length=4096)
    client = Cuts([reply], ())
    generator = skyrl.SkyRLGymGenerator(generation, skyrl.SkyRLGymConfig(), client, tokenizer)
    out = asyncio.run(
        generator.agent_loop([{"role": "user", "content": "Go."}], "gsm8k", dict(row), 1024, 4096)
    )
    made = as_env_spec(FRAMEWORK.find("gsm8k"), where="skyrl:gsm8k", args={})
    (found,) = tw.rollout(
        made.factory,
        [tw.Task("Go.", info=row)],
        tw.ScriptedEngine([reply]),
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=1, turn_tokens=size),
    )
    assert found.error is None, found.error
    (sample,) = found.samples()
    opening = found.turns[0].context
    assert out.response_ids == sample.ids[opening:]
    assert out.loss_mask == sample.mask[opening:]
    assert sum(out.reward) == found.reward
    assert out.stop_reason == found.turns[0].finish == "length"


def test_masks_metrics_and_settings_are_skyrls(skyrl, tokenizer):
    """Our stand-ins of what generators make their rows with, against SkyRL's own."""
    import dataclasses
    import importlib
    import random

    from skyrl.backends.skyrl_train.inference_servers import engine_utils
    from skyrl.train.config import config
    from skyrl.train.generators import utils

    from turnwright.envs.user_imports import STAND_INS

    ours_utils = importlib.import_module(f"{STAND_INS}.skyrl.train.generators.utils")
    ours_config = importlib.import_module(f"{STAND_INS}.skyrl.train.config.config")
    ours_engine = importlib.import_module(
        f"{STAND_INS}.skyrl.backends.skyrl_train.inference_servers.engine_utils"
    )
    rng = random.Random(0)
    words = ["so", "it", "is", "#### 12", "\nnext", " 7"]
    for _ in range(50):
        roles = [rng.choice(["user", "assistant", "tool"]) for _ in range(rng.randint(1, 4))]
        messages = [
            {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(1, 5)))}
            for role in roles
        ]
        theirs_rows = utils.get_response_ids_and_loss_mask_from_messages(messages, tokenizer)
        assert (
            ours_utils.get_response_ids_and_loss_mask_from_messages(messages, tokenizer)
            == theirs_rows
        )
        masks = [[rng.randint(0, 1) for _ in range(5)] for _ in range(3)]
        reasons = rng.choices(["stop", "length"], k=3)
        assert ours_utils.apply_overlong_filtering(
            masks, reasons
        ) == utils.apply_overlong_filtering(masks, reasons)
        rewards = [rng.choice([0.0, 1.0, [0.0, 0.5]]) for _ in range(3)]
        own = ours_utils.get_rollout_metrics(masks, rewards)
        for key, value in utils.get_rollout_metrics(masks, rewards).items():
            assert own[key] == pytest.approx(value), key
    assert ours_utils.get_generation_prompt_ids(tokenizer) == utils.get_generation_prompt_ids(
        tokenizer
    )

    for name in (
        "SamplingParams",
        "ChatTemplateConfig",
        "GeneratorConfig",
        "InferenceEngineConfig",
    ):
        own, original = getattr(ours_config, name)(), getattr(config, name)()
        known = {field.name for field in dataclasses.fields(original)}
        for field in dataclasses.fields(own):
            value = getattr(own, field.name)
            if (
                field.name in known
                and not dataclasses.is_dataclass(value)
                and field.name != "eval_sampling_params"
            ):
                assert value == getattr(original, field.name), (name, field.name)
    params = config.SamplingParams(temperature=0.5, stop=["x"])
    assert ours_engine.get_sampling_params_for_backend(
        "vllm", params
    ) == engine_utils.get_sampling_params_for_backend("vllm", params)


def test_a_file_that_registers_is_executed_from_two_places(skyrl, tmp_path):
    """SkyRL-Gym refuses an id that it has; a file may be the recipe's and another one's import,
    or lie in two copies."""
    import skyrl_gym

    source = conventions.HEAD + textwrap.dedent(
        """
        from skyrl_gym.envs import register


        class Env(BaseTextEnv):
            def __init__(self, env_config=None, extras={}):
                super().__init__()

            def step(self, action):
                return out(done=True, reward=1.0)


        register(id="of_two_places", entry_point=Env)
        """
    )
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "world.py").write_text(source)
        (tmp_path / folder / "uses.py").write_text("from world import Env\n")
        for name in ("world.py", "uses.py"):
            made = load_object(f"{folder}/{name}:Env", base=tmp_path)
            spec = as_env_spec(made, where=name)
            (found,) = tw.rollout(
                spec.factory, [tw.Task("Go.")], tw.ScriptedEngine(["x"]), renderer=renderer("bpe")
            )
            assert found.reward == 1.0
    assert "gsm8k" in skyrl_gym.registry
    assert "of_two_places" in skyrl_gym.registry


def test_a_file_of_another_version_of_the_framework_has_its_modules(skyrl, tmp_path):
    """A checkout beside an installed SkyRL-Gym: an environment of its tree is
    of its own base class."""
    import shutil

    import skyrl_gym

    shutil.copytree(
        skyrl_gym.__path__[0], tmp_path / "skyrl_gym", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "skyrl_gym/tools/newer.py").write_text("REWARD = 0.5\n")
    path = tmp_path / "skyrl_gym/envs/mine/env.py"
    path.parent.mkdir()
    path.write_text(
        "from skyrl_gym.tools.newer import REWARD\n"
        + conventions.HEAD
        + "\n\nclass Env(BaseTextEnv):\n    def __init__(self, env_config=None, "
        "extras={}):\n        super().__init__()\n\n    def step(self, action):\n        "
        "return out(done=True, reward=REWARD)\n"
    )
    made = load_object("skyrl_gym/envs/mine/env.py:Env", base=tmp_path)
    assert not issubclass(made, skyrl_gym.Env)
    spec = as_env_spec(made, where="Env")
    (found,) = tw.rollout(
        spec.factory, [tw.Task("Go.")], tw.ScriptedEngine(["x"]), renderer=renderer("bpe")
    )
    assert found.reward == 0.5


def test_groups_of_tools_answer_as_skyrl_gyms(skyrl, retriever):
    """Our stand-ins of SkyRL-Gym's groups of tools, against its own."""
    import importlib

    from skyrl_gym.tools import PythonCodeExecutorToolGroup, SearchToolGroup

    from turnwright.envs.user_imports import STAND_INS

    own = importlib.import_module(f"{STAND_INS}.skyrl_gym.tools")
    for code in ("print(2 + 2)", "x = 1", "1 / 0", "print(' a ')", "import time; time.sleep(9)"):
        groups = [
            made(timeout=2.0)
            for made in (PythonCodeExecutorToolGroup, own.PythonCodeExecutorToolGroup)
        ]
        answers = {group.execute_tool("python", code) for group in groups}
        assert len(answers) == 1, answers
    for query in (" amber ", "", None):
        groups = [
            made(search_url=retriever, topk=1) for made in (SearchToolGroup, own.SearchToolGroup)
        ]
        answers = {group.execute_tool("search", query) for group in groups}
        assert len(answers) == 1, answers
    for made in (SearchToolGroup, own.SearchToolGroup):
        failed = made(search_url="http://127.0.0.1:9/retrieve", timeout=1).execute_tool(
            "search", "x"
        )
        assert json.loads(failed)["result"].startswith("Search error: ")
