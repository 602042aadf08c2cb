"""Checkpoints: what is on disk, into a sharded model, into another layout, and whether it can be trusted."""
