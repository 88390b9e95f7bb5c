"""What holds for every test: one thread, fixed seeds, nothing fetched, no clock in the verdict."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

# Before torch and the Hugging Face libraries are imported: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import hypothesis
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a module of kernels is imported: they run on the CPU then

torch.set_num_threads(1)
torch.set_num_interop_threads(1)

# Examples are the same on every machine and in every run; a slow machine fails no test.
hypothesis.settings.register_profile("strop", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("strop")


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Each test starts from the same random state, and leaves torch's global settings as it found them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    assert torch.get_default_dtype() == dtype, "the test changed torch's default dtype"
    assert torch.is_grad_enabled(), "the test left gradients switched off"
    torch.set_num_threads(threads)
