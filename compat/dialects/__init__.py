"""Other systems' configurations: where the section lies in a file, and what it asks of FSDP2."""

from composer_fsdp2.compat.dialects.base import Dialect, MappingEdit, Path, Reading, Run, Section
from composer_fsdp2.compat.dialects.composer import ComposerDialect
from composer_fsdp2.compat.dialects.huggingface import HuggingFaceDialect
from composer_fsdp2.compat.dialects.roll import RollDialect
from composer_fsdp2.compat.dialects.torchtitan import TorchTitanDialect

__all__ = ["DIALECTS", "Dialect", "MappingEdit", "Path", "Reading", "Run", "Section"]

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (ComposerDialect(), HuggingFaceDialect(), RollDialect(), TorchTitanDialect())
}
