"""A step that is traced without a GPU: tensors without values, storages that are alive, operators that are counted."""
