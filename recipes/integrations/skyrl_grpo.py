"""SkyRL's trainer on a Turnwright environment, with the flags of SkyRL's own program.

    python recipes/integrations/skyrl_grpo.py --rows data/hop
    python recipes/integrations/skyrl_grpo.py data.train_data="['data/hop/train.parquet']" \
        trainer.policy.model.path=MODEL ...

ENV names the environment (hop), in both. Needs `pip install skyrl` (its generator
was tried: 0.3.0) and GPUs.
"""

import os
import sys
from pathlib import Path

from turnwright_compat.skyrl.rollout import SkyRLEpisodes, TurnwrightGenerator


def make_episodes() -> SkyRLEpisodes:
    """The same tasks for the rows and for the trainer: by number and seed."""
    return SkyRLEpisodes(
        os.environ.get("ENV", "hop"), n_tasks=4096, n_eval=256, out="runs/skyrl/episodes"
    )


def write_rows(folder: Path) -> None:
    from datasets import Dataset

    folder.mkdir(parents=True, exist_ok=True)
    episodes = make_episodes()
    for split in ("train", "eval"):
        Dataset.from_list(episodes.rows(split)).to_parquet(folder / f"{split}.parquet")


def train() -> None:
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return TurnwrightGenerator(make_episodes(), cfg, tokenizer, inference_engine_client)

    @ray.remote(num_cpus=1)
    def run(cfg):
        Experiment(cfg).run()

    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(run.remote(cfg))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rows"]:
        write_rows(Path(sys.argv[2]))
    else:
        train()
