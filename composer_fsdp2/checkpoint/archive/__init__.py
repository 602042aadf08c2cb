"""The bytes of an archive of ``torch.save``: the places of its records, and their CRC32s."""
