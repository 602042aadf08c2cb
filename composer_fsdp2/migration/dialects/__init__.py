"""The systems whose configurations are read and written. To add one, add a file here and an entry to this list."""

from composer_fsdp2.migration.dialect import Dialect
from composer_fsdp2.migration.dialects.composer import ComposerDialect
from composer_fsdp2.migration.dialects.huggingface import AxolotlDialect, HuggingFaceDialect
from composer_fsdp2.migration.dialects.roll import RollDialect
from composer_fsdp2.migration.dialects.torchtitan import TorchTitanDialect

__all__ = ["DIALECTS"]

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        ComposerDialect(),
        HuggingFaceDialect(),
        AxolotlDialect(),
        RollDialect(),
        TorchTitanDialect(),
    )
}
