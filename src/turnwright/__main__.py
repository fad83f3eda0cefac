"""`python -m turnwright`, which is what torchrun starts:
`torchrun --nproc-per-node 2 -m turnwright train recipe.toml`."""

from turnwright.cli.main import entry

if __name__ == "__main__":
    entry()
