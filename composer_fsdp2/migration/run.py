"""What a configuration of any dialect asks for, independent of any framework's key names."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.value import Value


class WrapKind(enum.Enum):
    """Who chooses the modules that become units."""

    HOOKS = "the model's own hooks (Composer's fsdp_wrap_fn, _fsdp_wrap)"
    CLASSES = "modules of these classes"
    SIZE = "modules with so many parameters"
    ROOT = "the whole model is one unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap(Value):
    """Which modules become units.

    Args:
        classes: Under CLASSES; empty means the classes that the model itself names (transformers'
            ``_no_split_modules``).
        min_num_params: Under SIZE.
        embeddings: Whether they are units of their own.
        output: Whether the output head is one.
        experts: Classes of experts that are.
    """

    kind: WrapKind
    classes: tuple[str, ...] = ()
    min_num_params: int = 0
    embeddings: bool = False
    output: bool = False
    experts: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[str, ...]:
        """The further kinds of modules that are units of their own, by name."""
        kinds = {"embeddings": self.embeddings, "output": self.output, "experts": self.experts}
        return tuple(name for name, wanted in kinds.items() if wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Value):
    """What a section asks for.

    Args:
        config: With -1 for what the number of ranks leaves.
        precision: Composer's; ``amp_...`` runs the forward under torch.autocast.
        state_dict_type: "full" or "sharded", what checkpoints hold.
        strict, verbose: As in an ``fsdp_config``.
        async_save: Whether checkpoints are written while training goes on.
        save_only_model: Whether they lack the optimizer.
        max_grad_norm: To which norm gradients are clipped.
        num_ranks, num_nodes: Of the run, where its file tells.
        tensor_parallel, context_parallel, pipeline_parallel, expert_parallel: Over how many ranks.
        expert_patch: Whether experts without tokens run on one token, so that all ranks run the same.
        tiled_mlp: Into how many pieces of the sequence an MLP is cut.
        frozen: The names of parameters that are not trained begin so.
        selective_checkpointing: Which of the checkpointed modules are recomputed: every n-th, or by operator.
        compile: Whether the model is compiled.
    """

    config: ShardingConfig
    wrap: Wrap
    precision: str = "fp32"
    state_dict_type: str = "full"
    strict: bool = True
    verbose: bool = False
    async_save: bool = False
    save_only_model: bool = False
    max_grad_norm: float | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_patch: bool = False
    tiled_mlp: int | None = None
    frozen: tuple[str, ...] = ()
    selective_checkpointing: str | None = None
    compile: bool = False
