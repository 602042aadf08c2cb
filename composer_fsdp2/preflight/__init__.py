"""Plan a run without GPUs: a user's file -> a model without weights, its plan, and findings on substitutes."""
