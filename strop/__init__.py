"""Reinforcement-learning post-training for language models.

Import the parts from where they live (`strop.types`, `strop.loops.grpo`, `strop.engines.build`, ...): this file imports
nothing, so that a command line or a configuration tool starts at once.
"""
