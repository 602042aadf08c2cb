"""Convert a checkpoint to another layout: plan, then copy."""
