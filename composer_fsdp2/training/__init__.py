"""What happens around a step of a sharded model."""
