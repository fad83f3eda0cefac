"""Our rollouts as a rollout function of TRL: what it is given, without TRL itself.

With TRL: test_trl_original.py.
"""

import asyncio
import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import turnwright as tw
from turnwright.config import LoraConfig, ModelConfig
from turnwright.engines.local import fingerprint
from turnwright.errors import UsageError
from turnwright.renderers import byte_renderer
from turnwright.training import create_tiny_model
from turnwright_compat.trl.rollout import TASK, TurnwrightRollout, turnwright_reward


class Letters(tw.Env):
    """Two turns; the reward is the share of letters from a to m among those
    that the model wrote."""

    def reset(self, task, *, seed=None):
        if task.id == "broken":
            raise ConnectionError("no route to the world")
        self.left, self.good, self.letters = 2, 0, 0

    def step(self, action):
        letters = [char for char in action.raw.lower() if char.isalpha()]
        self.good += sum(char <= "m" for char in letters)
        self.letters += len(letters)
        self.left -= 1
        done = self.left == 0
        return tw.Step(
            "More.", reward=self.good / max(self.letters, 1) if done else 0.0, terminated=done
        )

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"Write letters {i}.", id=str(i)) for i in range(n)]


WORDS = ["alpha kilo tango zulu", "sierra delta mike", "Write letters 1234567890. More."] * 20
LIMITS = tw.Limits(turns=2, turn_tokens=12, on_turn_length="continue")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return create_tiny_model(
        ModelConfig(hidden=32, layers=1), WORDS, tmp_path_factory.mktemp("model") / "m"
    )


def trainer_of(path, model=None, step=0):
    """What of TRL's trainer a rollout function reads."""
    model = model or AutoModelForCausalLM.from_pretrained(path)
    args = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0)
    accelerator = SimpleNamespace(unwrap_model=lambda one: one, process_index=0)
    state = SimpleNamespace(global_step=step)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return SimpleNamespace(
        model=model, args=args, accelerator=accelerator, state=state, processing_class=tokenizer
    )


def prompts_of(play, samples=2):
    return [copy.deepcopy(row["prompt"]) for row in play.rows() for _ in range(samples)]


def test_a_row_holds_every_sampled_id_once_in_the_order_of_the_prompts(path):
    play = TurnwrightRollout(Letters, n_tasks=3, limits=LIMITS)
    found = play(prompts_of(play), trainer_of(path))
    assert [t.task.id for t in play.last] == ["0", "0", "1", "1", "2", "2"]
    for number, trajectory in enumerate(play.last):
        (row,) = trajectory.samples()
        assert found["prompt_ids"][number] + found["completion_ids"][number] == row.ids
        assert sum(found["env_mask"][number]) == trajectory.sampled_tokens > 0
        sampled = [
            p
            for p, mask in zip(found["logprobs"][number], found["env_mask"][number], strict=True)
            if mask
        ]
        assert sampled == [p for p in row.logprobs if p is not None]
        assert 0 in found["env_mask"][number], "the observation is not trained"
    assert len({tuple(ids) for ids in found["completion_ids"]}) == 6, (
        "samples of a task have seeds of their own"
    )
    assert turnwright_reward([], found["turnwright_trajectory"]) == [t.reward for t in play.last]


def test_the_engine_has_the_trainers_weights_and_every_call_samples_anew(path):
    play, trainer = TurnwrightRollout(Letters, n_tasks=2, limits=LIMITS), trainer_of(path)
    first = play(prompts_of(play), trainer)["completion_ids"]
    assert play(prompts_of(play), trainer)["completion_ids"] != first
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.5 * torch.randn_like(weight)
    trainer.state.global_step = 1
    play(prompts_of(play), trainer)
    (trajectory, *_) = play.last
    (row,) = trajectory.samples()
    logits = trainer.model(torch.tensor([row.ids])).logits[0, :-1].detach()
    logprobs = tw.token_logprobs(logits, torch.tensor(row.ids[1:]), row.sampling)
    for at, logprob in enumerate(row.logprobs):
        assert logprob is None or abs(logprob - logprobs[at - 1]) < 1e-4
    assert {span.version for span in trajectory.spans if span.sampled} == {2}


def test_adapters_are_merged(path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = LoraConfig(rank=2)
    base = AutoModelForCausalLM.from_pretrained(path)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=config.rank, target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight += 0.1 * torch.randn_like(weight)
    play = TurnwrightRollout(Letters, n_tasks=1, limits=LIMITS)
    play(prompts_of(play), trainer_of(path, model))
    merged = copy.deepcopy(model).merge_and_unload()
    tied = {
        name: tensor for name, tensor in merged.state_dict().items() if name != "lm_head.weight"
    }
    assert asyncio.run(play._engine.update(tied.items(), 9)) == fingerprint(tied.items())
    plain = AutoModelForCausalLM.from_pretrained(path).state_dict()
    sent = dict(_sent(model))
    assert sent.keys() == tied.keys()
    for name, tensor in sent.items():
        assert torch.allclose(tensor, tied[name], atol=1e-6)
        assert ("q_proj" in name or "down_proj" in name) != torch.equal(tensor, plain[name])


def _sent(model):
    from turnwright_compat.trl.rollout import _weights

    return _weights(model)


def test_a_failed_episode_is_left_out_and_does_not_end_the_step(path):
    tasks = [tw.Task("Write.", id="fine"), tw.Task("Write.", id="broken")]
    play = TurnwrightRollout(Letters, tasks, limits=LIMITS)
    found = play(prompts_of(play, 1), trainer_of(path))
    rewards = turnwright_reward([], found["turnwright_trajectory"])
    assert rewards[0] is not None
    assert rewards[1] is None
    assert found["env_mask"][1] == [0]
    assert len(found["completion_ids"][1]) == len(found["logprobs"][1]) == 1


def test_prompts_of_another_dataset_and_episodes_of_several_rows_are_refused(path):
    play = TurnwrightRollout(Letters, n_tasks=1, limits=LIMITS)
    for prompt in (
        "Write.",
        [{"role": "user", "content": "Write."}],
        [{"role": "user", "content": "Write.", TASK: "7"}],
    ):
        with pytest.raises(UsageError, match=r"train_dataset=play\.dataset\(\)"):
            play([prompt], trainer_of(path))

    async def forks(task, model):
        await model.generate("One.")
        await model.generate("Two.")
        return 1.0

    play = TurnwrightRollout(
        forks,
        [tw.Task("Write.", id="0")],
        limits=LIMITS,
        engine=tw.ScriptedEngine(["a", "b"]),
        renderer=byte_renderer(),
    )
    with pytest.raises(UsageError, match="an episode of 2 rows"):
        play(prompts_of(play, 1), trainer_of(path))


def test_metrics_of_the_episodes_are_logged(path):
    play = TurnwrightRollout(Letters, n_tasks=2, limits=tw.Limits(turns=1, turn_tokens=4))
    found, logged = play(prompts_of(play), trainer_of(path)), {}
    turnwright_reward([], found["turnwright_trajectory"], log_metric=logged.__setitem__)
    assert logged.pop("turnwright/turns") == 1.0
    assert logged == {"turnwright/truncated": 1.0}
