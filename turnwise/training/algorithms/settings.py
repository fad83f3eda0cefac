"""From what a recipe says to what is done: the algorithm's values where the recipe is silent, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turnwise.config import TrainConfig
from turnwise.config.schema import algorithm_error
from turnwise.config.validation import conflicting_keys
from turnwise.errors import ConfigError
from turnwise.training.algorithms import cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, reinforce_pp_baseline, rloo
from turnwise.training.algorithms.base import Advantage, Aggregation, Algorithm, Estimator
from turnwise.training.algorithms.custom import load_custom

BUILT_IN: dict[str, Algorithm] = {
    module.ALGORITHM.name: module.ALGORITHM
    for module in (grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, gspo, cispo)
}


@dataclass(frozen=True, slots=True)
class AlgorithmSettings:
    """An algorithm with every key decided."""

    algorithm: Algorithm
    advantage: Advantage
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    kl_estimator: Estimator
    kl_in: Literal["loss", "reward"]
    refill: int = 0
    notes: tuple[str, ...] = ()
    """What a person should hear: keys that take away what the algorithm is known for."""


def resolve_settings(config: TrainConfig) -> AlgorithmSettings:
    """Decide every key: the recipe's value where it has one, else the algorithm's.

    Raises:
        ConfigError: for an algorithm that is not known or not fit, or keys that exclude each other.
    """
    if found := conflicting_keys(config):
        key, why = found
        raise ConfigError(f"train.{key} = {getattr(config, key)!r} {why}")
    chosen = BUILT_IN.get(config.algorithm)
    if chosen is None:
        if wrong := algorithm_error(config.algorithm):
            raise ConfigError(f"train.algorithm = {config.algorithm!r}: {wrong}")
        chosen = load_custom(config.algorithm)
    estimator, place = config.kl_estimator or chosen.kl_estimator, config.kl_in or chosen.kl_in
    if place == "reward" and estimator != "k1":
        if config.kl_estimator is not None:
            raise ConfigError(
                f"train.kl_estimator = {estimator!r}: {chosen.name} takes KL off the reward, which is k1; set "
                'train.kl_in = "loss" to have it in the loss'
            )
        estimator = "k1"
    return AlgorithmSettings(
        chosen,
        config.advantage or chosen.advantage,
        config.aggregation or chosen.aggregation,
        chosen.clip_low if config.clip_low is None else config.clip_low,
        chosen.clip_high if config.clip_high is None else config.clip_high,
        estimator,
        place,
        chosen.refill if config.refill is None else config.refill,
        tuple(_notes(config, chosen, estimator, place)),
    )


def _notes(config: TrainConfig, chosen: Algorithm, estimator: str, place: str) -> list[str]:
    told = []
    for key in chosen.defining:
        said, own = getattr(config, key), getattr(chosen, key)
        if said is not None and said != own:
            told.append(
                f"train.{key} = {said!r} stands in place of {chosen.name}'s own {own!r}, which is part of what sets it apart"
            )
    if config.kl and estimator == "k1" and place == "loss":
        told.append(
            'train.kl_estimator = "k1" in the loss: its gradient is 0 on average, so it holds nothing back; k2 in the loss or '
            'kl_in = "reward" do'
        )
    return told
