# ruff: noqa: E501  # the files of users are texts
"""Modules of slime, Miles and SGLang that user code imports where they are not installed."""

import pytest
from kit.slime import played

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import load_object, resolve_env
from turnwright.envs.user_imports import import_foreign
from turnwright.errors import ConfigError
from turnwright.training.advantages import read_choice
from turnwright_compat.slime.group_filter import adapt_filter

CALL = '<tool_call>\n{"name": "add", "arguments": {"numbers": [2, 5]}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
    }
]
READ = {
    "one call": (f"So.\n{CALL}", "So.", [("add", '{"numbers": [2, 5]}')]),
    "two calls": (f"{CALL}\n{CALL}", "", [("add", '{"numbers": [2, 5]}')] * 2),
    "a thought first": (
        f"<think>hm</think>{CALL}",
        "<think>hm</think>",
        [("add", '{"numbers": [2, 5]}')],
    ),
    "no call": ("<think>hm</think>7", "<think>hm</think>7", []),
    "an unknown tool": (CALL.replace("add", "sub"), CALL.replace("add", "sub"), []),
    "no JSON": (CALL.replace("}}", "}"), CALL.replace("}}", "}"), []),
}


@pytest.mark.parametrize("case", READ)
def test_sglangs_reader_of_calls(case):
    """Results of SGLang's own `parse_non_stream` for the format of Qwen 2.5."""
    text, rest, calls = READ[case]
    tools = import_foreign("sglang.srt.managers.io_struct")
    parser = import_foreign("sglang.srt.function_call.function_call_parser").FunctionCallParser
    made = parser(
        [tools.Tool(type="function", function=tools.Function(**one["function"])) for one in TOOLS],
        "qwen25",
    )
    found, items = made.parse_non_stream(text)
    assert (found, [(one.name, one.parameters) for one in items]) == (rest, calls)
    assert made.has_tool_call(text) == bool(calls)
    with pytest.raises(ValueError, match="tool_call_parser 'qwen99'; there are qwen"):
        parser([], "qwen99")


TOOL_FILE = """
specs = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


async def execute(name, params):
    return f"{name}: {sum(params['numbers'])}"


async def judge(args, sample, **options):
    assert sample.response.count("add: 7") == 1
    return {"score": float(sample.response.endswith("7<|im_end|>")), "turns": 2}
"""
TOOL_ARGS = {
    "apply_chat_template": False,
    "generate_tool_specs_path": "tools.specs",
    "generate_execute_tool_function_path": "tools.execute",
    "generate_tool_call_parser": "qwen25",
}


def test_miles_own_loop_with_tools_of_the_user(tmp_path):
    args = {"custom_rm_path": "tools.py:judge", "reward_key": "score", "args": TOOL_ARGS}
    files = {"tools.py": TOOL_FILE}
    use = "miles.rollout.generate_hub.multi_turn:generate"
    row = {"prompt": [{"role": "user", "content": "2 + 5?"}]}
    found = played(tmp_path, "pass", use, replies=[CALL, "7"], row=row, args=args, files=files)
    assert (found.error, found.reward, len(found.turns)) == (None, 1.0, 2)
    text = tw.byte_renderer().decode(found.prompt_ids(1))
    assert '"name": "add"' in text
    assert "add: 7" in text
    (sample,) = found.samples()
    said = [one for one, weight in zip(sample.ids, sample.weights, strict=True) if weight]
    assert tw.byte_renderer().decode(said) == f"{CALL}<|im_end|>7<|im_end|>"


def test_functions_that_args_name_are_those_around_the_recipe(tmp_path):
    """Two recipes whose tools have the same name."""
    for name, result in (("a", "add: 7"), ("b", "sum: 7")):
        files = {
            "tools.py": TOOL_FILE.replace("add: 7", result).replace('f"{name}:', f'f"{result[:3]}:')
        }
        args = {"custom_rm_path": "tools.py:judge", "reward_key": "score", "args": TOOL_ARGS}
        use = "miles.rollout.generate_hub.multi_turn:generate"
        found = played(tmp_path / name, "pass", use, replies=[CALL, "7"], args=args, files=files)
        assert (found.error, found.reward) == (None, 1.0)
        assert result in tw.byte_renderer().decode(found.prompt_ids(1))


ENDS = [
    (["no call"], {}, 1, "completed"),
    ([CALL] * 3, {"turns": 3}, 3, "truncated"),
    (["abcdefgh"], {"turn_tokens": 4}, 1, "truncated"),
]


@pytest.mark.parametrize(("replies", "limits", "turns", "status"), ENDS)
def test_ends_of_miles_own_loop(replies, limits, turns, status, tmp_path):
    args = {"custom_rm_path": "tools.py:one", "args": TOOL_ARGS}
    files = {
        "tools.py": TOOL_FILE + "\n\nasync def one(args, sample, **options):\n    return 1.0\n"
    }
    use = "miles.rollout.generate_hub.multi_turn:generate"
    found = played(tmp_path, "pass", use, replies=replies, args=args, files=files, **limits)
    assert (found.error, found.reward, len(found.turns)) == (None, 1.0, turns)
    assert found.stop.status == ("completed" if replies == [CALL] * 3 else status)


def test_miles_own_single_turn_is_called_by_user_code(tmp_path):
    source = """
    import copy

    from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
    from miles.rollout.generate_hub.single_turn import generate as single_turn

    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        sample = (await single_turn(input)).samples
        cut = sample.response_length // 2
        first, second = copy.deepcopy(sample), copy.deepcopy(sample)
        first.tokens = sample.tokens[: len(sample.tokens) - sample.response_length + cut]
        first.response_length, first.loss_mask = cut, sample.loss_mask and sample.loss_mask[:cut]
        first.rollout_log_probs = sample.rollout_log_probs[:cut]
        second.loss_mask = [0] * cut + [1] * (sample.response_length - cut)
        first.reward = second.reward = 0.5
        return GenerateFnOutput(samples=[first, second])
    """
    found = played(tmp_path, source, replies=["abcd"])
    assert (found.error, found.reward) == (None, 0.5)
    (row,) = found.samples()
    assert sum(row.weights) == 5


SPANS = """
    from slime.observability.trace_utils import bind_trace, build_sglang_meta_trace_attrs, trace_event, trace_function, trace_span

    @trace_function("own", target="sample", attrs_getter=lambda args, sample, *_: {"n": 1})
    async def generate(args, sample, sampling_params):
        bind_trace(sample)
        with trace_span(sample, "turn", attrs={"turn": 1}) as span:
            span.set("a", 1).update({"b": 2})
            span.update_attrs(build_sglang_meta_trace_attrs({"prompt_tokens": 3, "other": 4}))
            sample = await one_reply(args, sample, sampling_params)
        trace_event(sample, "done", attrs={})
        sample.reward = 1.0
        return sample
"""
ASYNC = """
    from slime.utils.async_utils import run

    async def number():
        return 0.5

    async def generate(args, sample, sampling_params):
        sample = await one_reply(args, sample, sampling_params)
        sample.reward = run(number())
        return sample
"""
STREAM = """
    from slime.rollout.sglang_rollout import get_model_url
    from slime.rollout.sglang_streaming_rollout import generate_streaming
    from slime.utils.http_utils import post

    async def generate(args, sample, sampling_params):
        args.sglang_model_routers = {"other": ("10.0.0.1", 7)}
        assert get_model_url(args, "other", "/x") == "http://10.0.0.1:7/x"
        assert get_model_url(args, "actor") == f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        sample = await generate_streaming(args, sample, sampling_params)
        sample.reward = 1.0
        return sample
"""


@pytest.mark.parametrize(
    ("source", "reward"),
    [(SPANS, 1.0), (ASYNC, 0.5), (STREAM, 1.0)],
    ids=["spans", "async", "streams"],
)
def test_modules_that_user_code_imports(source, reward, tmp_path):
    found = played(tmp_path, source)
    assert (found.error, found.reward) == (None, reward)


def group(rewards, status="completed"):
    async def play(task, model):
        await model.generate(task.messages)
        return tw.Scores(float(task.answer), status=status)

    tasks = [tw.Task("Go.", str(reward)) for reward in rewards]
    return tw.rollout(
        play,
        tasks,
        tw.ScriptedEngine(["a"]),
        renderer=tw.byte_renderer(),
        limits=tw.Limits(turns=2, turn_tokens=9),
    )


@pytest.mark.parametrize("package", ["slime", "miles"])
@pytest.mark.parametrize(
    ("rewards", "choice"),
    [
        ((0.0, 1.0), (True, "")),
        ((1.0, 1.0), (False, "zero_std_1.0")),
        ((1.0,), (False, "zero_std_1.0")),
    ],
)
def test_filters_of_groups_by_their_names(package, rewards, choice):
    function = load_object(
        f"{package}.rollout.filter_hub.dynamic_sampling_filters:check_reward_nonzero_std"
    )
    assert read_choice(adapt_filter(function)(group(rewards))) == choice
    kept = load_object(
        f"{package}.rollout.filter_hub.dynamic_sampling_filters:check_reward_nonzero_std_with_fallback"
    )
    assert read_choice(adapt_filter(kept)(group(rewards))) == (True, "")


def test_a_dotted_use_of_a_framework_that_is_not_installed_is_our_stand_in():
    assert resolve_env(
        EnvConfig(use="slime.rollout.sglang_rollout:generate", args={"rm_type": "math"})
    ).agent_function
    with pytest.raises(ConfigError, match=r"no module 'slime' is installed"):
        load_object("slime.rollout.nothing:generate")
    with pytest.raises(ConfigError, match=r"has no 'generat'; did you mean 'generate'"):
        load_object("slime.rollout.sglang_rollout:generat")


STEPS = [
    (
        "slime.rollout.fully_async_rollout:generate_rollout_fully_async",
        r'\[schedule\] mode = "async"',
    ),
    ("miles.rollout.fully_async_rollout:FullyAsyncRolloutFn", r'\[schedule\] mode = "async"'),
    ("slime.rollout.sft_rollout:generate_rollout", r"\[warmup\] dataset"),
    (
        "miles.rollout.inference_rollout.inference_rollout_common:InferenceRolloutFn",
        "name what it calls for each sample",
    ),
    ("slime.rollout.sglang_rollout:generate_rollout", "name what it calls for each sample"),
    ("steps.py:generate_rollout", "train.group_filter"),
    ("steps.py:evaluate", r"env\.eval_tasks"),
    ("steps.py:Own", "name what it calls for each sample"),
]
STEP_FILE = """
from miles.rollout.base_types import RolloutFnTrainInput, RolloutFnTrainOutput
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.sglang_rollout import generate_rollout as base

def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    return base(args, rollout_id, data_buffer, evaluation)

def evaluate(args, rollout_id, data_buffer, evaluation=False):
    return RolloutFnEvalOutput({})

class Own(InferenceRolloutFn):
    async def _call_train(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        return await super()._call_train(input)
"""


@pytest.mark.parametrize(("use", "hook"), STEPS)
def test_a_function_for_a_step_is_refused_with_what_replaces_it(use, hook, tmp_path):
    (tmp_path / "steps.py").write_text(STEP_FILE)
    with pytest.raises(
        ConfigError, match=rf"plays all samples of a step .*which our loop replaces; .*{hook}"
    ):
        resolve_env(EnvConfig(use=use), base=tmp_path)
