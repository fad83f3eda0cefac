"""`python -m turnwise`, which is what torchrun starts: `torchrun --nproc-per-node 2 -m turnwise train recipe.toml`."""

import sys

from turnwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
