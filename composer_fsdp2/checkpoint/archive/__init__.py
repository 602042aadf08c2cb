"""The bytes of a ``torch.save`` archive: the offset of each record, and its CRC32."""
