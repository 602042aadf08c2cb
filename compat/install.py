"""Switch the drop-in on and off."""

import contextlib
import importlib.metadata
from collections.abc import Iterator

from composer_fsdp2.errors import IncompatibleVersionError

from .seams import Replacement, all_seams, put_back, replace

# The releases of Composer (the distribution mosaicml) whose seams were read and tested.
COMPOSER_VERSIONS = ("0.32.0", "0.32.1")

_installed: list[Replacement] = []


def install() -> None:
    """From here on Composer shards with ``fully_shard`` where it would have used FSDP1 (or its own FSDP2).

    ``Trainer(parallelism_config={'fsdp': ...})``, FSDPConfig and FSDP2Config objects, ``prepare_fsdp_module`` under
    each of its import paths, ``FSDP_VERSION=2`` and LLM Foundry's ``train_from_yaml`` all come here. Calling it again
    does nothing; ``uninstall`` undoes it. Call it on every rank, before the Trainer is made; it communicates nothing.

    Raises:
        IncompatibleVersionError: Composer is missing, or of a version that was not tested.
    """
    if _installed:
        return
    _check_version()
    _installed.extend(replace(all_seams()))


def uninstall() -> None:
    """Put back everything that ``install`` replaced; models that are sharded by then stay as they are."""
    put_back(_installed)
    _installed.clear()


def is_installed() -> bool:
    """Whether ``install`` is in force."""
    return bool(_installed)


@contextlib.contextmanager
def fsdp2() -> Iterator[None]:
    """``install`` for the length of a with block (and no longer than an ``install`` around it)."""
    outermost = not is_installed()
    install()
    try:
        yield
    finally:
        if outermost:
            uninstall()


def _check_version() -> None:
    try:
        version = importlib.metadata.version("mosaicml")
    except importlib.metadata.PackageNotFoundError as error:
        raise IncompatibleVersionError(
            "Composer (the package mosaicml) is not installed: pip install 'composer-fsdp2[composer]'"
        ) from error
    if version not in COMPOSER_VERSIONS:
        raise IncompatibleVersionError(
            f"mosaicml {version} is installed; composer_fsdp2 knows {', '.join(COMPOSER_VERSIONS)}: "
            f"pip install mosaicml=={COMPOSER_VERSIONS[-1]}. prepare_fully_shard needs no install() and no Composer"
        )
