"""Resolve algorithm settings: the recipe's keys, else the algorithm's values."""

from __future__ import annotations

from turnwise.config import TrainConfig
from turnwise.config.schema import algorithm_error
from turnwise.config.validation import conflicting_keys
from turnwise.errors import ConfigError
from turnwise.training.algorithms import cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, reinforce_pp_baseline, rloo
from turnwise.training.algorithms.custom import load_custom
from turnwise.training.loss import Algorithm, AlgorithmSettings

BUILT_IN: dict[str, Algorithm] = {
    module.ALGORITHM.name: module.ALGORITHM
    for module in (grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, gspo, cispo)
}


def resolve_settings(config: TrainConfig) -> AlgorithmSettings:
    """Resolve every key: the recipe's value if set, else the algorithm's.

    Raises:
        ConfigError: for an unknown or invalid algorithm, or keys that exclude each other.
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
                f"train.kl_estimator = {estimator!r}: {chosen.name} subtracts KL from the reward, which needs k1; set "
                'train.kl_in = "loss" to use it in the loss'
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
    notes = []
    for key in chosen.defining:
        configured, own = getattr(config, key), getattr(chosen, key)
        if configured is not None and configured != own:
            notes.append(f"train.{key} = {configured!r} replaces {chosen.name}'s own {own!r}, which defines the algorithm")
    if config.kl and estimator == "k1" and place == "loss":
        notes.append(
            'train.kl_estimator = "k1" in the loss has a mean gradient of 0, so it constrains nothing; use k2, or '
            'kl_in = "reward"'
        )
    return notes
