"""Whether a run trains on FSDP2 as on FSDP1: the same file on both, side by side, with a verdict and a report."""
