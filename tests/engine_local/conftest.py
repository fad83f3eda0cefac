"""One thread, as the application sets it: the promise of equal bits is made for that."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
