# ruff: noqa: E501  # the files of users are texts
"""User code of slime and Miles by its shape and its conventions: what its own loop calls, whatever the names are."""

import textwrap

import pytest
from kit.slime import HEAD, played

import turnwright as tw
from turnwright.errors import ConfigError


def reward_of(*args, **options):
    found = played(*args, **options)
    assert found.error is None, found.error
    assert len(found.turns) == 1
    assert sum(next(iter(found.samples())).mask) == 3
    return found.reward


SHAPES = {
    "other names": "async def generate(a, b, c):\n    return await scored(a, b, c)",
    "a name of its own for the sample": "async def generate(args, base, params, evaluation=False):\n    return await scored(args, base, params)",
    "evaluation alone by name": "async def generate(a, b, c, *, evaluation):\n    assert evaluation is False\n    return await scored(a, b, c)",
    "any arguments": "async def generate(*all):\n    return await scored(*all)",
    "any arguments and options": "async def generate(*all, **more):\n    return await scored(*all)",
    "optional parameters": "async def generate(args, sample=None, params=None):\n    return await scored(args, sample, params)",
    "a decorator": (
        "def logged(function):\n    @wraps(function)\n    def call(*args, **options):\n        return function(*args, **options)\n"
        "    return call\n\n@logged\nasync def generate(args, sample, params):\n    return await scored(args, sample, params)"
    ),
    "partial": "async def many(bonus, args, sample, params):\n    return await scored(args, sample, params)\ngenerate = partial(many, 1)",
    "an object": (
        "class Generator:\n    async def __call__(self, args, sample, params):\n        return await scored(args, sample, params)\n"
        "generate = Generator()"
    ),
    "a method": (
        "class Generator:\n    async def play(self, args, sample, params):\n        return await scored(args, sample, params)\n"
        "generate = Generator().play"
    ),
}
SCORED = """
async def scored(args, sample, params):
    sample = await one_reply(args, sample, params)
    sample.reward = 0.5
    return sample

"""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_generate_function_is_known_by_how_it_is_called(shape, tmp_path):
    assert reward_of(tmp_path, SCORED + SHAPES[shape]) == 0.5
    assert reward_of(tmp_path, SCORED + SHAPES[shape], args={"args": {"x": 1}}) == 0.5


MILES = {
    "annotated": "async def generate(input: GenerateFnInput):\n    return await scored(input)",
    "by its use": "async def generate(request):\n    return GenerateFnOutput(await again(request.args, request.sample, request.sampling_params))",
    "a class": "class generate:\n    async def __call__(self, input: GenerateFnInput):\n        return await scored(input)",
    "an object": (
        "class Made:\n    async def __call__(self, input: GenerateFnInput) -> GenerateFnOutput:\n        return await scored(input)\n"
        "generate = Made()"
    ),
}


@pytest.mark.parametrize("shape", MILES)
def test_a_generate_function_of_miles(shape, tmp_path):
    head = """
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput

async def again(args, sample, params):
    sample = await one_reply(args, sample, params)
    sample.reward = 0.5
    return sample

async def scored(input):
    return GenerateFnOutput(await again(input.args, input.sample, input.sampling_params))

"""
    assert reward_of(tmp_path, head + MILES[shape]) == 0.5


def test_a_play_function_stays_one(tmp_path):
    source = "async def play(task, model, extra=None):\n    await model.generate(task.messages)\n    return 0.25"
    assert reward_of(tmp_path, source, "user.py:play") == 0.25


@pytest.mark.parametrize("kept", ["loss_mask", "tokens", "rollout_log_probs"])
def test_lists_of_a_sample_grow_in_place(kept, tmp_path):
    source = f"""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post

    async def generate(args, sample, sampling_params):
        ids = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        sample.tokens, sample.loss_mask, sample.rollout_log_probs = list(ids), [], []
        own = sample.{kept}
        url = f"http://{{args.sglang_router_ip}}:{{args.sglang_router_port}}/generate"
        out = await post(url, {{"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}})
        rows = out["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[row[1] for row in rows], log_probs=[row[0] for row in rows], meta_info=out["meta_info"]
        )
        assert own is sample.{kept}
        sample.{kept} = own
        sample.reward = 1.0
        return sample
    """
    assert reward_of(tmp_path, source) == 1.0


COPIES = [
    "deepcopy(args)",
    "copy(args)",
    "type(args)(**vars(args))",
    "pickle.loads(pickle.dumps(args))",
]


@pytest.mark.parametrize("made", COPIES)
def test_what_is_set_on_args_survives_copies(made, tmp_path):
    source = f"""
    async def generate(args, sample, sampling_params):
        args.workers = 3
        setattr(args, "note", {{"a": 1}})
        own = {made}
        assert (own.workers, own.note["a"], own.max_turns) == (3, 1, 4)
        assert "workers" in own and "workers" in vars(own)
        assert not hasattr(own, "absent") and getattr(own, "absent", 5) == 5
        del own.workers
        assert not hasattr(own, "workers") and args.workers == 3
        sample = await one_reply(args, sample, sampling_params)
        sample.reward = 1.0
        return sample
    """
    assert reward_of(tmp_path, source) == 1.0


def test_args_that_files_read(tmp_path):
    source = """
    async def generate(args, sample, sampling_params):
        for key in ("rollout_max_context_len", "rollout_max_prompt_len", "rollout_max_response_len", "max_tokens_per_gpu"):
            assert getattr(args, key) > 0
        assert args.context_parallel_size * args.max_tokens_per_gpu == args.rollout_max_context_len == 900
        assert args.chat_template_path is None and args.apply_chat_template
        sample = await one_reply(args, sample, sampling_params)
        sample.reward = 1.0
        return sample
    """
    assert reward_of(tmp_path, source, context=900) == 1.0


REWARDS = [
    "async def judge(args, sample, **options):\n    return 0.5 * (sample.label == '7')",
    "async def judge(args, samples, **options):\n    return 0.5 * (samples.label == '7')",
    "async def judge(a, s):\n    return 0.5 * (s.label == '7')",
    "async def judge(*both):\n    return 0.5 * (both[1].label == '7')",
    "def judge(configuration, given):\n    return 0.5 * (given.label == '7')",
]


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("use", ["slime:generate", "user.py:generate"])
def test_a_reward_is_called_by_position(reward, use, tmp_path):
    source = (
        reward
        + "\n\nasync def generate(args, sample, sampling_params):\n    return await one_reply(args, sample, sampling_params)"
    )
    assert reward_of(tmp_path, source, use, args={"custom_rm_path": "user.py:judge"}) == 0.5


def test_a_reward_of_an_interaction_environment_is_called_by_position(tmp_path):
    source = """
    class Told:
        def step(self, text):
            return {"role": "user", "content": "done"}, True, {}

    def build_env(s, configuration):
        return Told()

    async def judge(configuration, given):
        return 0.5 * (given.label == "7")
    """
    assert (
        reward_of(tmp_path, source, "user.py:build_env", args={"custom_rm_path": "user.py:judge"})
        == 0.5
    )


def test_a_list_of_samples_is_rewarded_in_one_call(tmp_path):
    source = """
    async def generate(args, sample, sampling_params):
        both = [await one_reply(args, deepcopy(sample), sampling_params) for _ in range(2)]
        both[0].reward = 3.0
        return both

    async def judge(args, samples):
        assert isinstance(samples, list)
        return [float(len(samples)) for _ in samples]
    """
    found = played(tmp_path, source, replies=["a", "b"], args={"custom_rm_path": "user.py:judge"})
    assert found.error is None, found.error
    assert sorted(row.reward for row in found.samples()) == [1.0, 3.0]
    wrong = source.replace("return [float(len(samples)) for _ in samples]", "return 1.0")
    found = played(
        tmp_path / "b", wrong, replies=["a", "b"], args={"custom_rm_path": "user.py:judge"}
    )
    assert "returns as many rewards" in found.error.message


STATUSES = [
    ("completed", "done", 1.0),
    ("COMPLETED", "done", 1.0),
    ("truncated", "env_truncated", 1.0),
    ("own", "done", 1.0),
]


@pytest.mark.parametrize(("status", "stop", "reward"), STATUSES)
def test_a_status_may_be_text(status, stop, reward, tmp_path):
    source = f"""
    async def generate(args, sample, sampling_params):
        made = await one_reply(args, sample, sampling_params)
        return Sample(
            prompt=made.prompt, tokens=made.tokens, response=made.response, reward=1.0, loss_mask=made.loss_mask,
            response_length=made.response_length, status={status!r},
        )
    """
    found = played(tmp_path, source)
    assert found.error is None, found.error
    assert (str(found.stop), found.reward) == (stop, reward)


@pytest.mark.parametrize("status", ["Sample.Status.ABORTED", "'aborted'"])
def test_an_aborted_sample_has_no_reward(status, tmp_path):
    source = f"""
    async def generate(args, sample, sampling_params):
        sample = await one_reply(args, sample, sampling_params)
        sample.status, sample.reward = {status}, 1.0
        return sample
    """
    found = played(tmp_path, source)
    assert (str(found.stop), found.reward, found.error) == ("aborted", None, None)


DOTTED = {
    "load_function": 'from slime.utils.misc import load_function\nplay = load_function("games.deal.table.play")',
    "importlib": 'import importlib\nplay = importlib.import_module("games.deal.table").play',
    "import_module": 'from importlib import import_module\nplay = import_module("games.deal.table").play',
    "relative": 'import importlib\nplay = importlib.import_module(".table", __package__).play',
    "a statement": "from games.deal.table import play",
    "a file": (
        "import importlib.util\nfrom pathlib import Path\n"
        'spec = importlib.util.spec_from_file_location("own", Path(__file__).parent / "table.py")\n'
        "own = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(own)\nplay = own.play"
    ),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", DOTTED)
def test_modules_of_the_users_tree_are_found(way, late, tmp_path):
    lines = textwrap.indent(DOTTED[way], "    ") if late else ""
    rollout = (
        ("" if late else DOTTED[way])
        + "\n\nasync def generate(args, sample, sampling_params):\n"
        + lines
        + "\n    return await play(args, sample, sampling_params)\n"
    )
    table = (
        HEAD
        + "\nplay_count = 0\n\nasync def play(args, sample, params):\n    sample = await one_reply(args, sample, params)\n    sample.reward = 1.0\n    return sample\n"
    )
    files = {
        "games/deal/rollout.py": rollout,
        "games/deal/table.py": table,
        "games/__init__.py": "",
        "games/deal/__init__.py": "",
    }
    assert reward_of(tmp_path, "", "games/deal/rollout.py:generate", files=files) == 1.0


def test_without_packages_dotted_paths_are_found_too(tmp_path):
    rollout = (
        DOTTED["load_function"]
        + "\n\nasync def generate(args, sample, sampling_params):\n    return await play(args, sample, sampling_params)\n"
    )
    table = (
        HEAD
        + "\nasync def play(args, sample, params):\n    sample = await one_reply(args, sample, params)\n    sample.reward = 1.0\n    return sample\n"
    )
    files = {"games/deal/rollout.py": rollout, "games/deal/table.py": table}
    assert reward_of(tmp_path, "", "games/deal/rollout.py:generate", files=files) == 1.0


def test_a_module_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"games\.nowhere"):
        played(
            tmp_path,
            'from slime.utils.misc import load_function\nplay = load_function("games.nowhere.play")',
        )


PROMPTS = [
    ("3", str),
    (3, str),
    ([{"role": "user", "content": "3"}], list),
    (
        [
            {"role": "user", "content": "3"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "5"},
        ],
        list,
    ),
]


@pytest.mark.parametrize(("prompt", "kind"), PROMPTS)
def test_without_the_chat_template_the_prompt_is_the_rows(prompt, kind, tmp_path):
    source = f"""
    async def generate(args, sample, sampling_params):
        assert type(sample.prompt) is {kind.__name__}, type(sample.prompt)
        sample.prompt = "Task " + str(sample.prompt[0])
        sample = await one_reply(args, sample, sampling_params)
        sample.reward = 1.0
        return sample
    """
    assert (
        reward_of(
            tmp_path, source, row={"prompt": prompt}, args={"args": {"apply_chat_template": False}}
        )
        == 1.0
    )


COPIED = """
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.processing_utils import load_processor, load_tokenizer

    async def generate(args, sample, sampling_params):
        args.tokenizer, args.state = load_tokenizer(args.hf_checkpoint), GenerateState(args)
        args.made = {"tokenizer": args.tokenizer, "processor": load_processor(args.hf_checkpoint)}
        own = deepcopy(args)
        assert own.made["tokenizer"].encode("ab") == own.state.tokenizer.encode("ab") == args.tokenizer.encode("ab")
        assert own.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        sample = await one_reply(own, deepcopy(sample), sampling_params)
        sample.reward = 1.0
        return sample
"""


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_args_that_have_a_tokenizer_are_copied(package, tmp_path):
    assert reward_of(tmp_path, COPIED.replace("slime", package)) == 1.0


RETOLD = """
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post

    def delta(tokenizer, messages, lead):
        now = tokenizer.apply_chat_template(messages, tokenize=False)
        before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=lead)
        return tokenizer.encode(now[len(before):], add_special_tokens=False)

    async def generate(args, sample, sampling_params):
        tokenizer = GenerateState(args).tokenizer
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        messages = [{"role": "user", "content": "Go."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids, mask = [], []
        for number in range(2):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            out = await post(url, {"text": text, "sampling_params": sampling_params})
            messages.append({"role": "assistant", "content": REPLY})
            cut = LEAD or not number
            new = delta(tokenizer, messages, cut)
            head = 0 if cut else len(tokenizer.encode("<|im_start|>assistant\\n"))
            ids, mask = ids + new, mask + [0] * head + [1] * (len(new) - head)
            messages.append({"role": "user", "content": f"more {number}"})
            new = delta(tokenizer, messages, False)
            ids, mask = ids + new, mask + [0] * len(new)
        start = tokenizer.encode(sample.prompt, add_special_tokens=False)
        return Sample(
            prompt=sample.prompt, tokens=start + ids, response="", response_length=len(ids), loss_mask=mask, reward=0.5,
            status="completed",
        )
"""


@pytest.mark.parametrize("lead", ["False", "True"])
def test_a_row_that_is_built_from_texts_trains_what_was_sampled(lead, tmp_path):
    """The template's line break after a reply is not trained, though its loop masks it. Without the opening of the second reply in
    the row, that reply is trained in the context that the engine had."""
    source = RETOLD.replace("REPLY", 'out["text"].removesuffix("<|im_end|>")').replace("LEAD", lead)
    found = played(tmp_path, source, replies=["one", "two"])
    assert (found.error, found.reward) == (None, 0.5)
    (row,) = found.samples()
    trained = [one for one, weight in zip(row.ids, row.weights, strict=True) if weight]
    assert tw.byte_renderer().decode(trained) == "one<|im_end|>two<|im_end|>"
    assert found.metrics["blank_ids_not_trained"] == 2
    assert found.metrics.get("replies_in_other_contexts", 0) == (1 if lead == "True" else 0)
    assert (
        tw.byte_renderer()
        .decode(found.prompt_ids(1))
        .endswith("more 0<|im_end|>\n<|im_start|>assistant\n")
    )


def test_a_reply_that_was_changed_is_still_an_error(tmp_path):
    source = RETOLD.replace("REPLY", '"another"').replace("LEAD", "True")
    found = played(tmp_path, source, replies=["one", "two"])
    assert "the engine did not sample that id" in found.error.message
    assert found.reward is None
