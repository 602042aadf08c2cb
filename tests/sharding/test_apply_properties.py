"""For every model, sharded over two ranks it computes the same as in one process."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.comparing import full, own_name
from support.examples import examples
from support.random_models import BATCH_SIZE, DTYPES, Tree, build, fill, found, ignored_modules, trees
from support.ranks import run_ranks
from support.training import FULL, named_parameters
from torch import nn

from composer_fsdp2 import (
    ConfigError,
    PlanError,
    ShardingConfig,
    ShardingPlan,
    apply_plan,
    plan_sharding,
    reshard,
    translate,
)

WORLD_SIZE = 2
# Differences are relative to the largest value (of all gradients, for a gradient). A sum over a batch in two halves is
# rounded differently, by a few units in the last place (6e-8, 1e-16), and up to 50 layers propagate that.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}

MESHES = (
    {},
    {},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "NO_SHARD"},
    {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2},
    {"reshard_after_forward": 1},
    {"reshard_after_forward": 2},
)
PREFETCHES = (
    {},
    {},
    {"forward_prefetch": True},
    {"forward_prefetch": True, "forward_prefetch_limit": 2, "backward_prefetch_limit": 2},
    {"backward_prefetch": "NONE"},
)
CHECKPOINTINGS = (
    {},
    {},
    {"activation_checkpointing": True, "activation_checkpointing_reentrant": True},
    {"activation_checkpointing": True, "activation_checkpointing_reentrant": False},
    {"activation_cpu_offload": True},
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its configuration, and whether the inputs need a gradient."""

    tree: Tree
    config: dict[str, Any]
    input_gradient: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtypes = (("float64", "float32"), ("float32", "float64"))
    tree = draw(trees(checkpointed=True, dtypes=dtypes))
    config = draw(st.sampled_from(MESHES)) | draw(st.sampled_from(PREFETCHES)) | draw(st.sampled_from(CHECKPOINTINGS))
    config |= {"cpu_offload": True} if draw(st.integers(0, 7)) == 0 else {}
    is_reentrant = config.get("activation_checkpointing_reentrant", False)
    # Without one, torch's reentrant checkpointing computes no gradient for the first module's parameters.
    return Case(tree=tree, config=config, input_gradient=is_reentrant or draw(st.booleans()))


def config_of(case: Case, model: nn.Module) -> ShardingConfig:
    message = FULL | case.config | {"ignored_modules": ignored_modules(case.tree, model)}
    return translate(message, precision="fp32", device="cpu", world_size=WORLD_SIZE).config


def plan_of(case: Case) -> ShardingPlan | None:
    """The plan, or None if planning raises (other tests cover the errors)."""
    model = build(case.tree)
    try:
        return plan_sharding(model, config_of(case, model))
    except (ConfigError, PlanError):
        return None


def recomputed(tree: Tree, is_reentrant: bool) -> Case:
    config = {"activation_checkpointing": True, "activation_checkpointing_reentrant": is_reentrant}
    return Case(tree=tree, config=config, input_gradient=True)


@given(cases())
@found(lambda tree: (recomputed(tree, True),))
@found(lambda tree: (recomputed(tree, False),))
@examples(8)
def test_computes_as_unsharded(case: Case):
    """For every combination of nesting, sharing, ties, frozen, chosen and unused modules: outputs, gradients, the
    parameters after one step, and every tie equal those of one process with the whole batch."""
    plan = plan_of(case)
    if plan is None:
        return
    problems = run_ranks(problems_of, WORLD_SIZE, case, plan.digest, timeout_s=60)
    assert not any(problems), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(problems))


def outside(plan: ShardingPlan) -> set[str]:
    """Parameters that are not sharded and have local gradients."""
    return {name for left in plan.left_out for name in left.names} | set(plan.ignored)


def problems_of(case: Case, digest: str) -> str:
    """The differences on this rank, as text: an exception would end the ranks, and shrinking would take minutes."""
    try:
        return "\n".join(compare(case, digest))
    except Exception:
        return traceback.format_exc()


def compare(case: Case, digest: str) -> Iterator[str]:
    reference, model = build(case.tree), build(case.tree)
    plan = plan_sharding(model, config_of(case, model))
    if plan.digest != digest:
        yield "this rank has another plan"
        return
    apply_plan(model, plan)
    # The optimizer's parameters: after an evaluation the model itself has unsharded ones.
    ours, theirs = named_parameters(model), named_parameters(reference)
    if ours.keys() != theirs.keys():
        yield f"names differ: {ours.keys() ^ theirs.keys()}"
        return
    local = outside(plan)
    for step in range(2):
        problems = compare_step(case, model, reference, ours, theirs, local, step)
        yield from (f"step {step}: {problem}" for problem in problems)
        update(ours, local)
        update(theirs, local)
        yield from (f"evaluation {step}: {problem}" for problem in compare_evaluation(case, model, reference))
    reshard(model)
    for names in plan.tie_groups:
        if len({id(model.get_parameter(name)) for name in checkpointed_names(model, names)}) > 1:
            yield f"{names} came apart"


def compare_step(
    case: Case,
    model: nn.Module,
    reference: nn.Module,
    ours: dict[str, nn.Parameter],
    theirs: dict[str, nn.Parameter],
    local: set[str],
    step: int,
) -> Iterator[str]:
    """One forward and backward: of the whole batch here, of this rank's part in the sharded model."""
    tolerance, mine = tolerance_of(reference), part_of_rank()
    x = batch(case, seed=step)
    whole, part = x.clone().requires_grad_(case.input_gradient), x[mine].clone().requires_grad_(case.input_gradient)
    expected, output = reference(whole), model(part)
    yield from differences("output", output, expected[mine], tolerance)
    if not expected.requires_grad:
        if output.requires_grad:
            yield "the output has a gradient"
        return
    # Local gradients first: the mean over this rank's part only.
    reference(part.detach().requires_grad_(case.input_gradient)).square().mean().backward()
    own = gradients(theirs)
    reference.zero_grad()
    expected.square().mean().backward()
    output.square().mean().backward()
    wanted = {name: own[name] if name in local else gradient for name, gradient in gradients(theirs).items()}
    largest = max((float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None), default=0.0)
    got = gradients(ours)
    for name, gradient in wanted.items():
        yield from differences(f"gradient of {name}", got[name], gradient, tolerance, largest)
    if case.input_gradient:
        yield from differences("input's gradient", part.grad, whole.grad[mine] * WORLD_SIZE, tolerance)


def compare_evaluation(case: Case, model: nn.Module, reference: nn.Module) -> Iterator[str]:
    x, mine = batch(case, seed=7), part_of_rank()
    with torch.no_grad():
        yield from differences("output", model(x[mine]), reference(x)[mine], tolerance_of(reference))


def tolerance_of(reference: nn.Module) -> float:
    return TOLERANCES["float32" if any(p.dtype == torch.float32 for p in reference.parameters()) else "float64"]


def update(parameters: dict[str, nn.Parameter], local: set[str]) -> None:
    """One step, without parameters that would differ between ranks; bounded, so that no model diverges."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.grad is not None and name not in local:
                parameter -= 0.1 * torch.tanh(parameter.grad)
            parameter.grad = None


def batch(case: Case, seed: int) -> torch.Tensor:
    x = torch.empty(BATCH_SIZE, case.tree.width, dtype=DTYPES[case.tree.dtype])
    fill(x, 1000 + seed)
    return x


def part_of_rank() -> slice:
    size = BATCH_SIZE // WORLD_SIZE
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def gradients(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    """The full gradients. Called on all ranks."""
    return {name: None if p.grad is None else full(p.grad).clone() for name, p in parameters.items()}


def differences(
    what: str, actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float, largest: float = 0.0
) -> Iterator[str]:
    """No gradient equals a zero one: FSDP1 filled gradients that a backward did not reach."""
    if actual is None and expected is None:
        return
    actual = torch.zeros_like(expected) if actual is None else actual
    expected = torch.zeros_like(actual) if expected is None else expected
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        yield f"{what} is {actual.shape} {actual.dtype}, expected {expected.shape} {expected.dtype}"
        return
    worst = float((actual - expected).abs().max()) if actual.numel() else 0.0
    allowed = tolerance * max(1.0, largest, float(expected.abs().max()) if expected.numel() else 0.0)
    if not worst <= allowed:
        yield f"{what} differs by {worst:.2g}, more than {allowed:.2g}: {actual.tolist()}, expected {expected.tolist()}"


def checkpointed_names(model: nn.Module, names: tuple[str, ...]) -> list[str]:
    now = {own_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [now[name] for name in names]
