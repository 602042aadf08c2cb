"""Which modules a wrap policy chooses, in the place of a model's ``fsdp_wrap_fn``: by class, by size, by what they are.

The size rule is that of FSDP1's ``size_based_auto_wrap_policy`` (``torch/distributed/fsdp/wrap.py``).

[Note: experts] A rank none of whose tokens choose an expert passes over it, unless the model runs every expert on every
rank. As a unit of its own the expert is then gathered by some ranks only, together with another expert of equal size
on the others: no error, and wrong gradients. Inside the unit around it, it is gathered by all.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from composer_fsdp2.config.text import and_more
from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.fsdp1.classes import classes_named
from composer_fsdp2.sharding.modules import ancestors_or_self

# Attributes that hold the two ends of a language model: Llama's and its relatives', and TorchTitan's.
_EMBEDDINGS, _OUTPUTS = ("embed_tokens", "tok_embeddings"), ("lm_head", "output")
_RUNS_EVERY_EXPERT = "runs_every_expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoices:
    """What a policy chose of a model.

    Args:
        named: The modules that it names, each with why.
        min_num_params: Modules of this size are chosen, too; 0: none are.
        ignored: Modules that are passed over.
        asked: By what the policy says, the modules that it means; with those that will be no units.
        notes: What it names and the model lacks.
    """

    named: Mapping[nn.Module, str]
    min_num_params: int
    ignored: frozenset[nn.Module]
    asked: Mapping[str, frozenset[nn.Module]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def below(self, root: nn.Module) -> Mapping[nn.Module, str]:
        """The chosen modules, each with why; by size those below ``root``."""
        if not self.min_num_params:
            return self.named
        reason = f"wrap_policy: {self.min_num_params:,} parameters or more"
        return dict.fromkeys(_large_modules(root, self.min_num_params, self.ignored), reason)

    def in_vain(self, told: Collection[nn.Module]) -> Iterator[str]:
        """A note for each word of the policy that means none of the modules in ``told``."""
        for words, modules in self.asked.items():
            if modules.isdisjoint(told):
                yield (
                    f"wrap_policy.{words}, which makes no unit: each such module is ignored, lies in a part that FSDP1 "
                    "left out, or is a direct child of the model, which is a unit anyway, or the model itself"
                )


def read_policy(model: nn.Module, wrap: Wrap, ignored: Iterable[nn.Module] = ()) -> PolicyChoices:
    """What ``wrap`` chooses of ``model``; reads only.

    Raises:
        PlanError: no module is of a class that it names; the message has the classes that there are.
    """
    passed_over = frozenset(ignored)
    if wrap.kind is WrapKind.SIZE:
        return PolicyChoices(named={}, min_num_params=wrap.min_num_params, ignored=passed_over)
    named: dict[nn.Module, str] = {}
    asked: dict[str, frozenset[nn.Module]] = {}
    notes: list[str] = []
    for key, is_asked, find in (
        ("wrap_embeddings", wrap.embeddings, input_embeddings),
        ("wrap_lm_output", wrap.output, output_embeddings),
    ):
        found = list(find(model)) if is_asked else []
        named |= dict.fromkeys(found, f"wrap_policy: {key}")
        if found:
            asked[f"{key} is true"] = frozenset(found)
        elif is_asked:
            notes.append(f"wrap_policy.{key}: the model has no such module, so it makes no unit")
    for key, is_asked, names in (
        ("transformer_layer_cls_to_wrap", wrap.kind is WrapKind.CLASSES, wrap.classes),
        ("moe_experts", bool(wrap.experts), wrap.experts),
    ):
        for cls in classes_named(model, names, key=f"wrap_policy.{key}") if is_asked else ():
            found = [module for module in model.modules() if isinstance(module, cls)]
            named |= dict.fromkeys(found, f"wrap_policy: {cls.__name__}")
            words = f"{key} names {cls.__name__}"
            asked[words] = asked.get(words, frozenset()).union(found)
    return PolicyChoices(named=named, min_num_params=0, ignored=passed_over, asked=asked, notes=tuple(notes))


# ---------------------------------------------------------------------------------------------------------------------
# By what they are


def input_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The input embeddings of the models in ``model``: as they give them, else by their usual name."""
    yield from _ends(model, "get_input_embeddings", _EMBEDDINGS)


def output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The output heads of the models in ``model``: as they give them, else by their usual name."""
    yield from _ends(model, "get_output_embeddings", _OUTPUTS)


def _ends(module: nn.Module, getter: str, names: tuple[str, ...]) -> Iterator[nn.Module]:
    """Of the outermost models that have one; a model within a model, such as a vision tower, has ends of its own."""
    found = _given_by(module, getter) or next(
        (end for name in names if isinstance(end := getattr(module, name, None), nn.Module) and _is_model(module)), None
    )
    if found is not None:
        yield found
        return
    for child in module.children():
        yield from _ends(child, getter, names)


def _is_model(module: nn.Module) -> bool:
    """Whether it has embeddings and layers, or a head: blocks have an ``output``, too."""
    return any(hasattr(module, name) for name in (*_EMBEDDINGS, "lm_head"))


def _given_by(module: nn.Module, getter: str) -> nn.Module | None:
    give: Callable[[], object] | None = getattr(module, getter, None)
    if not callable(give):
        return None
    try:
        end = give()
    except NotImplementedError:  # transformers' way to say that there is none
        return None
    except Exception as error:
        raise PlanError(f"{getter} of {type(module).__name__} raised {type(error).__name__}: {error}") from error
    return end if isinstance(end, nn.Module) else None


# ---------------------------------------------------------------------------------------------------------------------
# By size

_NEVER_ENTERED, _NEVER_UNITS = (nn.MultiheadAttention,), (nn.ModuleList, nn.ModuleDict)


def _large_modules(root: nn.Module, min_num_params: int, ignored: frozenset[nn.Module]) -> list[nn.Module]:
    """The modules below ``root`` with at least so many elements that no chosen module below them holds."""
    ignored_parameters = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    chosen: list[nn.Module] = []

    def held_below(module: nn.Module) -> int:
        """How many elements units hold, at or below ``module``; those of a shared parameter at each place."""
        numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored_parameters)
        if numel < min_num_params or isinstance(module, _NEVER_ENTERED):
            return 0
        in_units = sum(held_below(child) for child in module.children() if child not in ignored)
        if module is root or isinstance(module, _NEVER_UNITS) or numel - in_units < min_num_params:
            return in_units
        chosen.append(module)
        return numel

    held_below(root)
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def refuse_experts(model: nn.Module, wrap: Wrap, units: Iterable[str]) -> None:
    """Raise for units that are experts ([Note: experts]), unless a module around them says that all of them run.

    Args:
        units: The paths of what the policy chose.
    Raises:
        UnsupportedError: names the first of them, and the way out.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    experts = [path for path in units if _is_expert(path, modules, wrap)]
    skipped = [path for path in experts if not _all_run(path, modules)]
    if skipped:
        kind = type(modules[skipped[0]]).__name__
        raise UnsupportedError(
            f"wrap_policy makes experts units of their own: {and_more(skipped)} ({kind}); a rank whose tokens choose "
            "none of an expert would gather another one instead and train on wrong gradients, without an error. Leave "
            "them in the unit of their layer, which is exact: no moe_experts, the layers' classes, or a larger "
            f"min_num_params. Where the model runs every expert on every rank, set {_RUNS_EVERY_EXPERT} = True on the "
            "module that holds them",
            keys=("wrap_policy",),
        )


def _is_expert(path: str, modules: Mapping[str, nn.Module], wrap: Wrap) -> bool:
    """Whether a module is an expert or a part of one: of a class that is named so, or of a list of experts."""
    for each in ancestors_or_self(path):
        holder, _, _ = each.rpartition(".")
        is_one_of_many = isinstance(modules[holder], nn.ModuleList | nn.ModuleDict)  # stacked experts all run
        if type(modules[each]).__name__ in wrap.experts or (is_one_of_many and "expert" in holder.rpartition(".")[2]):
            return True
    return False


def _all_run(path: str, modules: Mapping[str, nn.Module]) -> bool:
    above = ancestors_or_self(path)[1:]
    return any(getattr(modules[each], _RUNS_EVERY_EXPERT, False) is True for each in above)
