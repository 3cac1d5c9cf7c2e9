"""Reinforcement learning of language-model agents through the harness that will be deployed."""

__version__ = "0.1.0"
