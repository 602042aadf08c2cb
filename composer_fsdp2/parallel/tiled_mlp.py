"""MLPs that are computed in pieces of the sequence, so that a long one needs the memory of a piece.

[Note: tiled MLP] An MLP computes each token by itself, so pieces of the sequence one after the other give the same.
Each is checkpointed: what the wide layers save lives in backward for that piece alone. A piece runs the instance's
former ``forward``, not the module, so what hooks do around it (gathering parameters, a tensor parallel plan's layouts)
is done once, and the gradients of all pieces are one sum before they are reduced.

[Note: sequence parallelism] A ``RowwiseParallel`` whose output is sharded over the sequence gives each rank a part of
every piece, where the model expects a part of the whole. Pieces are then taken of each rank's part alike: put together
they are again that rank's.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composer_fsdp2._torch.collectives import announce
from composer_fsdp2._torch.private_names import BatchNorm, without_wrappers
from composer_fsdp2.config.parallel import TiledMLP
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.classes import classes_named
from composer_fsdp2.sharding.modules import at_path, has_forward

_SEQUENCE = -2  # the axis of tokens; the last one holds a token's numbers
_KEY = "tiled_mlp"
_Run = Callable[[torch.Tensor], Any]
_Setting = bool | int | float | str | None  # what may stand beside the tensor


def tile_mlp(model: nn.Module, *, classes: Sequence[str | type[nn.Module]], chunks: int) -> list[str]:
    """Compute the MLPs of ``model`` in pieces of the sequence, in place: the same gradients in less memory.

    Any MLP whose ``forward`` takes one tensor and computes each token by itself: Llama's, GPT's, MPT's. The instances
    get another ``forward``; no class is touched. Before or after sharding, checkpointing and ``parallelize_module``.

    Args:
        classes: Those of the MLPs, or their names.
        chunks: In how many pieces, from 2 on; the peak of an MLP's activations is divided by about as many, and each
            piece is computed once more in backward. A sequence of fewer tokens has a piece for each.
    Returns:
        The paths of these MLPs.
    Raises:
        ConfigError: no class, or fewer than 2 chunks.
        PlanError: no module is of such a class, or one does not compute each token by itself; nothing has been changed
            then.

    In each gradient the pieces' parts are added up in the dtype that the MLP computes in. Dropout draws its numbers
    piece by piece: the same in forward and backward, but not those of the undivided MLP. Does not communicate.
    """
    names = tuple(each if isinstance(each, str) else each.__name__ for each in classes)
    tiled = TiledMLP(classes=names, chunks=chunks)
    paths = choose_tiled(model, tiled, place="tile_mlp")
    apply_tiling(model, paths, chunks)
    return list(paths)


def choose_tiled(model: nn.Module, tiled: TiledMLP | None, *, place: str = f"fsdp_config.{_KEY}") -> tuple[str, ...]:
    """The paths of the modules that are computed in pieces; only reads.

    Args:
        place: What the errors call the choice.
    Raises:
        PlanError: no module is of a class, or one cannot be computed so; names all of them.
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
    reasons = {path: next(_reasons_against(module), None) for path, module in chosen.items()}
    problems = [
        f"{place}: {path or 'the model itself'} ({type(chosen[path]).__name__}) {reason}"
        for path, reason in reasons.items()
        if reason is not None
    ]
    if problems:
        raise PlanError("\n".join(problems[:3]))
    return tuple(chosen)


def apply_tiling(model: nn.Module, paths: Sequence[str], chunks: int) -> None:
    """Give the modules at these paths, from ``choose_tiled``, a forward that computes piece by piece."""
    for path in paths:
        module = at_path(model, path)
        module.forward = _InPieces(module, without_wrappers(path), chunks)


# ---------------------------------------------------------------------------------------------------------------------
# Which modules can be


_OF_ALL_TOKENS = "a norm whose statistics are of all tokens"
_MIXING: dict[type[nn.Module], str] = {
    BatchNorm: _OF_ALL_TOKENS,
    nn.GroupNorm: _OF_ALL_TOKENS,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _OF_ALL_TOKENS),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), "a convolution over tokens"),
    nn.RNNBase: "a recurrent layer over tokens",
    nn.MultiheadAttention: "attention between tokens",
}
# The same, and blocks of experts, by the names of their parts in transformers' models, MPT and TorchTitan.
_ATTENDING = re.compile(r"(\w*_)?(attn|attention)")
_ROUTED = re.compile(r"(\w*_)?(experts?(_?\d+)?|router)")


def _reasons_against(module: nn.Module) -> Iterator[str]:
    """Why a module cannot be computed in pieces, as the end of a sentence about it."""
    if not has_forward(module):
        yield "has no forward; name the class of the MLPs in it"
    signature = inspect.signature(module.forward).parameters.values()
    required = [each.name for each in signature if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if len(required) != 1:
        yield f"takes {', '.join(required) or 'nothing'}; only a module that takes one tensor can be cut by its tokens"
    for path, inner in module.named_modules():
        at, name = f" ({path})" if path else "", path.rpartition(".")[2]
        if isinstance(vars(inner).get("forward"), _InPieces):
            yield f"is tiled already{at}"
        if _ROUTED.fullmatch(name):
            yield f"routes tokens to experts{at}, so it is no token-wise MLP; name the class of the experts instead"
        mixing = [what for kind, what in _MIXING.items() if isinstance(inner, kind)]
        if mixing or _ATTENDING.fullmatch(name):
            what = mixing[0] if mixing else _MIXING[nn.MultiheadAttention]
            yield f"has {what}{at}, so pieces of the sequence would give other numbers; leave it out"


# ---------------------------------------------------------------------------------------------------------------------
# What they run


class _InPieces:
    """The ``forward`` of one module: its former one, of pieces of the sequence ([Note: tiled MLP]).

    An object rather than a function, so that a module can be copied and pickled as before.
    """

    def __init__(self, module: nn.Module, path: str, chunks: int) -> None:
        self.module, self.path, self.chunks = module, path, chunks
        self.former: Callable[..., Any] = module.forward
        self.num_parts: int | None = None
        update_wrapper(self, self.former)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, run = self._read(args, kwargs)
        num_parts = self._num_parts(hidden, run) if hidden.dim() > 1 else 1
        pieces = self._cut(hidden, num_parts) if hidden.dim() > 1 else [hidden]
        if len(pieces) == 1:
            return self.former(*args, **kwargs)
        outputs = [self._checked(checkpoint(run, piece, use_reentrant=False), piece, num_parts) for piece in pieces]
        if any(size > 1 for size, _ in _sequence_axes(outputs[0])):
            return _as(outputs[0], torch.cat([_local(output) for output in outputs], _SEQUENCE))
        return torch.cat(outputs, _SEQUENCE)

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        """The tensor, and the former forward as a function of it alone."""
        given: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs.items())
        tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        unknown = any(not isinstance(value, torch.Tensor | _Setting) for value in given.values())
        if len(tensors) != 1 or unknown:
            shown = ", ".join(f"{name}: {type(value).__name__}" for name, value in given.items())
            raise self._error(f"was called with ({shown}); only one tensor can be cut along its tokens")
        [name] = tensors
        return given[name], partial(_call_with, self.former, name, args, kwargs)

    def _num_parts(self, hidden: torch.Tensor, run: _Run) -> int:
        """Over how many ranks the output's sequence is sharded ([Note: sequence parallelism]).

        A tensor parallel plan is known by its parameters, and what it does with the output by trying, once.
        """
        mesh = next((each.device_mesh for each in self.module.parameters() if isinstance(each, DTensor)), None)
        if mesh is None or hidden.shape[_SEQUENCE] < mesh.size():
            return 1
        if self.num_parts is None:
            sample = hidden.narrow(_SEQUENCE, 0, mesh.size())
            devices = [] if hidden.device.type == "cpu" else [hidden.device]
            with torch.no_grad(), torch.random.fork_rng(devices, device_type=hidden.device.type):
                output = run(sample)
            announce("trial")  # a rank that failed in it tries again, which the others then must, too
            self.num_parts = max(mesh.size() // max(output.shape[_SEQUENCE], 1), 1)
        return self.num_parts

    def _cut(self, hidden: torch.Tensor, num_parts: int) -> Sequence[torch.Tensor]:
        length = hidden.shape[_SEQUENCE]
        num_ranks = math.prod(size for size, _ in _sequence_axes(hidden))
        if length % num_parts or length % num_ranks:
            raise self._error(f"got {length} tokens, which {max(num_parts, num_ranks)} ranks cannot share evenly")
        if num_ranks > 1:
            return [_as(hidden, piece) for piece in _local(hidden).chunk(self.chunks, _SEQUENCE)]
        if num_parts == 1:
            return hidden.chunk(self.chunks, _SEQUENCE)
        parts = hidden.unflatten(_SEQUENCE, (num_parts, -1))
        return [piece.flatten(_SEQUENCE - 1, _SEQUENCE) for piece in parts.chunk(self.chunks, _SEQUENCE)]

    def _checked(self, output: Any, piece: torch.Tensor, num_parts: int) -> torch.Tensor:
        expected = (*piece.shape[:_SEQUENCE], piece.shape[_SEQUENCE] // num_parts)
        if not isinstance(output, torch.Tensor) or tuple(output.shape[:-1]) != expected:
            shown = f"{tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
            raise self._error(f"made {shown} of {tuple(piece.shape)}; an MLP gives one tensor, with as many tokens")
        return output

    def _error(self, problem: str) -> PlanError:
        name = type(self.module).__name__
        return PlanError(f"{_KEY}: {self.path} ({name}) {problem}; leave {name} out of {_KEY}")


def _call_with(
    forward: Callable[..., Any], name: int | str, args: tuple[Any, ...], kwargs: dict[str, Any], piece: torch.Tensor
) -> Any:
    """``forward`` with the same arguments, but ``piece`` in the place of the one called ``name``."""
    # Offloaded to the CPU in between, it comes back contiguous; some operators save other tensors then.
    piece = piece.contiguous()
    if isinstance(name, int):
        return forward(*args[:name], piece, *args[name + 1 :], **kwargs)
    return forward(*args, **kwargs | {name: piece})


def _sequence_axes(tensor: torch.Tensor) -> list[tuple[int, Any]]:
    """The mesh axes that a DTensor's sequence is sharded over: size and placement."""
    if not isinstance(tensor, DTensor):
        return []
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return [(size, placement) for size, placement in axes if placement.is_shard(tensor.dim() + _SEQUENCE)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(model: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor with this rank's part, placed as ``model`` is."""
    assert isinstance(model, DTensor)
    return DTensor.from_local(local, model.device_mesh, model.placements, run_check=False)
