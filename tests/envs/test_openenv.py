"""OpenEnv: a real server of the official package, in a process of its own, over a socket."""

import contextlib
import itertools
import json
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import turnwright as tw
from turnwright.envs.check import check_env
from turnwright.errors import ConfigError
from turnwright_compat import openenv_env

pytest.importorskip(
    "openenv.core.generic_client", reason="needs openenv-core; pip install '.[openenv]'"
)

SERVER = Path(__file__).with_name("openenv_server.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def asked(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def url():
    """A server that listens on a port of this machine."""
    found = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen([sys.executable, str(SERVER), found.rpartition(":")[2]])
    try:
        for _ in range(1200):
            with contextlib.suppress(urllib.error.URLError):
                asked(f"{found}/open")
                break
            assert process.poll() is None
            time.sleep(0.1)
        yield found
    finally:
        process.kill()
        process.wait()


def play(env, replies, tasks=None, **kwargs):
    kwargs = {"limits": tw.Limits(turns=6)} | kwargs
    return tw.rollout(
        env, tasks or [tw.Task(info={"seed": 42})], engine=tw.ScriptedEngine(replies), **kwargs
    )


def alone(*args, **kwargs):
    (trajectory,) = play(*args, **kwargs)
    return trajectory


def closed(url):
    """Whether the server has no session any more; it hears of a closed
    connection a moment later."""
    for _ in range(500):
        if (state := asked(f"{url}/open"))["now"] == 0:
            return state["ever"] > 0
        time.sleep(0.01)
    return False


def guess(number):
    return json.dumps({"guess": number})


def test_an_episode(url):
    env = openenv_env(url, observation="said", system="Find the number.")
    trajectory = alone(env, [guess(7), f"```json\n{guess(77)}\n```", guess(42)])
    assert (trajectory.reward, trajectory.stop) == (1.0, tw.StopReason.DONE)
    heard = [message.text for message in trajectory.messages if message.role != "assistant"]
    assert heard == ["Find the number.", "Guess.", "Higher.", "Lower."]
    assert trajectory.final[0].text == "Yes."
    assert "invalid_actions" not in trajectory.metrics
    assert closed(url)


def test_functions_of_one_s_own_and_all_fields_by_default(url):
    env = openenv_env(url, action=lambda text: {"guess": int(text)})
    trajectory = alone(env, ["forty", "42"], [tw.Task("Well?", info={"seed": 42})])
    assert trajectory.reward == 1.0
    heard = [message.text for message in trajectory.messages if message.role != "assistant"]
    assert heard[:2] == ["Well?", '{"said": "Guess.", "low": 1}']
    assert heard[2] == "invalid literal for int() with base 10: 'forty'"
    told = openenv_env(
        url,
        action="guess",
        observation=lambda seen: [{"role": "user", "content": seen["said"].upper()}],
    )
    # The field takes the text, and the server reads the number in it.
    trajectory = alone(told, ["41", "42"])
    assert (trajectory.reward, trajectory.turns[1].messages[0].text) == (1.0, "HIGHER.")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("42", "Say the action as a JSON object, its fields by name."),
        ("{42", "Say the action as a JSON object: Expecting property name"),
        ("[" * 9000, "Say the action as a JSON object"),
        ('{"guess": "many"}', "guess: Input should be a valid integer"),
        ('{"gues": 4}', "guess: Field required; gues: Extra inputs are not permitted"),
        ('{"guess": NaN}', "Out of range float values are not JSON compliant"),
        ('{"guess": "\\ud800"}', "'utf-8' codec can't encode"),
        ('{"type": "call_tool", "guess": 1}', "type: Extra inputs are not permitted"),
    ],
)
def test_what_the_model_does_wrong_is_an_observation(url, reply, told):
    trajectory = alone(
        openenv_env(url, observation="said"),
        [reply, guess(42)],
        limits=tw.Limits(turns=6, turn_tokens=9999),
    )
    assert trajectory.error is None
    assert trajectory.turns[0].info["invalid_action"].startswith(told)
    assert trajectory.turns[1].messages[0].text.startswith(told)
    assert trajectory.metrics["invalid_actions"] == 1
    assert trajectory.reward == 1.0


def test_an_error_of_the_environment_is_the_model_s_doing_where_one_says_so(url):
    task = tw.Task(info={"seed": 42, "reset": {"refuse": True}})
    env = openenv_env(url, mistakes=["VALIDATION_ERROR", "EXECUTION_ERROR"])
    mine = alone(env, [guess(1), guess(2)], [task], limits=tw.Limits(turns=2))
    assert mine.error is None
    assert (
        mine.turns[0].info["invalid_action"]
        == f"{url.replace('http', 'ws')}/ws: not that one (EXECUTION_ERROR)"
    )
    theirs = alone(openenv_env(url), [guess(1), guess(2)], [task])
    assert (theirs.stop, theirs.error.type, theirs.error.kind) == (
        tw.StopReason.ENV_ERROR,
        "ServerError",
        "environment",
    )
    assert theirs.error.message.endswith("not that one (EXECUTION_ERROR)")
    assert theirs.reward is None
    assert closed(url)


def test_a_step_that_fails_once_is_tried_again(url):
    env = openenv_env(url, observation="said", reset=lambda task: {"fail_at": 2, "key": task.id})
    rules = tw.EnvRules(retries=tw.RetryRules(turn=1, wait_s=0.0))
    task = tw.Task("Go.", id="once", info={"seed": 42})
    trajectory = alone(env, [guess(1), guess(42)], [task], rules=rules)
    assert trajectory.reward == 1.0
    (failure,) = trajectory.failures
    assert (failure.type, failure.kind, failure.recovery) == (
        "ServerError",
        "environment",
        "replayed",
    )
    assert "the disk is full" in failure.message
    plain = alone(openenv_env(url, observation="said"), [guess(1), guess(42)], [task])
    assert [m.text for m in plain.messages] == [m.text for m in trajectory.messages]
    assert closed(url)


@pytest.mark.parametrize(
    ("reward", "replies", "total"),
    [
        ("last", [guess(1), guess(42)], 1.0),
        ("every", [guess(1), guess(42)], 0.8),
        ("never", [guess(1), guess(42)], None),
        ("never", [guess(1), guess(2)], 0.0),
    ],
)
def test_a_reward_that_never_came_is_none(url, reward, replies, total):
    task = tw.Task(info={"seed": 42, "reset": {"reward": reward}})
    trajectory = alone(openenv_env(url), replies, [task], limits=tw.Limits(turns=2))
    assert trajectory.error is None
    assert trajectory.reward == (total if total is None else pytest.approx(total))


def test_each_episode_has_a_session_of_its_own(url):
    tasks = [tw.Task("Go.", id=str(number), info={"seed": number}) for number in range(24)]
    env = openenv_env(url, observation="said")
    limits = tw.Limits(turns=30)
    found = play(
        env,
        lambda messages, rng: guess(sum(m.role == "assistant" for m in messages)),
        tasks,
        limits=limits,
    )
    assert [(t.reward, len(t.turns)) for t in found] == [(1.0, number + 1) for number in range(24)]
    assert closed(url)


def test_a_full_server_says_so(url):
    from openenv.core.generic_client import GenericEnvClient

    env = openenv_env(f"{url}/small", observation="said")
    with GenericEnvClient(f"{url}/small").sync() as other:
        other.reset(seed=1)
        refused = alone(env, [guess(42)])
        assert (refused.error.type, refused.error.phase) == ("ServerError", "reset")
        assert "CAPACITY_REACHED" in refused.error.message
    assert closed(url)
    assert alone(env, [guess(42)]).reward == 1.0


def test_a_server_that_hangs_is_waited_for_no_longer_than_said(url):
    task = tw.Task(info={"seed": 42, "reset": {"hang": 1.0}})
    late = alone(openenv_env(url, call_s=0.2), [guess(1)], [task])
    assert (late.stop, late.error.kind, late.error.phase) == (
        tw.StopReason.TIMEOUT,
        "timeout",
        "step",
    )
    assert closed(url)


def test_a_server_that_is_not_there():
    gone = alone(openenv_env(f"http://127.0.0.1:{free_port()}"), ["{}"])
    assert (gone.stop, gone.error.type, gone.error.kind) == (
        tw.StopReason.ENV_ERROR,
        "ServerError",
        "environment",
    )
    assert "Failed to connect to ws://127.0.0.1" in gone.error.message


def test_an_episode_over_before_it_began(url):
    over = alone(openenv_env(url), ["{}"], [tw.Task(info={"reset": {"over": True}})])
    assert "its episode is over before it began" in over.error.message


@pytest.fixture
def odd():
    """A server of another kind: it answers what `said` holds, in order, and then hangs up."""
    from websockets.sync.server import serve

    said = []

    def answer(connection):
        for text in said:
            connection.recv()
            connection.send(text)

    server = serve(answer, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", said
    server.shutdown()
    thread.join()


BEGUN = json.dumps(
    {"type": "observation", "data": {"observation": {"said": "Go."}, "reward": None, "done": False}}
)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "received 1000 (OK)"),
        (["hello"], "no JSON"),
        (["[]"], "another form: []"),
        (['{"data": 3}'], "another form: {'data': 3}"),
        (['{"type": "error"}'], "it does not say why (UNKNOWN)"),
        (['{"type": "error", "data": {"errors": [3, {"loc": 4}]}}'], ""),
        (['{"data": {"observation": 3}}'], "not an observation and done"),
        ([BEGUN], "received 1000 (OK)"),
        ([BEGUN, BEGUN.replace("null", '"much"')], "the reward is 'much', no finite number"),
        ([BEGUN, BEGUN.replace("null", "Infinity")], "the reward is inf, no finite number"),
    ],
)
def test_a_server_that_talks_nonsense_fails_the_episode(odd, said, message):
    url, script = odd
    script[:] = said
    failed = alone(openenv_env(url), ["{}"])
    assert failed.stop == tw.StopReason.ENV_ERROR
    assert message in failed.error.message


def test_a_validator_that_raises_ends_the_session(url):
    """What docs/libraries.md warns of: the server cannot send the error on, and hangs up."""
    failed = alone(openenv_env(url), [guess(1000), guess(42)])
    assert (failed.error.type, failed.error.phase) == ("ServerError", "step")
    assert "SESSION_ERROR" in failed.error.message
    assert closed(url)


def test_a_field_that_is_not_there(url):
    missing = alone(openenv_env(url, observation="sayd"), [guess(1)])
    assert missing.error.kind == "user_bug"
    assert "its observations have no 'sayd'; they have said, low" in missing.error.message


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="begins with http"):
        openenv_env("127.0.0.1:8000")
    with pytest.raises(ConfigError, match="call_s is 0"):
        openenv_env("http://127.0.0.1", call_s=0)


def test_factory_and_errors_can_be_sent(url):
    env = pickle.loads(pickle.dumps(openenv_env(url, observation="said")))
    isolated = alone(env, [guess(42)], rules=tw.EnvRules(isolation="process"))
    assert isolated.reward == 1.0
    assert closed(url)
    error = pickle.loads(pickle.dumps(tw.ServerError("FULL", "no room")))
    assert (error.code, str(error)) == ("FULL", "no room")


def test_tasks_are_seeds_and_the_check_passes(url):
    def bisect(messages, rng):
        low, high = 0, 99
        for asked, heard in itertools.pairwise(messages):
            if asked.role == "assistant" and heard.text in ("Higher.", "Lower."):
                number = json.loads(asked.text)["guess"]
                low, high = (number + 1, high) if heard.text == "Higher." else (low, number - 1)
        return guess((low + high) // 2)

    world = tw.as_env_spec(openenv_env(url, observation="said", solver=bisect, max_turns=8))
    train, held_out = world.train_and_eval_tasks(20, 20)
    assert {t.info["seed"] % 2 for t in train} == {0}
    assert {t.info["seed"] % 2 for t in held_out} == {1}
    findings = check_env(world, n=2)
    assert [f.text for f in findings if f.severity != "ok"] == []
    assert closed(url)


def test_the_example_of_the_docs():
    page = (Path(__file__).parents[2] / "docs/libraries.md").read_text(encoding="utf-8")
    (block,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if text.startswith("# an OpenEnv server")
    ]
    exec(compile(block, "docs/libraries.md", "exec"), {"tw": tw, "__name__": "__docs__"})
