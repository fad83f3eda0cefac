"""slime's or Miles' trainer on a Turnwright environment: a module with the custom generate
function, and the rows.

    python recipes/integrations/slime_generate.py data/hop
    PYTHONPATH=recipes/integrations python train.py \
        --custom-generate-function-path slime_generate.generate \
        --prompt-data data/hop/train.jsonl --input-key prompt --label-key label \
        --metadata-key metadata ...

ENV names the environment (hop), in both. Needs slime or Miles, and GPUs.
"""

import json
import os
import sys
from pathlib import Path

from turnwright_compat.slime.rollout import SlimeEpisodes, make_generate

episodes = SlimeEpisodes(
    os.environ.get("ENV", "hop"), n_tasks=4096, n_eval=256, out="runs/slime/episodes"
)
generate = make_generate(episodes)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval"):
        rows = (json.dumps(row) + "\n" for row in episodes.rows(split))
        (folder / f"{split}.jsonl").write_text("".join(rows))
