"""One thread per test process: two of them share two cores, and thread counts change bits."""

import torch

torch.set_num_threads(1)
