"""What every rank imports before it is forked, once for all of them."""

from strop.engines.fsdp2 import engine

__all__ = ["engine"]
