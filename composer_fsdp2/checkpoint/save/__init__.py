"""A sharded state as one file that ``torch.load`` reads, written by all ranks together."""
