"""Detect damage of a checkpoint, and compare it with another one."""
