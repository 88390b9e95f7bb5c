"""The errors strop raises on purpose. Each message says what is wrong, with which value, and what to do about it."""

from __future__ import annotations


class StropError(Exception):
    """Base of every error raised on purpose; the command line prints it without a traceback."""


class ConfigError(StropError, ValueError):
    """The request cannot be run as written. `problems` holds one sentence for each mistake, all found at once."""

    def __init__(self, *problems: str) -> None:
        if not problems:
            raise TypeError("a ConfigError needs at least one sentence that says what is wrong")
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(StropError, ValueError):
    """A task, a file of tasks or a sequence made from one cannot be used; the message names it."""


class RolloutError(StropError, RuntimeError):
    """Sampling or an environment failed beyond the declared budget of failures."""


class EngineError(StropError, RuntimeError):
    """A training backend was asked for something that it cannot do, or broke its contract."""


class CheckpointError(StropError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class WireError(StropError, RuntimeError):
    """A request or an answer on the wire breaks the protocol."""
