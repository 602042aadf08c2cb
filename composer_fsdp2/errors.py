"""The exceptions of composer_fsdp2. Each message names the object, the value, the location and the next step.

Each class also derives from the type that Composer 0.32.1, or torch below it, raised at the same point, so existing
``except`` clauses still match. ``tests/compat/test_error_types.py`` compares the two.
"""


class ComposerFSDP2Error(Exception):
    """Base class of all exceptions of this package.

    Configuration, plan and load errors are raised on all ranks before anything is modified, unless the message states
    otherwise.

    Example:
        >>> try:
        ...     translate({"sharding_stratgy": "FULL_SHARD"}, device="cpu")
        ... except ComposerFSDP2Error as error:
        ...     print("sharding_strategy" in str(error))
        True
    """


class ConfigError(ComposerFSDP2Error, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another setting. Also a ValueError, as under FSDP1.

    Args:
        keys: The keys of the settings, if they are known.

    Example:
        >>> ConfigError("context_parallel_degree 3 does not divide 8 ranks", keys=("context_parallel_degree",)).keys
        ('context_parallel_degree',)
    """

    def __init__(self, message: str = "", *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class UnknownKeyError(ConfigError, KeyError):
    """A wrap function returned a dict with an unknown key. Also a KeyError, which Composer's FSDP2 raised."""

    __str__ = Exception.__str__  # KeyError.__str__ would add quotes


class GroupSizeError(ConfigError, RuntimeError):
    """The world size is not a multiple of a process group's size."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A valid setting that this package cannot apply. The message names the key and an alternative. Also a
    NotImplementedError.

    Example:
        >>> issubclass(UnsupportedError, ConfigError) and issubclass(UnsupportedError, NotImplementedError)
        True
    """


class PlanError(ComposerFSDP2Error, ValueError):
    """The model or the optimizer does not fit the plan: already sharded, foreign parameters, or a wrap function that
    raised.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters())  # of another model
        >>> try:
        ...     plan_sharding(model, ShardingConfig(), optimizers=optimizer)
        ... except PlanError as error:
        ...     print(str(error).partition(":")[0])
        The same model must be passed to the optimizer and trainer
    """


class CheckpointError(ComposerFSDP2Error, ValueError, RuntimeError):
    """A checkpoint cannot be read as requested. Derives from Exception, unlike torch's CheckpointException.

    Also a ValueError, which Composer raised where its own check, or the user's, rejected a file; and a RuntimeError,
    which torch raises for a damaged file and for a file that does not fit the model.

    Example:
        >>> try:
        ...     inspect_checkpoint("missing.pt")
        ... except CheckpointError as error:
        ...     print("missing.pt" in str(error))
        True
    """


class CallError(ComposerFSDP2Error, RuntimeError):
    """A method of FSDP1's class was called on the wrong module, or with incompatible arguments. Also a RuntimeError, as
    FSDP1.
    """


class RanksDivergedError(ComposerFSDP2Error, RuntimeError):
    """Ranks reached different collectives, or a rank did not reach one. The message lists the position of each rank.

    Also a RuntimeError, which torch raises when a collective times out.

    Example:
        >>> issubclass(RanksDivergedError, RuntimeError)
        True
    """


class ControlGroupError(ComposerFSDP2Error, RuntimeError):
    """The control group, which compares numbers between hosts, could not be created. The message names the settings to
    change.
    """


class IncompatibleVersionError(ComposerFSDP2Error, ImportError):
    """An installed package has an unsupported version. Also an ImportError.

    Example:
        >>> issubclass(IncompatibleVersionError, ImportError)
        True
    """
