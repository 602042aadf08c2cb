"""Who reads a file in Hugging Face's words, and which keys of it."""

import enum

from composer_fsdp2.config.rows import Row
from composer_fsdp2.migration.dialects.huggingface.places import DEGREES


class Reader(enum.StrEnum):
    """Who reads the file, and for which FSDP."""

    TRAINER_FSDP1 = "transformers 4.51.3"
    TRAINER_FSDP2 = "transformers 5"
    ACCELERATE_FSDP1 = "accelerate 1.8.1, FSDP1"
    ACCELERATE_FSDP2 = "accelerate 1.8.1, FSDP2"
    ACCELERATE_DEEPSPEED = "accelerate 1.8.1, DeepSpeed"
    AXOLOTL_FSDP1 = "axolotl, FSDP1"
    AXOLOTL_FSDP2 = "axolotl, FSDP2"

    @property
    def is_trainer(self) -> bool:
        """Whether it has a Trainer's arguments, of which axolotl makes one."""
        return self not in (Reader.ACCELERATE_FSDP1, Reader.ACCELERATE_FSDP2, Reader.ACCELERATE_DEEPSPEED)

    @property
    def is_transformers(self) -> bool:
        """Whether it is a Trainer by itself."""
        return self in (Reader.TRAINER_FSDP1, Reader.TRAINER_FSDP2)

    @property
    def is_axolotl(self) -> bool:
        return self in (Reader.AXOLOTL_FSDP1, Reader.AXOLOTL_FSDP2)

    @property
    def is_fsdp2(self) -> bool:
        return self in (Reader.TRAINER_FSDP2, Reader.ACCELERATE_FSDP2, Reader.AXOLOTL_FSDP2)


# For the tables, in which they stand in most rows.
T1, T2, A1, A2, AD, X1, X2 = Reader
NOBODY = "nobody"


def reads(reader: Reader, row: Row) -> bool:
    """Whether the system looks at the key; without a list all that know FSDP do."""
    return reader in row.read_by if row.read_by else reader is not AD or row.group == DEGREES
