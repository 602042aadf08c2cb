"""The modules that a wrap policy chooses; the size policy is compared with FSDP1 itself."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from support.examples import IS_THOROUGH, THOROUGH_FACTOR
from support.models import Block, FakeMetric, tie
from support.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from composer_fsdp2 import PlanError, plan_sharding
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.fsdp1.hooks import read_hooks
from composer_fsdp2.sharding.plan import ShardingPlan
from composer_fsdp2.sharding.policies import read_policy

# --- by size


class Node(nn.Module):
    """Has a parameter beside its children."""

    def __init__(self, numel: int, children: dict[str, nn.Module]) -> None:
        super().__init__()
        if numel:
            self.weight = nn.Parameter(torch.zeros(numel))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def random_tree(draw: random.Random, depth: int) -> nn.Module:
    """Every kind of module that the size policy distinguishes, with 1 to about 100 parameters."""
    kind = draw.choice(["linear", "norm", "attention"] if depth == 0 else ["linear", "list", "dict", "node", "node"])
    if kind == "linear":
        return nn.Linear(draw.randint(1, 6), draw.randint(1, 6), bias=draw.random() < 0.5)
    if kind == "norm":
        return nn.LayerNorm(draw.randint(1, 6))
    if kind == "attention":
        return nn.MultiheadAttention(2 * draw.randint(1, 3), 1)
    children = {f"c{number}": random_tree(draw, depth - 1) for number in range(draw.randint(1, 4))}
    if kind == "list":
        return nn.ModuleList(children.values())
    if kind == "dict":
        return nn.ModuleDict(children)
    return Node(draw.choice([0, 0, 3, 20]), children)


def tied(draw: random.Random, root: nn.Module) -> None:
    """Ties the weights of two linear layers of equal shape, if there are two."""
    layers = [module for module in root.modules() if isinstance(module, nn.Linear)]
    draw.shuffle(layers)
    for first, second in pairwise(layers):
        if first.weight.shape == second.weight.shape:
            second.weight = first.weight
            return


class Recorded(nn.Module):
    """Stands in for FSDP1 as ``_recursive_wrap``'s wrapper class."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner = module


def recorded(root: nn.Module, min_num_params: int, ignored: set[nn.Module]) -> set[nn.Module]:
    """The modules below ``root`` that FSDP1's own traversal chooses."""
    _recursive_wrap(
        root,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params),
        wrapper_cls=Recorded,
        ignored_modules=ignored,
        ignored_params={parameter for module in ignored for parameter in module.parameters()},
        only_wrap_children=True,
    )
    return {module.inner for module in root.modules() if isinstance(module, Recorded)}


def of_fsdp1(root: nn.Module, min_num_params: int, ignored: set[nn.Module]) -> set[nn.Module]:
    """The modules below ``root`` that ``FullyShardedDataParallel`` makes units."""
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    options = {"ignored_modules": ignored, "use_orig_params": True, "device_id": torch.device("cpu")}
    sharded = FullyShardedDataParallel(root, auto_wrap_policy=policy, **options)
    return {
        module.module
        for module in sharded.modules()
        if isinstance(module, FullyShardedDataParallel) and module is not sharded
    }


def trees(seeds: range) -> Iterator[tuple[int, nn.Module, int, set[nn.Module], bool]]:
    for seed in seeds:
        draw = random.Random(seed)
        root = Node(draw.choice([0, 5]), {f"c{n}": random_tree(draw, draw.randint(0, 3)) for n in range(3)})
        is_tied = draw.random() < 0.3
        if is_tied:
            tied(draw, root)
        modules = [module for module in root.modules() if module is not root and list(module.parameters())]
        ignored = set(draw.sample(modules, 1)[0].modules()) if draw.random() < 0.3 else set()
        yield seed, root, draw.randint(1, 60), ignored, is_tied


def check_sizes(num_trees: int) -> tuple[int, int]:
    """Returns the number of trees with units, and the number of those passed through FSDP1's constructor."""
    num_with_units = num_constructed = 0
    warnings.simplefilter("ignore")
    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        for seed, root, min_num_params, ignored, is_tied in trees(range(num_trees)):
            paths = {module: path for path, module in root.named_modules()}
            wrap = Wrap(kind=WrapKind.SIZE, min_num_params=min_num_params)
            ours = set(read_policy(root, wrap, ignored).below(root))
            # FSDP1 would flatten a weight shared by two units twice, and fail.
            is_constructed = not is_tied
            expected = (of_fsdp1 if is_constructed else recorded)(root, min_num_params, ignored)
            shown = [sorted(paths[module] for module in each) for each in (ours, expected)]
            assert ours == expected, f"seed {seed}, {min_num_params} parameters: {shown[0]}, FSDP1 {shown[1]}"
            num_with_units += bool(ours)
            num_constructed += is_constructed
    return num_with_units, num_constructed


def test_the_size_rule_is_fsdp1s():
    """Otherwise a run that FSDP1 wrapped by size would have other units, and so other memory and all-gathers."""
    num_trees = 80 * (THOROUGH_FACTOR if IS_THOROUGH else 1)
    [(num_with_units, num_constructed)] = run_ranks(check_sizes, 1, num_trees)
    assert num_with_units > num_trees / 2 and num_constructed > num_trees / 2


# --- by class


class WideBlock(Block):
    """FSDP1's policy matched instances, including those of derived classes."""


class Trunk(nn.Module):
    """A transformers model with the attributes that a policy reads."""

    _no_split_modules = ("Block", "BlockOfAnotherRelease")

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.blocks, self.norm = nn.Embedding(8, 4), nn.ModuleList(blocks), nn.LayerNorm(4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LanguageModel(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.trunk, self.lm_head = Trunk(*(blocks or (Block(), Block()))), nn.Linear(4, 8, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def inside(module: nn.Module) -> nn.Module:
    """Nested like the model of a ComposerModel."""
    model = nn.Module()
    model.model = module
    return model


def plan_of(model: nn.Module, **wrap: Any) -> ShardingPlan:
    wrap.setdefault("kind", WrapKind.CLASSES)
    return plan_sharding(model, ShardingConfig(wrap=Wrap(**wrap)))


def units_of(model: nn.Module, **wrap: Any) -> dict[str, str]:
    """Units below the roots, each with its reason."""
    return {" + ".join(unit.modules): unit.reason for unit in plan_of(model, **wrap).units if not unit.is_root}


BLOCKS = {f"model.trunk.blocks.{number}": "wrap_policy: Block" for number in range(2)}


def with_ends(build: Callable[[], nn.Module], change: Callable[[Any], object]) -> nn.Module:
    model = build()
    change(model)
    return inside(model)


def give_other_ends(model: Any) -> None:
    model.wte, model.unembed = nn.Embedding(8, 4), nn.Linear(4, 8)
    model.get_input_embeddings = lambda: model.wte
    model.get_output_embeddings = lambda: model.unembed


def give_titans_ends(model: Any) -> None:
    """With TorchTitan's names; a block also has an ``output``, which is not the model's."""
    model.tok_embeddings, model.output = nn.Embedding(8, 4), nn.Linear(4, 8)
    model[0].output = nn.Linear(4, 4)


NAMED = {"classes": ("Block",)}
BOTH = {"embeddings": True, "output": True}
ENDS = {"model.trunk.embed_tokens": "wrap_policy: wrap_embeddings", "model.lm_head": "wrap_policy: wrap_lm_output"}
TIED = with_ends(LanguageModel, lambda model: tie(model.trunk.embed_tokens, model.lm_head))
# A model, a policy, and the units below the roots, optionally each with its reason.
UNITS: dict[str, tuple[nn.Module, dict[str, Any], dict[str, str] | set[str]]] = {
    "each module of a class that the file names": (inside(LanguageModel()), NAMED, BLOCKS),
    "of one derived from it": (inside(LanguageModel(Block(), WideBlock())), NAMED, BLOCKS),
    "of the derived one": (
        inside(LanguageModel(Block(), WideBlock())),
        {"classes": ("WideBlock",)},
        {"model.trunk.blocks.1"},
    ),
    "none": (inside(LanguageModel()), {"kind": WrapKind.ROOT}, {}),
    "a chosen module around chosen ones": (
        inside(LanguageModel()),
        {"classes": ("Block", "Trunk")},
        BLOCKS | {"model.trunk": "wrap_policy: Trunk"},
    ),
    # The model may be in a wrapper, and may list classes that its release does not contain.
    "auto": (inside(LanguageModel()), {}, BLOCKS),
    # A root without a forward: its members are the roots.
    "auto, deeper": (inside(inside(LanguageModel())), {}, {f"model.model.trunk.blocks.{n}" for n in range(2)}),
    "auto, in a wrapper": (inside(nn.Sequential(LanguageModel())), {}, {f"model.0.trunk.blocks.{n}" for n in range(2)}),
    "embeddings and head": (inside(LanguageModel()), BOTH, BLOCKS | ENDS),
    # Tied modules share a unit, or remain in the unit of their common parent.
    "tied embeddings": (TIED, {"embeddings": True}, BLOCKS),
    "tied ends": (TIED, BOTH, {*BLOCKS, "model.trunk.embed_tokens + model.lm_head"}),
    "ends as the model gives them": (
        with_ends(LanguageModel, give_other_ends),
        BOTH,
        {*BLOCKS, "model.wte", "model.unembed"},
    ),
    "ends by TorchTitan's names": (
        with_ends(lambda: nn.Sequential(Block()), give_titans_ends),
        NAMED | BOTH,
        {"model.0", "model.tok_embeddings", "model.output"},
    ),
}


@pytest.mark.parametrize("case", UNITS)
def test_units_are_what_a_policy_chooses(case: str):
    """Other units would mean other memory and other all-gathers."""
    model, wrap, expected = UNITS[case]
    found = units_of(model, **wrap)
    assert (found if isinstance(expected, dict) else set(found)) == expected


def test_the_order_of_the_models_classes_does_not_matter():
    """A set, as in transformers 5, is ordered differently in each process, and all ranks must have the same plan."""
    trunks = (
        type("Trunk", (Trunk,), {"_no_split_modules": names})
        for names in (["Block", "WideBlock"], ["WideBlock", "Block"])
    )
    plans = [plan_of(inside(trunk(Block(), WideBlock()))).digest for trunk in trunks]
    assert plans[0] == plans[1]


def test_an_unknown_class_lists_the_models():
    """ROLL silently shards such a model as one unit, which runs out of memory or is slow."""
    with pytest.raises(PlanError, match=r"is a Blok; did you mean Block\?.*Block, Embedding, .*Trunk") as caught:
        plan_of(inside(LanguageModel()), classes=("Block", "Blok"))
    assert "wrap_policy.transformer_layer_cls_to_wrap" in str(caught.value)
    with pytest.raises(PlanError, match="names no classes of its own"):
        plan_of(inside(nn.Sequential(Block())))


def test_ends_that_a_model_has_not_are_told():
    """A classifier has no language modeling head, and its file is still valid."""
    block = Block()
    block.output = nn.Linear(4, 4)  # of a block, as many blocks have one
    plan = plan_of(inside(nn.Sequential(block)), classes=("Block",), embeddings=True, output=True)
    assert [note for note in plan.notes if "has no such module" in note] == [
        "wrap_policy.wrap_embeddings is true, and the model has no such module, so it makes no unit",
        "wrap_policy.wrap_lm_output is true, and the model has no such module, so it makes no unit",
    ]


def test_a_model_that_cannot_tell_its_ends_is_named():
    """The exception of the model's own method would not name the key that called it."""
    model = inside(LanguageModel())
    model.model.get_input_embeddings = lambda: model.model.trunk.wte
    with pytest.raises(PlanError, match=r"get_input_embeddings of LanguageModel raised AttributeError: .*wte"):
        plan_of(model, embeddings=True)


# --- with the model's own hooks


def test_hooks_and_policy_together():
    """The policy replaces the wrap function, and ``_fsdp_wrap`` overrides the policy. The plan reports both."""
    model = inside(LanguageModel())
    model.model.fsdp_wrap_fn = lambda module: pytest.fail("asked")
    model.model.trunk.blocks[0]._fsdp_wrap = False
    model.model.trunk.norm._fsdp_wrap = True
    plan = plan_of(model, classes=("Block",))
    assert {unit.name: unit.reason for unit in plan.units if not unit.is_root} == {
        "model.trunk.blocks.1": "wrap_policy: Block",
        "model.trunk.norm": "_fsdp_wrap",
    }
    text = plan.explain()
    assert "so the fsdp_wrap_fn of model is not called" in text
    assert "_fsdp_wrap on model.trunk.blocks.0 and 1 more takes precedence over wrap_policy" in text


def test_without_a_policy_hooks_choose_as_before():
    """Composer runs keep their units."""
    model = inside(LanguageModel())
    model.model.fsdp_wrap_fn = lambda module: isinstance(module, Block)
    assert set(read_hooks(model, ShardingConfig()).chosen) == set(BLOCKS)


def test_what_is_no_part_of_the_sharded_model_is_passed_over():
    """Metrics and ignored modules are not sharded, whatever their class."""
    model = inside(LanguageModel())
    model.metric = FakeMetric()
    config = ShardingConfig(wrap=Wrap(kind=WrapKind.CLASSES), ignored_modules=(model.model.trunk.blocks[0],))
    plan = plan_sharding(model, config)
    assert [unit.name for unit in plan.units] == ["model.trunk.blocks.1", "model"]
    assert not plan.notes


def test_what_is_chosen_in_vain_is_told():
    """A plan with a single unit takes a model's worth of memory, so it reports policies that chose nothing."""
    ends = {"embeddings": True, "output": True}
    model = inside(LanguageModel(Block(), WideBlock()))
    model.left = nn.Sequential(nn.GroupNorm(1, 4))
    model.left._fsdp_wrap = False
    trunk = model.model.trunk
    classes = ("Block", "WideBlock", "GroupNorm", "LanguageModel", "LayerNorm")
    wrap = Wrap(kind=WrapKind.CLASSES, classes=classes, **ends)
    plan = plan_sharding(model, ShardingConfig(wrap=wrap, ignored_modules=(trunk.blocks[1], trunk.embed_tokens)))
    told = [note.partition(", which makes no unit")[0] for note in plan.notes if "makes no unit" in note]
    key = "wrap_policy.transformer_layer_cls_to_wrap names"
    assert told == [
        "wrap_policy.wrap_embeddings is true",
        *(f"{key} {name}" for name in ("WideBlock", "GroupNorm", "LanguageModel")),
    ]
    # No module has so many parameters. Composer's own units would have been smaller than the one unit left.
    plan = plan_of(model, kind=WrapKind.SIZE, min_num_params=10**6)
    assert [note for note in plan.notes if "wrap_policy" in note] == [
        "wrap_policy.min_num_params is 1,000,000, which makes no unit: no module below a direct child of the model "
        "has so many parameters, containers aside; give a smaller number"
    ]
    assert not plan_of(model, kind=WrapKind.SIZE, min_num_params=20).notes
    # An overriding attribute is reported as such, and the unit that it adds is not reported as missing.
    trunk.norm._fsdp_wrap, trunk.blocks[0]._fsdp_wrap = False, True
    plan = plan_sharding(model, ShardingConfig(wrap=Wrap(kind=WrapKind.CLASSES, classes=("Block", "LayerNorm"))))
    assert [note for note in plan.notes if "wrap_policy" in note] == [
        "_fsdp_wrap on model.trunk.norm takes precedence over wrap_policy"
    ]


def test_an_attribute_on_what_holds_nothing_is_not_told():
    """LLM Foundry's MPT sets it on a Dropout; a note in every run would help no user."""
    model = inside(LanguageModel())
    model.model.trunk.drop = nn.Dropout()
    model.model.trunk.drop._fsdp_wrap = True
    assert not plan_of(model, classes=("Block",)).notes


def test_the_policy_is_part_of_the_plan():
    """Ranks with different policies raise instead of hanging."""
    model = inside(LanguageModel())
    digests = {plan_of(model, **wrap).digest for wrap in ({}, {"classes": ("Block",)}, {"kind": WrapKind.ROOT})}
    assert len(digests) == 3
