"""TRL's GRPOTrainer on a Turnwright environment:
`python recipes/integrations/trl_grpo.py MODEL --env hop --steps 100`.

MODEL is a Hugging Face model directory; the checkpoint `warmed` of a Turnwright run is one. Needs
`pip install trl` (tried: 1.16.0).
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import turnwright as tw
from turnwright_compat.trl.rollout import TurnwrightRollout, turnwright_reward

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--env", default="hop")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--groups", type=int, default=16)
parser.add_argument("--group-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--out", default="runs/trl")
args = parser.parse_args()

play = TurnwrightRollout(
    args.env, n_tasks=4096, limits=tw.Limits(turns=6, turn_tokens=32), out=f"{args.out}/episodes"
)
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(args.model),
    turnwright_reward,
    GRPOConfig(
        output_dir=args.out,
        per_device_train_batch_size=args.groups * args.group_size,
        num_generations=args.group_size,
        max_steps=args.steps,
        learning_rate=args.lr,
        logging_steps=1,
        beta=0.0,
        report_to=[],
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=play.dataset(),
    processing_class=AutoTokenizer.from_pretrained(args.model),
    rollout_func=play,
)
trainer.train()
