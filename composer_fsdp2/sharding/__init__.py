"""From a model and a configuration to a sharded model: plan, compare across ranks, apply."""
