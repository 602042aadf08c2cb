"""From a model and a configuration to a sharded model: decide, agree, apply."""
