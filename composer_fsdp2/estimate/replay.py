"""One training step of a plan, replayed: what a rank's memory holds at each moment, and what it sends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_fsdp2._torch.capabilities import recomputation_is_no_forward, skips_groups_of_one
from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.events import MicrobatchTrace, Moment, StepEvent
from composer_fsdp2.estimate.fully_shard import Root, Syncing, TorchWays
from composer_fsdp2.estimate.ledger import Ledger
from composer_fsdp2.estimate.optimizers import OptimizerState, optimizer_state
from composer_fsdp2.estimate.reach import link_of, members, num_on_node
from composer_fsdp2.estimate.step import CollectiveCall, Kind, MemorySample, Phase, StepEstimate
from composer_fsdp2.estimate.unit_sizes import UnitSizes, unit_sizes
from composer_fsdp2.sharding.dtypes import dtype_bytes
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ParameterSpec, ShardingPlan, ShardUnit, units_by_root


def estimate_step(
    plan: ShardingPlan,
    trace: MicrobatchTrace | None = None,
    *,
    world_size: int,
    optimizer: OptimizerState | None = None,
    num_microbatches: int = 1,
    rank: int = 0,
    gpus_per_node: int = 8,
) -> StepEstimate:
    """What one training step takes of a rank's memory and sends, without running it.

    A replay of what ``fully_shard`` and this package do in the order in which the CPU asks for memory; equal to what
    real steps count to the byte (tests/estimate/test_replay.py). It models neither the allocator's fragmentation nor
    what NCCL and CUDA take for themselves.

    Args:
        plan: What ``plan_sharding`` gave.
        trace: One microbatch of the model, with its activations. None: the units run in the order of the plan, and
            activations are not counted.
        world_size: The number of ranks.
        optimizer: What it keeps; None is AdamW.
        num_microbatches: Of the step, each with a forward and a backward.
        rank: Whose memory; ranks differ where a parameter's rows do not divide evenly.
        gpus_per_node: Which groups of ranks lie on one node.
    Raises:
        ConfigError: the plan does not fit ``world_size``.

    Does not communicate, and needs no process group.
    """
    return _replayed(plan, trace, world_size, optimizer, num_microbatches, rank, gpus_per_node).result()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSample(Value):
    """What all but activations takes of a rank's memory around one event.

    Args:
        microbatch, event: As in a ``MemorySample``.
        meanwhile_bytes: The most while the event's hook runs, beside the activations that are alive.
        afterwards_bytes: From then on, beside the activations' own peak.
    """

    microbatch: int
    event: int
    meanwhile_bytes: int
    afterwards_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOfStep(Value):
    """A step without its activations: of its ``calls`` each is issued at the sample of its number."""

    samples: tuple[StateSample, ...]
    calls: tuple[CollectiveCall, ...]
    host_bytes: int


def state_of_step(
    plan: ShardingPlan,
    trace: MicrobatchTrace | None = None,
    *,
    world_size: int,
    optimizer: OptimizerState | None = None,
    num_microbatches: int = 1,
    rank: int = 0,
    gpus_per_node: int = 8,
) -> StateOfStep:
    """What ``estimate_step`` adds a trace's activations to, which are the only part that depends on their bytes."""
    how = (world_size, optimizer, num_microbatches, rank, gpus_per_node)
    replay = _replayed(plan, trace, *how, keeps_samples=False)
    return StateOfStep(samples=tuple(replay.states), calls=tuple(replay.calls), host_bytes=replay.host_bytes())


def _replayed(
    plan: ShardingPlan,
    trace: MicrobatchTrace | None,
    world_size: int,
    optimizer: OptimizerState | None,
    num_microbatches: int,
    rank: int,
    gpus_per_node: int,
    *,
    keeps_samples: bool = True,
) -> "_Replay":
    plan = plan.resolve(world_size)
    trace = assumed_trace(plan) if trace is None else trace
    replay = _Replay(plan, trace, optimizer or optimizer_state("AdamW"), world_size, rank, gpus_per_node)
    replay.keeps_samples = keeps_samples
    for number in range(num_microbatches):
        replay.microbatch(number, is_last=number == num_microbatches - 1)
    replay.optimizer_step()
    return replay


class _Replay:
    """The state of one step while it is replayed."""

    def __init__(
        self,
        plan: ShardingPlan,
        trace: MicrobatchTrace,
        optimizer: OptimizerState,
        world_size: int,
        rank: int,
        gpus_per_node: int,
    ) -> None:
        self.plan, self.trace, self.optimizer = plan, trace, optimizer
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.ledger = Ledger()
        self.samples: list[MemorySample] = []
        self.states: list[StateSample] = []
        self.keeps_samples = True
        self.calls: list[CollectiveCall] = []
        self.phase = Phase.FORWARD
        self.sizes = {unit.name: unit_sizes(unit, rank=rank, world_size=world_size) for unit in plan.units}
        self.unsharded = tuple(_unsharded(plan))
        self.is_at = [unit.name for unit in plan.units]
        self.roots = [self._root([unit.name for unit in units]) for units in units_by_root(plan.units).values()]
        self.root_of = {unit.sizes.name: root for root in self.roots for unit in root.units}
        self.parameters = self._keep_parameters()
        self.optimizer_bytes = self._keep_optimizer()
        self._unsharded_gradients: set[str] = set()

    def _root(self, bottom_up: Sequence[str]) -> Root:
        units = [self.sizes[name] for name in _outer_first(bottom_up)]
        ways = TorchWays(
            skips_groups_of_one=skips_groups_of_one(), recomputation_is_no_forward=recomputation_is_no_forward()
        )
        return Root(units, self.ledger, self._send, ways)

    # What is there before the step

    def _keep_parameters(self) -> int:
        num_bytes = sum(
            each.shard_elements * each.own_bytes for each in self.sizes.values() if not each.is_offloaded
        ) + sum(spec.numel * dtype_bytes(spec.dtype) for spec in self.unsharded)
        self.ledger.take(Kind.PARAMETERS, num_bytes)
        self.ledger.take(Kind.BUFFERS, self.trace.buffer_bytes)
        return num_bytes

    def _keep_optimizer(self) -> int:
        num_bytes = sum(self._state_of(each) for each in self.sizes.values() if not each.is_offloaded) + sum(
            self.optimizer.state_bytes(spec.numel, dtype_bytes(spec.dtype))
            for spec in self.unsharded
            if spec.is_trained
        )
        self.ledger.take(Kind.OPTIMIZER, num_bytes)
        return num_bytes

    def _trained_bytes(self) -> list[int]:
        """Of this rank's part of each parameter that is trained on its device."""
        kept = [each for each in self.sizes.values() if not each.is_offloaded]
        sharded = [p.own_shard * each.own_bytes for each in kept for p in each.parameters if p.is_trained]
        return sharded + [spec.numel * dtype_bytes(spec.dtype) for spec in self.unsharded if spec.is_trained]

    def _state_of(self, sizes: UnitSizes) -> int:
        trained = [each for each in sizes.parameters if each.is_trained]
        return sum(self.optimizer.state_bytes(each.own_shard, sizes.own_bytes) for each in trained)

    # The step

    def microbatch(self, number: int, *, is_last: bool) -> None:
        sync = self.plan.config.accumulation
        for root in self.roots:
            root.syncing = Syncing(
                reduces=is_last or sync.gradient_sync is not GradientSync.LAST,
                all_reduces=is_last or sync.gradient_sync is not GradientSync.DEFER_REPLICA,
                reshards_after_backward=is_last or sync.reshard_after_backward,
            )
        self.phase = Phase.FORWARD
        for place, event in enumerate(self.trace.events):
            if event.moment is Moment.PRE_BACKWARD:
                self.phase = Phase.BACKWARD
            self.ledger.mark()
            self._run(event)
            self._sample(number, place, event)

    def _run(self, event: StepEvent) -> None:
        root = self.root_of.get(event.unit)
        match event.moment:
            case Moment.END:
                for each in self.roots:
                    each.end()
                    self._average_replicated(each)
            case Moment.GRADIENT if root is None or not self._is_sharded(event):
                self._take_unsharded_gradient(event.parameter or "")
            case Moment.GRADIENT:
                assert root is not None
                root.gradient(event.unit, event.parameter or "")
            case moment:
                assert root is not None, f"the trace names no unit of the plan: {event.unit}"
                _HOOKS[moment](root, event.unit)
        for op, num_bytes, ranks in event.sent:
            self._send(op, event.unit, num_bytes, ranks or range(self.world_size))

    def _is_sharded(self, event: StepEvent) -> bool:
        return any(each.name == event.parameter for each in self.sizes[event.unit].parameters)

    def _take_unsharded_gradient(self, name: str) -> None:
        spec = next((spec for spec in self.unsharded if name in spec.names), None)
        if spec is not None and spec.name not in self._unsharded_gradients:
            self._unsharded_gradients.add(spec.name)
            self.ledger.take(Kind.GRADIENTS, spec.numel * dtype_bytes(spec.dtype))

    def _average_replicated(self, root: Root) -> None:
        """One all-reduce for each axis of each mesh, in a backward that reduces the others; the buffer is kept."""
        if not (root.syncing.reduces and root.syncing.all_reduces):
            return
        by_mesh: dict[object, list[ParameterSpec]] = {}
        meshes = {}
        for unit in self.plan.units:
            if unit.name in root.by_name:
                for spec in unit.replicated:
                    if spec.is_trained:
                        meshes[unit.mesh.data_parallel] = unit.mesh
                        by_mesh.setdefault(unit.mesh.data_parallel, []).append(spec)
        for key, specs in by_mesh.items():
            mesh = meshes[key]  # type: ignore[index]
            widest = max(4, *(dtype_bytes(spec.dtype) for spec in specs))
            num_bytes = (sum(spec.numel for spec in specs) + len(specs)) * widest
            self.ledger.take(Kind.COMMUNICATION, num_bytes)
            for axis in mesh.data_parallel.axes:
                self._send("all_reduce", specs[0].name, num_bytes, members(mesh, axis.role, self.rank, self.world_size))
            self.ledger.give_back(Kind.COMMUNICATION, num_bytes)

    def optimizer_step(self) -> None:
        """Gradients and state are there; what the step allocates beside them is freed again."""
        self.phase = Phase.OPTIMIZER
        self.ledger.mark()
        num_bytes = self.optimizer.step_bytes(self._trained_bytes(), self.plan.mesh.device_type)
        self.ledger.take(Kind.OPTIMIZER, num_bytes)
        self.ledger.give_back(Kind.OPTIMIZER, num_bytes)
        outputs = self.trace.events[-1].live_bytes  # of the last microbatch, until the next forward has ended
        event = StepEvent(moment=Moment.END, unit="", live_bytes=outputs)
        self._sample(-1, -1, event)

    # What is written down

    def _sample(self, number: int, place: int, event: StepEvent) -> None:
        self.states.append(
            StateSample(
                microbatch=number,
                event=place,
                meanwhile_bytes=self.ledger.largest_total,
                afterwards_bytes=self.ledger.total,
            )
        )
        if self.keeps_samples:
            self._keep_sample(number, place, event)

    def _keep_sample(self, number: int, place: int, event: StepEvent) -> None:
        """The larger of two: while the hook runs, beside what is alive; and from then on, with the state left as is."""
        activations = max(event.peak_bytes, event.live_bytes)
        if self.ledger.largest_total + event.live_bytes > self.ledger.total + activations:
            held, activations = self.ledger.largest, event.live_bytes
        else:
            held = self.ledger.now
        loss = min(event.loss_bytes, activations)
        label = "optimizer step" if place < 0 else f"{event.moment.value} {event.parameter or event.unit}".strip()
        self.samples.append(
            MemorySample(
                phase=self.phase,
                microbatch=number,
                event=place,
                unit=event.unit,
                label=label,
                bytes_by_kind=(*held[:-2], activations - loss, loss),
            )
        )

    def _send(self, op: str, unit: str, num_bytes: int, ranks: Sequence[int]) -> None:
        self.calls.append(
            CollectiveCall(
                op=op,
                phase=self.phase,
                unit=unit,
                num_bytes=num_bytes,
                ranks=len(ranks),
                ranks_on_node=num_on_node(self.rank, ranks, self.gpus_per_node),
                link=link_of(ranks, self.gpus_per_node),
                sample=len(self.states),
            )
        )

    def host_bytes(self) -> int:
        """What is offloaded: parameters, their gradients, and what the optimizer keeps."""
        offloaded = [each for each in self.sizes.values() if each.is_offloaded]
        host = sum(each.shard_elements * each.own_bytes + self._state_of(each) for each in offloaded)
        return host + sum(
            sum(p.padded_shard for p in each.parameters if p.is_trained) * each.own_bytes for each in offloaded
        )

    def result(self) -> StepEstimate:
        return StepEstimate(
            parameters_bytes=self.parameters,
            gradients_bytes=self.samples[-1].bytes_of(Kind.GRADIENTS),
            optimizer_bytes=self.optimizer_bytes,
            host_bytes=self.host_bytes() + self.trace.host_bytes,
            timeline=tuple(self.samples),
            calls=tuple(self.calls),
            notes=(
                *self.trace.notes,
                *(("The order of the units is the plan's: no model was traced.",) * self.trace.is_assumed),
            ),
        )


_HOOKS = {
    Moment.PRE_FORWARD: Root.pre_forward,
    Moment.POST_FORWARD: Root.post_forward,
    Moment.PRE_BACKWARD: Root.pre_backward,
    Moment.POST_BACKWARD: Root.post_backward,
}


def _unsharded(plan: ShardingPlan) -> Iterator[ParameterSpec]:
    """What lies in full on every rank, as far as the plan has its sizes."""
    yield from plan.replicated


def _outer_first(bottom_up: Sequence[str]) -> list[str]:
    """The order of ``named_modules``: each unit before those below it, those beside each other in their own order."""
    names = set(bottom_up)
    below: dict[str | None, list[str]] = {}
    for name in bottom_up:
        above = next((path for path in ancestors_or_self(name)[1:] if path in names and path != name), None)
        below.setdefault(above, []).append(name)
    ordered: list[str] = []
    waiting = list(reversed(below.get(None, [])))
    while waiting:
        name = waiting.pop()
        ordered.append(name)
        waiting.extend(reversed(below.get(name, [])))
    return ordered


def _reached_by_backward(inner: Sequence[ShardUnit], root: ShardUnit) -> Sequence[ShardUnit]:
    """Without the first units if nothing up to them is trained; the root's own parameters may be used anywhere."""
    trains = [any(spec.is_trained for spec in unit.parameters) for unit in inner]
    if any(spec.is_trained for spec in root.parameters) or True not in trains:
        return inner
    return inner[trains.index(True) :]


def assumed_trace(plan: ShardingPlan) -> MicrobatchTrace:
    """The units in the order of the plan, each root around those below it, the root's own gradients last."""
    forward: list[StepEvent] = []
    backward: list[StepEvent] = []

    def event(moment: Moment, unit: str, parameter: str | None = None) -> StepEvent:
        return StepEvent(moment=moment, unit=unit, parameter=parameter)

    for units in units_by_root(plan.units).values():
        *inner, root = units
        forward.append(event(Moment.PRE_FORWARD, root.name))
        for unit in inner:
            forward += [event(Moment.PRE_FORWARD, unit.name), event(Moment.POST_FORWARD, unit.name)]
        forward.append(event(Moment.POST_FORWARD, root.name))
        of_root = [event(Moment.PRE_BACKWARD, root.name)]
        for unit in reversed(_reached_by_backward(inner, root)):
            of_root.append(event(Moment.PRE_BACKWARD, unit.name))
            of_root += [
                event(Moment.GRADIENT, unit.name, spec.name) for spec in reversed(unit.parameters) if spec.is_trained
            ]
            of_root.append(event(Moment.POST_BACKWARD, unit.name))
        of_root += [
            event(Moment.GRADIENT, root.name, spec.name) for spec in reversed(root.parameters) if spec.is_trained
        ]
        backward = of_root + backward
    return MicrobatchTrace(events=(*forward, *backward, event(Moment.END, "")), is_assumed=True)
