"""Install and uninstall the seams; run LLM Foundry's training with them."""

import contextlib
import functools
import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from composer_fsdp2.errors import ConfigError, IncompatibleVersionError
from composer_fsdp2.sharding.confirmation import list_units, stop_listing_units

from .optimizers import update_local_shards_of_all
from .seams import Seam, registered_seams, replace, restore

# Releases of Composer (the distribution mosaicml) for which the seams were written and tested.
COMPOSER_VERSIONS = ("0.32.0", "0.32.1")

# Functions that undo ``install``.
_undo: list[Callable[[], None]] = []


def install() -> None:
    """Make Composer shard with ``fully_shard`` instead of FSDP1 or its own FSDP2.

    Applies to ``Trainer(parallelism_config={'fsdp': ...})``, FSDPConfig and FSDP2Config objects, all import paths of
    ``prepare_fsdp_module``, ``FSDP_VERSION=2``, and LLM Foundry's ``train_from_yaml``. A second call has no effect.
    ``uninstall`` reverts it. Call it on all ranks before the Trainer is created; does not communicate.

    Raises:
        IncompatibleVersionError: Composer is missing, or its version was not tested.
    """
    if _undo:
        return
    _check_version()
    replaced = replace(all_seams())
    _undo.extend([functools.partial(restore, replaced), update_local_shards_of_all().remove])


def all_seams() -> tuple[Seam, ...]:
    """Import this package's other modules, and with them Composer, and return their seams (see ``seams.py``)."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if (name := f"{__package__}.{module.name}") != __name__:
            importlib.import_module(name)
    return registered_seams()


def uninstall() -> None:
    """Restore all that ``install`` replaced. Sharded models, and optimizers that have stepped, do not change."""
    for undo in _undo:
        undo()
    _undo.clear()


def is_installed() -> bool:
    """Whether ``install`` is active."""
    return bool(_undo)


@contextlib.contextmanager
def fsdp2(*, show_units: bool = False) -> Iterator[None]:
    """``install`` for the duration of a ``with`` block.

    If ``install`` was called before, it remains installed after the block.

    Args:
        show_units: Print the name of every unit of a sharded model on rank 0. False prints only the number of units.
    """
    outermost = not is_installed()
    install()
    caller = object()
    if show_units:
        list_units(caller)
    try:
        yield
    finally:
        stop_listing_units(caller)
        if outermost:
            uninstall()


def train_from_yaml(yaml_path: str, overrides: Sequence[str] = (), *, show_units: bool = False) -> Any:
    """Run LLM Foundry's ``train_from_yaml`` on FSDP2, and return Composer's Trainer.

    Args:
        yaml_path: A training YAML of LLM Foundry.
        overrides: ``key=value`` strings, merged into the YAML.
        show_units: Print the name of every unit on rank 0. False prints only the number of units.
    Raises:
        IncompatibleVersionError: LLM Foundry is missing, or the version of Composer was not tested.
        ConfigError: ``freeze`` or ``train_only`` is set, and there is only one rank: LLM Foundry then ignores
            ``fsdp_config``.

    Called on all ranks.
    """
    try:
        from llmfoundry.command_utils import train_from_yaml as foundry_train_from_yaml
    except ModuleNotFoundError as error:
        if error.name != "llmfoundry":
            raise
        raise IncompatibleVersionError("LLM Foundry is not installed: pip install 'composer-fsdp2[foundry]'") from error
    _check_one_rank(yaml_path, overrides)
    with fsdp2(show_units=show_units):
        return foundry_train_from_yaml(yaml_path, list(overrides))


def _check_one_rank(yaml_path: str, overrides: Sequence[str]) -> None:
    """Print to stderr that LLM Foundry (0.22.0, ``command_utils/train.py``) ignores ``fsdp_config`` on one rank.

    Raises:
        ConfigError: ``freeze`` or ``train_only`` is set: all parameters would be trained. Other keys do not change
            results on one rank.
    """
    from composer.utils import dist
    from omegaconf import DictConfig, OmegaConf

    if dist.get_world_size() > 1:
        return
    given = OmegaConf.merge(OmegaConf.load(yaml_path), OmegaConf.from_cli(list(overrides)))
    section = given.get("fsdp_config") if isinstance(given, DictConfig) else None
    if not section:
        return
    key = next((each for each in ("freeze", "train_only") if section.get(each)), None)
    if key is not None:
        raise ConfigError(
            f"{yaml_path}: fsdp_config.{key} on one rank: LLM Foundry shards nothing there and leaves the section "
            "out, so that all parameters would be trained; launch two ranks (composer -n 2 ...), or freeze with its "
            "callback layer_freezing",
            keys=(key,),
        )
    print(
        "composer_fsdp2: one rank, on which LLM Foundry leaves fsdp_config out and shards nothing (it goes back to "
        "DDP); launch several: composer -n 8 -m composer_fsdp2 train",
        yaml_path,
        file=sys.stderr,
    )


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
