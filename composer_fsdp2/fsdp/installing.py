"""``install_fsdp``: replaces FSDP1's class in unmodified scripts and libraries."""

import importlib
import sys
from collections.abc import Collection, Iterator
from types import ModuleType, TracebackType

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as FSDP1GradScaler

from composer_fsdp2._torch.private_names import FSDP1Wrapper
from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2.fsdp.optimizers import note_optimizers
from composer_fsdp2.fsdp.wrapper import FullyShardedDataParallel
from composer_fsdp2.sharding.confirmation import list_units, stop_listing_units

# torch's class -> the replacement.
_CLASSES: dict[type, type] = {FSDP1Wrapper: FullyShardedDataParallel, FSDP1GradScaler: ShardedGradScaler}


# Not rebound: our class would report all units of fully_shard to DCP as FSDP1 instances. ``patch_dcp`` patches it
# when our class shards its first model.
_DCP = "torch.distributed.checkpoint.state_dict"

# Active installs; the bindings that the first one replaced, and the modules imported before it.
_active: list["InstalledFSDP"] = []
_rebound: list[tuple[ModuleType, str]] = []
_imported: set[str] = set()


class InstalledFSDP:
    """The handle that ``install_fsdp`` returns. ``uninstall()``, or leaving its ``with`` block, restores torch's
    classes."""

    def __init__(self, *, show_units: bool) -> None:
        note_optimizers()
        if show_units:
            list_units(self)
        if not _active:
            importlib.import_module(_DCP)  # binds torch's class; a later import would bind ours
            _imported.update(sys.modules)
            _rebound.extend(_rebind(_CLASSES))
        _active.append(self)

    def uninstall(self) -> None:
        """Restore torch's classes, also in modules imported after ``install_fsdp``. Existing models are not changed.

        If ``install_fsdp`` was called several times, the last ``uninstall`` restores them. Does not communicate.
        """
        if self not in _active:
            return
        _active.remove(self)
        stop_listing_units(self)
        if _active:
            return
        back = {ours: theirs for theirs, ours in _CLASSES.items()}
        ours_by_id = {id(ours): theirs for ours, theirs in back.items()}
        for module, name in _rebound:
            if (theirs := ours_by_id.get(id(vars(module).get(name)))) is not None:
                setattr(module, name, theirs)
        list(_rebind(back, without=_imported))
        _rebound.clear()
        _imported.clear()

    def __enter__(self) -> "InstalledFSDP":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


def install_fsdp(*, show_units: bool = False) -> InstalledFSDP:
    """Replace ``FullyShardedDataParallel`` and ``ShardedGradScaler`` of torch at all their bindings.

    Call it on all ranks before the script's or library's code, and before optimizers are created; or use ``with
    install_fsdp():``. Modules imported later also import the replacements. Does not communicate.

    Args:
        show_units: For models wrapped while it is active, rank 0 prints the name of each unit at the first forward.
            False prints only the number of units.

    Example:
        >>> with install_fsdp():
        ...     from torch.distributed.fsdp import FullyShardedDataParallel
        >>> FullyShardedDataParallel.__module__
        'composer_fsdp2.fsdp.wrapper'
    """
    return InstalledFSDP(show_units=show_units)


def active_fsdp_class() -> type:
    """The class currently bound to FSDP1's name."""
    return FullyShardedDataParallel if _active else FSDP1Wrapper


def _rebind(classes: dict[type, type], without: Collection[str] = ()) -> Iterator[tuple[ModuleType, str]]:
    """Replace classes in all loaded modules except this package's and those in ``without``; yield each changed module
    and name.
    """
    by_id = {id(old): new for old, new in classes.items()}  # some values warn on attribute access
    for path, module in list(sys.modules.items()):
        is_excluded = path in without or path == _DCP or path.partition(".")[0] == "composer_fsdp2"
        if is_excluded or not isinstance(module, ModuleType):
            continue
        for name in [name for name, value in list(vars(module).items()) if id(value) in by_id]:
            new = by_id[id(vars(module)[name])]
            setattr(module, name, new)
            yield module, name
