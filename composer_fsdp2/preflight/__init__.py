"""Plan a user's run without GPUs: read its file, build the model without weights, plan it, and report assumptions."""
