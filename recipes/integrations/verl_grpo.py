"""verl's trainer on a Turnwright environment: rows and the file of agent loops, then verl's own
program.

    python recipes/integrations/verl_grpo.py data/hop --env hop
    python -m verl.trainer.main_ppo data.train_files=data/hop/train.parquet \
        data.val_files=data/hop/eval.parquet \
        actor_rollout_ref.rollout.agent.agent_loop_config_path=data/hop/agent_loops.yaml ...

Needs `pip install verl` (its loop was tried: 0.9.1) and GPUs.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset

from turnwright_compat.verl.rollout import VerlEpisodes

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--env", default="hop")
parser.add_argument("--tasks", type=int, default=4096)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

settings = {"env": args.env, "n_tasks": args.tasks, "n_eval": 256, "seed": args.seed}
episodes = VerlEpisodes(**settings)
args.folder.mkdir(parents=True, exist_ok=True)
for split in ("train", "eval"):
    Dataset.from_list(episodes.rows(split)).to_parquet(args.folder / f"{split}.parquet")
loop = {
    "name": "turnwright",
    "_target_": "turnwright_compat.verl.rollout.TurnwrightAgentLoop",
    **settings,
}
(args.folder / "agent_loops.yaml").write_text(json.dumps([loop], indent=2))  # JSON is YAML
