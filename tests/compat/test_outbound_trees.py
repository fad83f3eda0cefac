"""Our rollouts inside slime's and Miles' own code, which has no package:
`TURNWRIGHT_TREES=FOLDER make test-compat`.

FOLDER has the checkouts `slime` and `miles`. What they import of packages with kernels (SGLang,
Megatron) is replaced by mocks.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
from kit import originals
from kit.outbound import LIMITS, Calls, Letters, check_row, make_model, run

from turnwright.renderers import load_renderer
from turnwright_compat.slime.rollout import SlimeEpisodes, make_generate
from turnwright_serve import make_service
from turnwright_serve.server import JsonHttpServer

pytestmark = pytest.mark.compat
TREES = os.environ.get("TURNWRIGHT_TREES", "")
MOCKED = ("sglang", "sglang_router", "megatron", "miles_plugins")


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of packages with kernels."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MOCKED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = MagicMock(name=spec.name)
        made.__path__, made.__spec__, made.__name__ = [], spec, spec.name
        return made

    def exec_module(self, module):
        pass


@pytest.fixture(params=["slime", "miles"])
def tree(request, monkeypatch):
    """The package from its checkout; gone again afterwards."""
    originals.use()
    if not (Path(TREES) / request.param / request.param).is_dir():
        pytest.skip(f"no checkout of {request.param}; give TURNWRIGHT_TREES")
    monkeypatch.syspath_prepend(str(Path(TREES) / request.param))
    mocks = Mocks()
    sys.meta_path.append(mocks)
    yield request.param
    sys.meta_path.remove(mocks)
    for name in list(sys.modules):
        if name.partition(".")[0] in (request.param, *MOCKED):
            del sys.modules[name]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


def arguments(path, port):
    """What of the trainer's arguments a rollout reads."""
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_response_len": 64,
        "max_context_len": None,
    }
    rollout = {f"rollout_{name}": value for name, value in sampling.items()}
    names = (
        "rollout_stop",
        "rollout_stop_token_ids",
        "custom_rm_path",
        "rm_type",
        "reward_key",
        "chat_template_path",
    )
    return Namespace(
        hf_checkpoint=str(path),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        sglang_router_policy=None,
        sglang_server_concurrency=8,
        sglang_dp_size=1,
        rollout_num_gpus=1,
        eval_num_gpus=0,
        rollout_num_gpus_per_engine=1,
        rollout_skip_special_tokens=False,
        rollout_seed=0,
        n_samples_per_prompt=2,
        use_distributed_post=False,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        group_rm=False,
        custom_generate_function_path="generate_of_the_test.generate",
        ci_test=False,
        **rollout,
        **dict.fromkeys(names),
    )


def played(name, args, samples):
    """Play a group by the trainer's own functions."""
    importlib.import_module(f"{name}.utils.http_utils").init_http_client(args)
    if name == "slime":
        rollout = importlib.import_module("slime.rollout.sglang_rollout")
        state = rollout.GenerateState(args)
        return rollout.generate_and_rm_group(args, samples, state.sampling_params.copy())
    rollout = importlib.import_module("miles.rollout.inference_rollout.inference_rollout_common")
    state = rollout.GenerateState(args)
    return rollout.generate_and_rm_group(state, samples, state.sampling_params.copy())


def test_a_group_is_generated_by_the_trainers_own_functions(tree, path, monkeypatch):
    renderer, calls = load_renderer(path), Calls()
    episodes = SlimeEpisodes(Letters, n_tasks=1, limits=LIMITS)
    module = ModuleType("generate_of_the_test")
    module.generate = make_generate(episodes)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sample_class = importlib.import_module(f"{tree}.utils.types").Sample
    (row,) = episodes.rows()
    samples = [sample_class(index=at, group_index=0, **row) for at in range(2)]

    async def work():
        app, engine = make_service(path, context=512, device="cpu")
        sample = engine.generate

        async def generate_without(request):
            request.banned_ids = frozenset(renderer.invalid_ids)
            found = await sample(request)
            calls.add(request.session, request.ids, found.ids, found.logprobs)
            return found

        engine.generate = generate_without
        # Its client sends no key.
        server = JsonHttpServer(app.routes("sglang"), host="127.0.0.1", port=0, keyless=True)
        await server.start()
        try:
            return await played(tree, arguments(path, server.port), samples)
        finally:
            await server.close()
            await engine.close()

    group = run(work())
    assert len(group) == 2
    for sample in group:
        start = len(sample.tokens) - sample.response_length
        columns = (
            sample.tokens[:start],
            sample.tokens[start:],
            sample.loss_mask,
            sample.rollout_log_probs,
        )
        assert len(check_row(calls, *columns)) == 2
        assert sample.get_reward_value(Namespace(reward_key=None)) == pytest.approx(
            sum(sample.metadata["turnwright"]["rewards"])
        )
        assert sample.status in (sample_class.Status.COMPLETED, sample_class.Status.TRUNCATED)
        check = sample._validate_response_metadata_lengths if tree == "slime" else sample.validate
        check()
        assert sample_class.from_dict(sample.to_dict()).tokens == sample.tokens
    assert len({session for session, *_ in calls.found}) == 2
    print(
        f"{tree}: 2 episodes, {sum(len(ids) for _, _, ids, _ in calls.found)} sampled ids, all "
        "trained once"
    )
