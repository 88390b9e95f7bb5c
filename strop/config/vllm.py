"""How a vLLM sampler is started or reached."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strop.config.section import NonNegative, Positive, Section


class VllmConfig(Section):
    """vLLM in a process, and a Python, of its own; read by sampler.kind vllm."""

    python: str = ""
    """The Python of an environment that has vLLM, like ~/vllm/bin/python: strop starts a process with it."""
    address: str = ""
    """HOST:PORT of a process that was started by hand, with python serve_vllm.py --listen; instead of `python`."""
    key_file: str = ""
    """With `address`: a file whose text both ends know. The other end is asked to prove it, and asks too."""
    max_model_len: NonNegative = 0
    """Positions of one request at the most, prompt included; 0 takes the model's."""
    tensor_parallel: Positive = 1
    """Devices that hold one copy of the model together."""
    eager: bool = True
    """Run layers as they are. false lets vLLM compile them first, which takes minutes, and is faster afterwards."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Stop when vLLM is not ready after so long."""
