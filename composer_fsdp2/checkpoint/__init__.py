"""Checkpoints: inspect them, load them into a sharded model, convert them to another layout, save and verify them."""
