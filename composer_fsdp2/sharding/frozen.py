"""Choose the frozen parameters by prefixes of their names, or by patterns of the names of trained parameters."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from composer_fsdp2._torch.private_names import BatchNorm, without_wrappers
from composer_fsdp2.config.text import and_more, nearest_names
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.ties import ParameterUse, join, parameter_uses

_NUM_NEAR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """The names of the parameters to freeze, and notes for the user."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_frozen(model: nn.Module, prefixes: Sequence[str], train_only: Sequence[str] = ()) -> Frozen:
    """The parameters at or below one of ``prefixes``, and those that match no pattern of ``train_only``.

    Sorted in registration order.

    A prefix is the path of a module or parameter in ``model``. If ``model`` has no such path, the path is resolved in
    its only direct child that has it, because a ComposerModel registers the user's model as a child. A tied parameter
    is frozen under all of its names. A pattern is matched from the start of a name as ``named_parameters`` lists it
    (the first name of a tied parameter). If all parameters are in one child, the child's name is removed first.

    Raises:
        PlanError: a prefix matches nothing, or several children (the message lists candidates); a pattern matches no
            name; or no parameter would remain to train.

    Only reads.
    """
    if not prefixes and not train_only:
        return Frozen()
    uses = parameter_uses(model)
    if not uses:
        raise PlanError(f"freeze: {type(model).__name__} has no parameters")
    names = [name for use in uses for name in _own_names(use)]
    known = dict.fromkeys(path for name in names for path in reversed(ancestors_or_self(name)))  # outer ones first
    found = {prefix: _paths_of(without_wrappers(prefix), model, known) for prefix in prefixes}
    problems = [_prefix_problem(prefix, paths, known) for prefix, paths in found.items() if len(paths) != 1]
    first_names = _without_child(model, [without_wrappers(use.name) for use in uses])
    problems += [
        f"train_only: no parameter's name matches {pattern!r} from its beginning; names begin as {first_names[0]}"
        for pattern in train_only
        if not any(re.match(pattern, name) for name in first_names)
    ]
    if problems:
        raise PlanError("\n".join(problems))
    paths = {path for (path,) in found.values()}
    frozen = [
        use
        for use, name in zip(uses, first_names, strict=True)
        if any(_is_under(each, paths) for each in _own_names(use))
        or (train_only and not any(re.match(pattern, name) for pattern in train_only))
    ]
    trained = {use.parameter for use in uses if use.parameter.requires_grad}
    if not trained:
        raise PlanError(f"freeze leaves nothing to train: no parameter of {type(model).__name__} requires gradients")
    if trained <= {use.parameter for use in frozen}:
        keys = " and ".join(key for key, value in (("freeze", prefixes), ("train_only", train_only)) if value)
        reasons = [f"have names that begin with {' or '.join(prefixes)}"] if prefixes else []
        reasons += ["match no pattern of train_only"] if train_only else []
        raise PlanError(
            f"{keys} leave{'' if ' ' in keys else 's'} nothing to train: all {len(trained)} parameters of "
            f"{type(model).__name__} that require gradients {' or '.join(reasons)}; "
            f"{'give longer prefixes' if prefixes else 'name some that require them'}"
        )
    notes = (*_notes_of_ties(frozen, paths), *_notes_of_statistics(model, frozen, paths))
    return Frozen(names=tuple(use.name for use in frozen), notes=notes)


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Set ``requires_grad`` to False, and remove gradients that an optimizer would still apply."""
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None


def _own_names(use: ParameterUse) -> list[str]:
    return [without_wrappers(name) for name in use.names]


def _without_child(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Remove the direct child's name from ``names`` if all parameters are in one child, as in a ComposerModel."""
    is_only = sum(any(True for _ in child.parameters()) for child in model.children()) == 1
    inner = [name.partition(".")[2] for name in names]
    return inner if is_only and all(inner) else list(names)


def _is_under(name: str, paths: Set[str]) -> bool:
    return not paths.isdisjoint(ancestors_or_self(name))


def _paths_of(prefix: str, model: nn.Module, known: Mapping[str, None]) -> list[str]:
    """The path ``prefix``, or the paths of direct children that have it."""
    if prefix in known:
        return [prefix]
    in_children = (join(child, prefix) for child, _ in model.named_children())
    return [path for path in in_children if path in known]


def _prefix_problem(prefix: str, paths: Sequence[str], known: Mapping[str, None]) -> str:
    if paths:
        return f"freeze: {prefix!r} is in several parts of the model; give the whole name: {' or '.join(paths)}"
    inner = [path for path in known if path.endswith(f".{prefix}")]
    near = (inner or nearest_names(prefix, filter(None, known), _NUM_NEAR))[:_NUM_NEAR]
    beginnings = ", ".join(path for path in known if path and "." not in path)
    way_out = f"did you mean {' or '.join(near)}?" if near else f"names begin with {beginnings}"
    return f"freeze: no parameter is at or under {prefix!r} (a prefix ends at a dot); {way_out}"


def _notes_of_ties(frozen: Sequence[ParameterUse], paths: Set[str]) -> Iterator[str]:
    for use in frozen:
        under = [name for name in _own_names(use) if _is_under(name, paths)]
        other = [name for name in _own_names(use) if not _is_under(name, paths)]
        if under and other:
            yield f"freeze: {under[0]} is frozen, and {' and '.join(other)} with it, which is the same parameter"


def _notes_of_statistics(model: nn.Module, frozen: Sequence[ParameterUse], paths: Set[str]) -> Iterator[str]:
    """Notes on batch norms that are frozen, or have a frozen parameter: their running statistics still change."""
    holders = {path for use in frozen for path, _ in use.owners}
    changing = [
        without_wrappers(path)
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.running_mean is not None
        if path in holders or _is_under(without_wrappers(path), paths)
    ]
    if changing:
        yield (
            f"freeze: the running statistics of {and_more(changing)} go on changing in training mode, because they are "
            "no parameters; to keep them, put such modules into eval() whenever the model is put into train()"
        )
