"""What a configuration of any dialect asks for, independent of any framework's key names."""

from dataclasses import dataclass, replace

from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.value import Value
from composer_fsdp2.config.wrap import Wrap as Wrap
from composer_fsdp2.config.wrap import WrapKind as WrapKind
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Value):
    """What a section asks for.

    Args:
        config: With -1 for what the number of ranks leaves.
        precision: Composer's; ``amp_...`` runs the forward under torch.autocast.
        stored_dtype: In which the system stores trained parameters, and with them the optimizer's state, whatever they
            were created in; None: in that dtype.
        state_dict_type: "full" or "sharded", what checkpoints hold.
        verbose: As in an ``fsdp_config``.
        async_save: Whether checkpoints are written while training goes on.
        save_only_model: Whether they lack the optimizer.
        max_grad_norm: To which norm gradients are clipped.
        other_clipping: How they are clipped where it is not to a norm, with its threshold: ``value 0.5``.
        num_ranks, num_nodes: Of the run, where its file tells.
        tensor_parallel, pipeline_parallel, expert_parallel: Over how many ranks, beside those of the mesh.
        has_expert_axis: Whether the ranks of experts are not among those that share a batch's shards, but an axis of
            their own.
        tiled_chunks: Into how many pieces of the sequence MLPs are cut whose classes the file does not name.
        selective_checkpointing: Which of the checkpointed modules are recomputed: every n-th, or by operator.
        compile: Whether the model is compiled.
        adapter: The adapter, such as ``lora``, that is trained instead of the model's parameters; the code creates it.
        has_fp8_layers: Whether a converter replaces layers by fp8 ones, at any precision.
    """

    config: ShardingConfig
    precision: str = "fp32"
    stored_dtype: str | None = None
    state_dict_type: str = "full"
    verbose: bool = False
    async_save: bool = False
    save_only_model: bool = False
    max_grad_norm: float | None = None
    other_clipping: str | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    has_expert_axis: bool = False
    tiled_chunks: int | None = None
    selective_checkpointing: str | None = None
    compile: bool = False
    adapter: str | None = None
    has_fp8_layers: bool = False

    @property
    def wrap(self) -> Wrap:
        """Which modules become units."""
        return self.config.wrap

    @property
    def context_parallel(self) -> int:
        """Over how many ranks sequences are divided; parameters are sharded over these ranks as well."""
        return self.config.context_parallel_degree

    @property
    def mlp_chunks(self) -> int | None:
        """Into how many pieces of the sequence MLPs are cut."""
        return self.tiled_chunks if self.config.tiled_mlp is None else self.config.tiled_mlp.chunks

    def with_degrees(self) -> "RunConfig":
        """With the degree that was left open, where the number of ranks tells it; else as it is."""
        others = self.tensor_parallel * self.pipeline_parallel * (self.expert_parallel if self.has_expert_axis else 1)
        if self.num_ranks is None or others != 1:
            return self
        try:
            mesh = self.config.mesh.resolve(self.num_ranks)
        except ConfigError:  # these ranks cannot be divided so; the target's own words say what is open
            return self
        return replace(self, config=replace(self.config, mesh=mesh))
