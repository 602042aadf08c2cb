"""Replay one training step of a plan: compute a rank's memory over time, and its collectives."""

from collections.abc import Sequence

from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.estimate.allocated import AllocatedBytes
from composer_fsdp2.estimate.events import Hook, MicrobatchTrace, StepEvent
from composer_fsdp2.estimate.fully_shard import CommContext, ParamGroup
from composer_fsdp2.estimate.optimizers import OptimizerState, optimizer_state
from composer_fsdp2.estimate.reach import link_of, members, num_on_node
from composer_fsdp2.estimate.step import CollectiveCall, Kind, MemorySample, Phase, StepEstimate
from composer_fsdp2.estimate.unit_sizes import ParameterSizes, stored_in_full, unit_sizes
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
    """Estimate the memory and collectives of one rank in a training step, without running it.

    Replays the allocations of ``fully_shard`` and of this package in the order in which the CPU issues them. The result
    equals that of real steps to the byte (tests/estimate/test_replay.py). The allocator's fragmentation and the memory
    of NCCL and CUDA are not modelled.

    Args:
        plan: A plan of ``plan_sharding``.
        trace: One traced microbatch, with activations. With None, units are assumed to run in the plan's order, and
            activations are not counted.
        world_size: The number of ranks.
        optimizer: The optimizer's memory; None: AdamW.
        num_microbatches: Microbatches per step, each with a forward and a backward.
        rank: The rank to estimate; ranks differ if a parameter's rows do not divide evenly.
        gpus_per_node: Ranks per node, which determine the groups that are within one node.
    Raises:
        ConfigError: the plan does not fit ``world_size``.

    Does not communicate, and needs no process group.

    Example:
        >>> plan = plan_sharding(nn.Sequential(nn.Linear(1024, 1024)), translate({}, device="cpu").config)
        >>> estimate_step(plan, world_size=8).parameters_bytes
        524800
    """
    plan = plan.resolve(world_size)
    trace = assumed_trace(plan) if trace is None else trace
    replay = _Replay(plan, trace, optimizer or optimizer_state("AdamW"), world_size, rank, gpus_per_node)
    for number in range(num_microbatches):
        replay.microbatch(number, is_last=number == num_microbatches - 1)
    replay.optimizer_step()
    return replay.result()


class _Replay:
    """The state of a replayed step."""

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
        self.allocated = AllocatedBytes()
        self.samples: list[MemorySample] = []
        self.calls: list[CollectiveCall] = []
        self.phase = Phase.FORWARD
        self.sizes = {unit.name: unit_sizes(unit, rank=rank, world_size=world_size) for unit in plan.units}
        self.contexts = [
            CommContext([self.sizes[name] for name in _outer_first(units)], self.allocated, self._send)
            for units in units_by_root(plan.units).values()
        ]
        self.groups = {name: group for context in self.contexts for name, group in context.groups.items()}
        stored = self._stored(is_offloaded=False)
        self.parameters_bytes = sum(each.padded_shard * size for each, size in stored)
        self.optimizer_bytes = self._state_bytes(stored)
        self.allocated.alloc(Kind.PARAMETERS, self.parameters_bytes)
        self.allocated.alloc(Kind.BUFFERS, trace.buffer_bytes)
        self.allocated.alloc(Kind.OPTIMIZER, self.optimizer_bytes)
        self._unsharded_gradients: set[str] = set()

    # Stored before the step

    def _stored(self, *, is_offloaded: bool) -> list[tuple[ParameterSizes, int]]:
        """Return the parameters that this rank stores on its device (or on the host, if ``is_offloaded``), with
        bytes per element."""
        stored = [
            (each, sizes.own_bytes)
            for sizes in self.sizes.values()
            if sizes.is_offloaded is is_offloaded
            for each in sizes.parameters
        ]
        full = [] if is_offloaded else self.plan.replicated
        return stored + [(stored_in_full(spec), dtype_bytes(spec.dtype)) for spec in full]

    def _state_bytes(self, stored: Sequence[tuple[ParameterSizes, int]]) -> int:
        return sum(self.optimizer.state_bytes(each.own_shard, size) for each, size in stored if each.is_trained)

    def host_bytes(self) -> int:
        """The bytes of offloaded parameters, their gradients and optimizer state."""
        stored = self._stored(is_offloaded=True)
        parameters = sum(each.padded_shard * size for each, size in stored)
        gradients = sum(each.padded_shard * size for each, size in stored if each.is_trained)
        return parameters + gradients + self._state_bytes(stored)

    # The step

    def microbatch(self, number: int, *, is_last: bool) -> None:
        sync = self.plan.config.accumulation
        for context in self.contexts:
            context.reduce_grads = is_last or sync.gradient_sync is not GradientSync.LAST
            context.all_reduce_grads = is_last or sync.gradient_sync is not GradientSync.DEFER_REPLICA
            context.reshard_after_backward = is_last or sync.reshard_after_backward
        self.phase = Phase.FORWARD
        for place, event in enumerate(self.trace.events):
            if event.hook is Hook.PRE_BACKWARD:
                self.phase = Phase.BACKWARD
            self.allocated.reset_peak()
            self._run(event)
            self._sample(number, place, event)

    def _run(self, event: StepEvent) -> None:
        group = self.groups.get(event.unit)
        match event.hook:
            case Hook.END:
                for each in self.contexts:
                    each.root_post_backward_final_callback()
                    self._average_replicated(each)
            case Hook.GRADIENT if group is None or not self._is_sharded(event):
                self._alloc_unsharded_gradient(event.parameter or "")
            case Hook.GRADIENT:
                assert group is not None
                group.accumulate_grad(event.parameter or "")
            case hook:
                assert group is not None, f"the trace names no unit of the plan: {event.unit}"
                _HOOKS[hook](group)
        for op, num_bytes, ranks in event.sent:
            self._send(op, event.unit, num_bytes, ranks or range(self.world_size))

    def _is_sharded(self, event: StepEvent) -> bool:
        return any(each.name == event.parameter for each in self.sizes[event.unit].parameters)

    def _alloc_unsharded_gradient(self, name: str) -> None:
        spec = next((spec for spec in self.plan.replicated if name in spec.names), None)
        if spec is not None and spec.name not in self._unsharded_gradients:
            self._unsharded_gradients.add(spec.name)
            self.allocated.alloc(Kind.GRADIENTS, spec.numel * dtype_bytes(spec.dtype))

    def _average_replicated(self, context: CommContext) -> None:
        """Issue the all-reduces of replicated parameters' gradients, one per axis of each mesh, if this backward
        reduces gradients."""
        if not (context.reduce_grads and context.all_reduce_grads):
            return
        by_mesh: dict[object, list[ParameterSpec]] = {}
        meshes = {}
        for unit in self.plan.units:
            if unit.name in context.groups:
                for spec in unit.replicated:
                    if spec.is_trained:
                        meshes[unit.mesh.data_parallel] = unit.mesh
                        by_mesh.setdefault(unit.mesh.data_parallel, []).append(spec)
        for key, specs in by_mesh.items():
            mesh = meshes[key]  # type: ignore[index]
            widest = max(4, *(dtype_bytes(spec.dtype) for spec in specs))
            num_bytes = (sum(spec.numel for spec in specs) + len(specs)) * widest
            self.allocated.alloc(Kind.COMMUNICATION, num_bytes)
            for axis in mesh.data_parallel.axes:
                self._send("all_reduce", specs[0].name, num_bytes, members(mesh, axis.role, self.rank, self.world_size))
            self.allocated.free(Kind.COMMUNICATION, num_bytes)

    def optimizer_step(self) -> None:
        """Allocate and free the temporaries of the optimizer's step. Gradients and state are already allocated."""
        self.phase = Phase.OPTIMIZER
        self.allocated.reset_peak()
        stored = self._stored(is_offloaded=False)
        trained = [each.own_shard * size for each, size in stored if each.is_trained]
        num_bytes = self.optimizer.step_bytes(trained, self.plan.mesh.device_type)
        self.allocated.alloc(Kind.OPTIMIZER, num_bytes)
        self.allocated.free(Kind.OPTIMIZER, num_bytes)
        outputs = self.trace.events[-1].live_bytes  # of the last microbatch, alive until the next forward ends
        event = StepEvent(hook=Hook.END, unit="", live_bytes=outputs)
        self._sample(-1, -1, event)

    # Recording

    def _sample(self, number: int, place: int, event: StepEvent) -> None:
        """Record the larger of two peaks: during the hook, including live activations, or from the end of the hook
        to the next one."""
        activations = max(event.peak_bytes, event.live_bytes)
        if self.allocated.peak + event.live_bytes > self.allocated.total + activations:
            held, activations = self.allocated.at_peak, event.live_bytes
        else:
            held = self.allocated.now
        loss = min(event.loss_bytes, activations)
        label = "optimizer step" if place < 0 else f"{event.hook.value} {event.parameter or event.unit}".strip()
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
                sample=len(self.samples),
            )
        )

    def result(self) -> StepEstimate:
        return StepEstimate(
            parameters_bytes=self.parameters_bytes,
            gradients_bytes=self.samples[-1].bytes_of(Kind.GRADIENTS),
            optimizer_bytes=self.optimizer_bytes,
            host_bytes=self.host_bytes() + self.trace.host_bytes,
            timeline=tuple(self.samples),
            calls=tuple(self.calls),
            notes=self.trace.notes,
        )


_HOOKS = {
    Hook.PRE_FORWARD: ParamGroup.pre_forward,
    Hook.POST_FORWARD: ParamGroup.post_forward,
    Hook.PRE_BACKWARD: ParamGroup.pre_backward,
    Hook.POST_BACKWARD: ParamGroup.post_backward,
}


def _outer_first(bottom_up: Sequence[ShardUnit]) -> list[str]:
    """Return the names of units in the order of ``named_modules``: parents before children, siblings in their order."""
    places = {unit.name: place for place, unit in enumerate(bottom_up)}

    def places_from_above(name: str) -> list[int]:
        return [places[path] for path in reversed(ancestors_or_self(name)) if path in places]

    return sorted(places, key=places_from_above)


def _reached_by_backward(inner: Sequence[ShardUnit], root: ShardUnit) -> Sequence[ShardUnit]:
    """Return the units without the frozen ones at the beginning, which backward does not reach.

    If the root has trained parameters, all units are returned: the root may use these anywhere in the forward.
    """
    trains = [any(spec.is_trained for spec in unit.parameters) for unit in inner]
    if any(spec.is_trained for spec in root.parameters) or True not in trains:
        return inner
    return inner[trains.index(True) :]


def assumed_trace(plan: ShardingPlan) -> MicrobatchTrace:
    """Return a trace in which units run in the plan's order, within their root, and gradients of the root's
    parameters come last."""
    forward: list[StepEvent] = []
    backward: list[StepEvent] = []

    def event(hook: Hook, unit: str, parameter: str | None = None) -> StepEvent:
        return StepEvent(hook=hook, unit=unit, parameter=parameter)

    for units in units_by_root(plan.units).values():
        *inner, root = units
        forward.append(event(Hook.PRE_FORWARD, root.name))
        for unit in inner:
            forward += [event(Hook.PRE_FORWARD, unit.name), event(Hook.POST_FORWARD, unit.name)]
        forward.append(event(Hook.POST_FORWARD, root.name))
        of_root = [event(Hook.PRE_BACKWARD, root.name)]
        for unit in reversed(_reached_by_backward(inner, root)):
            of_root.append(event(Hook.PRE_BACKWARD, unit.name))
            of_root += [
                event(Hook.GRADIENT, unit.name, spec.name) for spec in reversed(unit.parameters) if spec.is_trained
            ]
            of_root.append(event(Hook.POST_BACKWARD, unit.name))
        of_root += [event(Hook.GRADIENT, root.name, spec.name) for spec in reversed(root.parameters) if spec.is_trained]
        backward = of_root + backward
    return MicrobatchTrace(
        events=(*forward, *backward, event(Hook.END, "")),
        notes=("The order of the units is the plan's: no model was traced.",),
    )
