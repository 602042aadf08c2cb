"""Damage of a checkpoint, and differences from another one."""
