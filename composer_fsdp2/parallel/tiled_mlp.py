"""Compute MLPs in chunks of the sequence, to reduce the peak of activation memory to that of one chunk.

[Note: tiled MLP] An MLP computes each token independently, so the outputs of chunks are those of the whole sequence.
Each chunk is checkpointed: backward recomputes and saves the wide activations of one chunk at a time. A chunk runs the
instance's original ``forward``, not the module: hooks (all-gathers, a layer plan's layouts) run once, and the gradients
of all chunks are summed before they are reduced.

[Note: sequence parallelism] A ``RowwiseParallel`` whose output is sharded over the sequence returns one rank's part of
every chunk, but the model expects that rank's part of the whole sequence. A chunk therefore takes tokens of every
rank's part: the concatenated outputs are again one rank's part.

[Note: trial] Modules that mix tokens are known by class and by name, except in third-party code. And a layer plan is
visible in the parameters, but its output layout is not. The first forward therefore computes two chunks together and
separately. The length of the output is that of one rank's part or of the full sequence; different values mean that
tokens are mixed. Values are compared to half of the dtype's digits, because matrix products with more rows round
differently.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composer_fsdp2._torch.collectives import announce
from composer_fsdp2._torch.private_names import BatchNorm, untraced, without_wrappers
from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2._torch.tensor_tree import map_tensors
from composer_fsdp2.config.parallel import TiledMLP
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.classes import classes_named
from composer_fsdp2.sharding.modules import at_path, has_forward

_SEQUENCE = -2  # the dimension of tokens; the last one is that of features
_KEY = "tiled_mlp"
_Run = Callable[[torch.Tensor], Any]
_Setting = bool | int | float | str | None  # allowed arguments besides the tensor


def tile_mlp(model: nn.Module, *, classes: Sequence[str | type[nn.Module]], chunks: int) -> list[str]:
    """Compute the MLPs of ``model`` in chunks of the sequence, in place: the same gradients with less memory.

    Supports any MLP whose ``forward`` takes one tensor and computes each token independently: those of Llama, GPT, MPT.
    Replaces ``forward`` of the instances; classes are not modified. Call it before or after sharding, checkpointing and
    ``parallelize_module``.

    Args:
        classes: The classes of the MLPs, or their names.
        chunks: The number of chunks, at least 2. The peak of an MLP's activations is divided by about this number, and
            each chunk is computed once more in backward. A sequence with fewer tokens has one chunk per token.
    Returns:
        The paths of these MLPs.
    Raises:
        ConfigError: no class, or fewer than 2 chunks.
        PlanError: no module has such a class, or a module is known to mix tokens; the model is unchanged. Other modules
            that mix tokens raise it in the first forward, which computes two chunks together and separately once.

    Gradients of the chunks are accumulated in the dtype in which the MLP computes. Dropout uses separate random numbers
    per chunk: the same in forward and backward, but not those of the MLP without chunks. Does not communicate.

    Example:
        >>> class MLP(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        ...     def forward(self, x):
        ...         return self.down(self.up(x).relu())
        >>> model = nn.Sequential(MLP())
        >>> tile_mlp(model, classes=[MLP], chunks=4)
        ['0']
        >>> model(torch.ones(2, 8, 4)).shape
        torch.Size([2, 8, 4])
    """
    names = tuple(each if isinstance(each, str) else each.__name__ for each in classes)
    paths = choose_tiled(model, TiledMLP(classes=names, chunks=chunks), place="tile_mlp")
    apply_tiling(model, paths, chunks)
    return list(paths)


def choose_tiled(model: nn.Module, tiled: TiledMLP | None, *, place: str = f"fsdp_config.{_KEY}") -> tuple[str, ...]:
    """The paths of the modules that are computed in chunks. Only reads.

    Args:
        place: The name of the setting in errors.
    Raises:
        PlanError: no module has such a class, or a module cannot be computed in chunks; names all of them.
    """
    if tiled is None:
        return ()
    types = classes_named(model, tiled.classes, key=f"{place}.classes")
    chosen: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, types) and module not in inside:
            chosen[path] = module
            inside.update(module.modules())
    problems = [
        f"{place}: {path or 'the model itself'} ({type(module).__name__}) {reason}"
        for path, module in chosen.items()
        for reason in islice(_reasons_against(module), 1)
    ]
    if problems:
        raise PlanError("\n".join(problems[:3]))
    return tuple(chosen)


def apply_tiling(model: nn.Module, paths: Sequence[str], chunks: int) -> None:
    """Replace the forward of the modules at ``paths``, from ``choose_tiled``, by one that runs in chunks."""
    for path in paths:
        module = at_path(model, path)
        module.forward = _TiledForward(module, without_wrappers(path), chunks)


# ---------------------------------------------------------------------------------------------------------------------
# Supported modules


_ATTENTION = "attention between tokens"
_MIXING: dict[tuple[type[nn.Module], ...], str] = {
    (BatchNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d): "a norm whose statistics are "
    "of all tokens",
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): "a convolution over tokens",
    (nn.RNNBase,): "a recurrent layer over tokens",
    (nn.MultiheadAttention,): _ATTENTION,
}
# Attention and expert layers by the names of their parts in transformers' models, MPT and TorchTitan.
_ATTENDING = re.compile(r"(\w*_)?(attn|attention)")
_ROUTED = re.compile(r"(\w*_)?(experts?(_?\d+)?|router)")


def _reasons_against(module: nn.Module) -> Iterator[str]:
    """Reasons why a module cannot be computed in chunks, each as the end of a sentence about the module."""
    if not has_forward(module):
        yield "has no forward; name the class of the MLPs in it"
    signature = inspect.signature(module.forward).parameters.values()
    required = [each.name for each in signature if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if len(required) != 1:
        yield f"takes {', '.join(required) or 'nothing'}; only a module that takes one tensor can be cut by its tokens"
    for path, inner in module.named_modules():
        at, name = f" ({path})" if path else "", path.rpartition(".")[2]
        if isinstance(vars(inner).get("forward"), _TiledForward):
            yield f"is tiled already{at}"
        if _ROUTED.fullmatch(name):
            yield f"routes tokens to experts{at}, so it is no token-wise MLP; name the class of the experts instead"
        named = _ATTENTION if _ATTENDING.fullmatch(name) else None
        if what := next((what for kinds, what in _MIXING.items() if isinstance(inner, kinds)), named):
            yield f"has {what}{at}, so pieces of the sequence would give other numbers; leave it out"


# ---------------------------------------------------------------------------------------------------------------------
# Their forward


class _TiledForward:
    """The ``forward`` of one module: runs the original one on chunks of the sequence ([Note: tiled MLP]).

    An object instead of a function, so that the module can be copied and pickled.
    """

    def __init__(self, module: nn.Module, path: str, chunks: int) -> None:
        self.module, self.path, self.chunks = module, path, chunks
        self.original: Callable[..., Any] = module.forward
        self.num_parts: int | None = None  # the number of ranks over which the output's sequence is sharded, once known
        self.is_token_wise = False  # not known yet
        update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, run = self._read(args, kwargs)
        can_be_chunked = hidden.dim() > 1 and hidden.shape[_SEQUENCE] > 1
        if can_be_chunked and not self.is_token_wise:
            self._try_chunks(hidden, run)
        if not can_be_chunked or self.num_parts is None:
            return self.original(*args, **kwargs)
        pieces = self._chunks(hidden, self.num_parts, self.chunks)
        return _concatenate([checkpoint(run, piece, use_reentrant=False) for piece in pieces])

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, _Run]:
        """Split the arguments into the tensor, and the original forward as a function of that tensor."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        if len(tensors) != 1 or not all(isinstance(value, torch.Tensor | _Setting) for value in given.values()):
            shown = ", ".join(f"{name}: {type(value).__name__}" for name, value in given.items())
            raise self._error(f"was called with ({shown}); only one tensor can be cut along its tokens")

        def run(piece: torch.Tensor) -> Any:
            # If it was offloaded to the CPU, it comes back contiguous; some operators then save different tensors.
            positional, by_name = map_tensors((args, kwargs), lambda _: piece.contiguous())
            return self.original(*positional, **by_name)

        return tensors[0], run

    @untraced
    def _try_chunks(self, hidden: torch.Tensor, run: _Run) -> None:
        """Compute two chunks together and separately, to set ``num_parts`` and ``is_token_wise``.

        Does nothing if the sequence is too short for the ranks of a layer plan. See [Note: trial].

        Raises:
            PlanError: an output has a different number of tokens, or the results differ.
        """
        length, num_shards, num_ranks = hidden.shape[_SEQUENCE], _num_shards(hidden), self._num_ranks()
        smallest = 2 * max(num_shards, num_ranks)
        if length < smallest:
            return
        num_tokens = min(length, max(2 * math.ceil(length / self.chunks), smallest)) // smallest * smallest
        trial = _like(hidden, _local(hidden).narrow(_SEQUENCE, 0, num_tokens // num_shards))
        with self._without_side_effects(hidden.device):
            unchunked, num_parts = run(trial), 1
            if num_ranks > 1 and isinstance(unchunked, torch.Tensor):
                num_parts = max(num_tokens // max(unchunked.shape[_SEQUENCE], 1), 1)
            halves = self._chunks(trial, num_parts, 2)
            chunked = [run(half) for half in halves]
        for half, output in zip(halves, chunked, strict=True):
            expected_shape = (*half.shape[:_SEQUENCE], half.shape[_SEQUENCE] // num_parts)
            if not isinstance(output, torch.Tensor) or tuple(output.shape[:-1]) != expected_shape:
                shown = f"{tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
                raise self._error(f"made {shown} of {tuple(half.shape)}; an MLP gives one tensor, with as many tokens")
        self.num_parts = num_parts
        if hidden.is_meta:
            return
        expected, found = _local(unchunked), _local(_concatenate(chunked))
        scale, distance = expected.abs().max().item(), (expected - found).abs().max().item()
        if distance > math.sqrt(torch.finfo(expected.dtype).eps) * scale:
            raise self._error(
                f"gives other numbers for a piece of the sequence than for two pieces together (by {distance:.2g}, the "
                f"largest is {scale:.2g}), so it mixes tokens"
            )
        self.is_token_wise = scale > 0  # zeros, as of a layer that is initialized to zero, prove nothing

    @contextmanager
    def _without_side_effects(self, device: torch.device) -> Iterator[None]:
        """Disable gradients and dropout within the block, and preserve the RNG states."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(
                torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
            )
            for module in self.module.modules():
                stack.enter_context(replaced(module, "training", False))
            yield
        torch.clear_autocast_cache()  # weights that were cast without gradients
        if self._num_ranks() > 1:
            announce("trial")  # a rank that failed here tries again, and then the others must too

    def _num_ranks(self) -> int:
        """The number of ranks over which a layer plan shards the module."""
        return next((each.device_mesh.size() for each in self.module.parameters() if isinstance(each, DTensor)), 1)

    def _chunks(self, hidden: torch.Tensor, num_parts: int, chunks: int) -> list[torch.Tensor]:
        """Chunks with an equal number of tokens of each rank's part ([Note: sequence parallelism])."""
        length, num_shards = hidden.shape[_SEQUENCE], _num_shards(hidden)
        if length % num_parts or length % num_shards:
            raise self._error(f"got {length} tokens, which {max(num_parts, num_shards)} ranks cannot share evenly")
        parts = _local(hidden).unflatten(_SEQUENCE, (1 if num_shards > 1 else num_parts, -1))
        return [_like(hidden, each.flatten(_SEQUENCE - 1, _SEQUENCE)) for each in parts.chunk(chunks, _SEQUENCE)]

    def _error(self, problem: str) -> PlanError:
        name = type(self.module).__name__
        return PlanError(f"{_KEY}: {self.path} ({name}) {problem}; leave {name} out of {_KEY}")


def _num_shards(tensor: torch.Tensor) -> int:
    """The number of ranks over which a DTensor's sequence is sharded; 1 for any other tensor."""
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True) if isinstance(tensor, DTensor) else ()
    return math.prod(size for size, placement in axes if placement.is_shard(tensor.dim() + _SEQUENCE))


def _concatenate(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return _like(pieces[0], torch.cat([_local(piece) for piece in pieces], _SEQUENCE))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as a DTensor with the placements of ``tensor``; ``local`` if ``tensor`` is a plain tensor."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
