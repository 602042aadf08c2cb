"""The bytes of an archive of ``torch.save``: where its records lie, and their CRC32s."""
