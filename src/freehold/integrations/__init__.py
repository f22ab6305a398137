"""Thin adapters for other people's trainers. None yet: the runtime is used directly."""
