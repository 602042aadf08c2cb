"""What composer_fsdp2 raises: each error names the thing, the value, the place and the next step.

A script that caught Composer's error goes on catching ours, which are also of the type that Composer 0.32.1 (or torch
below it) raised in the same place; ``tests/compat/test_error_types.py`` compares the two.
"""


class ComposerFSDP2Error(Exception):
    """Base class of all errors that this package raises.

    Configuration, plan and load errors are raised on all ranks before anything is changed, unless the message says
    otherwise.
    """


class ConfigError(ComposerFSDP2Error, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another; FSDP1 raised ValueError here too.

    Args:
        keys: The keys of the settings, where they are known.
    """

    def __init__(self, message: str = "", *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class UnknownKeyError(ConfigError, KeyError):
    """An unknown key in the dict that a wrap function returned; Composer's FSDP2 raised KeyError."""

    __str__ = Exception.__str__  # KeyError's would put the message in quotes


class GroupSizeError(ConfigError, RuntimeError):
    """The world size is not a multiple of a process group's size."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A setting is understood, and cannot be carried out; the message names the key and the way out."""


class PlanError(ComposerFSDP2Error, ValueError):
    """The model or the optimizer does not fit: sharded already, foreign parameters, a wrap function that failed."""


class CheckpointError(ComposerFSDP2Error, ValueError, RuntimeError):
    """A checkpoint cannot be read as asked. An ordinary Exception, unlike torch's CheckpointException.

    Composer raised ValueError where a check of its own, or the user's, refused a file; torch raises RuntimeError for a
    damaged file and for one that does not fit the model.
    """


class CallError(ComposerFSDP2Error, RuntimeError):
    """A method of FSDP1's class is called on the wrong module, or with arguments that do not fit each other.

    A RuntimeError, as FSDP1 raised.
    """


class RanksDivergedError(ComposerFSDP2Error, RuntimeError):
    """Ranks are at different collectives, or one did not arrive; names where each of them is.

    A RuntimeError, as what torch raises when a collective times out.
    """


class ControlGroupError(ComposerFSDP2Error, RuntimeError):
    """No process group for votes and guard could be made between the ranks' hosts; names what to set."""


class IncompatibleVersionError(ComposerFSDP2Error, ImportError):
    """An installed package has a version that is not supported."""
