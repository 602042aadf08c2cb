"""Save a sharded state as one file that ``torch.load`` reads. All ranks take part."""
