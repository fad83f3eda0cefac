"""ms-swift's GRPO trainer on a Turnwright environment: a plugin of its rollout server, which also
writes the rows.

    python recipes/integrations/swift_plugin.py data/hop
    swift rollout --model MODEL --external_plugins recipes/integrations/swift_plugin.py \
        --multi_turn_scheduler turnwright --vllm_use_async_engine true --max_turns 6
    swift rlhf --rlhf_type grpo --model MODEL --dataset data/hop/train.jsonl --use_vllm true \
        --vllm_mode server --vllm_server_pass_dataset true --use_gym_env true ...

ENV names the environment (hop), in both. Needs `pip install ms-swift` (its scheduler
was tried: 4.6.0) and GPUs.
"""

import json
import os
import sys
from pathlib import Path

from turnwright_compat.swift.rollout import SwiftEpisodes, make_scheduler

episodes = SwiftEpisodes(
    os.environ.get("ENV", "hop"), n_tasks=4096, n_eval=256, out="runs/swift/episodes"
)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval"):
        rows = (json.dumps(row) + "\n" for row in episodes.rows(split))
        (folder / f"{split}.jsonl").write_text("".join(rows))
else:
    from swift.rollout.multi_turn import multi_turns

    multi_turns["turnwright"] = make_scheduler(episodes)
