"""What happens around the steps of a sharded model: microbatches, clipping, full parameters, guards and votes."""
