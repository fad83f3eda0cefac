"""Real TRL trains on our rollouts. `make test-compat`."""

import os
import random

import pytest
import torch
from kit import originals
from test_trl import LIMITS, WORDS, Letters
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwright.config import ModelConfig
from turnwright.training import create_tiny_model
from turnwright_compat.trl.rollout import TurnwrightRollout, turnwright_reward

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def trl():
    originals.use()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return pytest.importorskip("trl")


def make_trainer(trl, folder, seed, reward, steps=20):
    torch.manual_seed(seed)
    path = create_tiny_model(ModelConfig(hidden=64, layers=2), WORDS, folder / "model", seed=seed)
    play = TurnwrightRollout(Letters, n_tasks=32, limits=LIMITS, seed=seed)
    args = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=32,
        num_generations=8,
        max_steps=steps,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=seed,
        beta=0.0,
        use_cpu=True,
        disable_tqdm=True,
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    return trl.GRPOTrainer(
        model,
        reward,
        args,
        train_dataset=play.dataset(),
        processing_class=tokenizer,
        rollout_func=play,
    ), play


def rewards_of(trl, folder, seed, shuffled):
    """The mean reward of each step; its lengths are held to ours."""
    sampled = []

    def reward(completions, turnwright_trajectory, **kwargs):
        sampled.append(
            sum(t.sampled_tokens for t in turnwright_trajectory) / len(turnwright_trajectory)
        )
        found = turnwright_reward(completions, turnwright_trajectory, **kwargs)
        if shuffled:
            random.Random(len(sampled)).shuffle(found)
        return found

    trainer, _ = make_trainer(trl, folder, seed, reward)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["completions/mean_length"] for row in rows] == pytest.approx(sampled)
    assert all("turnwright/turns" in row for row in rows)
    return [row["reward"] for row in rows]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises_and_with_shuffled_rewards_it_does_not(trl, tmp_path, seed):
    gains = {}
    for name, shuffled in (("right", False), ("shuffled", True)):
        rewards = rewards_of(trl, tmp_path / name, seed, shuffled)
        assert len(rewards) == 20
        gains[name] = sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5
    print(f"seed {seed}: reward of the last five steps less the first five: {gains}")
    assert gains["right"] > 0.15
    assert gains["shuffled"] < gains["right"] / 2


def test_the_gradient_does_not_depend_on_what_was_not_sampled(trl, tmp_path, monkeypatch):
    trainer, play = make_trainer(trl, tmp_path, 0, turnwright_reward)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions(
        [dict(row) for row in list(play.dataset())[:4] for _ in range(8)]
    )
    written = inputs["completion_mask"]
    mask = written * inputs["tool_mask"]
    assert 0 < int(mask.sum()) < int(written.sum())

    def gradient(altered):
        """The gradient where the targets of some completion ids are others; what
        the model reads stays."""
        real = trainer.model.forward

        def forward(*args, labels=None, **kwargs):
            labels = labels.clone()
            part = labels[:, -altered.shape[1] :]
            part[altered.bool()] = (part[altered.bool()] + 7) % trainer.model.config.vocab_size
            return real(*args, labels=labels, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(trainer.model, "forward", forward)
            trainer.model.zero_grad()
            trainer.compute_loss(trainer.model, inputs).backward()
        return torch.cat(
            [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        )

    plain = gradient(torch.zeros_like(mask))
    assert float(plain.abs().max()) > 0
    assert torch.equal(plain, gradient(written - mask))
    assert not torch.equal(plain, gradient(mask))
