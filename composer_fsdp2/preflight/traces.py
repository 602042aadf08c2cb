"""How a run's microbatch is computed with other settings of its activations and rows, from as few traces as can be."""

from dataclasses import replace

from composer_fsdp2.estimate.events import MicrobatchTrace
from composer_fsdp2.estimate.mixing import with_blocks, with_rows
from composer_fsdp2.estimate.settings import Activations, blocks_of, chosen_blocks, plan_with, present_settings
from composer_fsdp2.estimate.trace import trace_microbatch
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.sharding.activations import caching_modules


class Traces:
    """From what is done with activations, and the rows of a microbatch, to its trace.

    Taken are those of one row and of two, of no block, of all, and of the plan's own modules; the others follow.
    """

    def __init__(self, run: PreflightRun) -> None:
        self._run, self._present = run, present_settings(run.plan, 1)
        self._blocks = tuple(name for row in blocks_of(run.plan) for name in row)
        self._taken: dict[tuple[Activations, int], MicrobatchTrace] = {}

    def __call__(self, activations: Activations, rows: int) -> MicrobatchTrace:
        one = self._of_blocks(activations, 1)
        return one if rows == 1 else with_rows(one, self._of_blocks(activations, 2), rows)

    def _of_blocks(self, activations: Activations, rows: int) -> MicrobatchTrace:
        if activations.every < 2:
            return self._take(activations, rows)
        plain, all_of_them = self._take(Activations(), rows), self._take(replace(activations, every=1), rows)
        return with_blocks(plain, all_of_them, self._blocks, chosen_blocks(self._run.plan, activations))

    def _take(self, activations: Activations, rows: int) -> MicrobatchTrace:
        key = (activations, rows)
        if key not in self._taken:
            plan = plan_with(self._run.plan, replace(self._present, activations=activations))
            recomputed = plan.checkpointed if activations.recompute else ()
            modules = dict(self._run.model.named_modules(remove_duplicate=False))
            plan = replace(plan, caching=caching_modules(modules, recomputed))
            self._taken[key] = trace_microbatch(
                self._run.model,
                plan,
                self._run.loss,
                rows=self._run.computed_of(rows),
                tokens=self._run.sequence_length,
                precision=self._run.precision,
            )
        return self._taken[key]
