"""`python -m turnwise`, which is what torchrun starts: `torchrun --nproc-per-node 2 -m turnwise train recipe.toml`."""

from turnwise.cli.main import entry

if __name__ == "__main__":
    entry()
