"""What composer_fsdp2 raises: each error names the thing, the value, the place and the next step."""

__all__ = [
    "CheckpointError",
    "ComposerFSDP2Error",
    "ConfigError",
    "ControlGroupError",
    "IncompatibleVersionError",
    "PlanError",
    "RanksPartedError",
    "UnsupportedError",
]


class ComposerFSDP2Error(Exception):
    """Every error that this package raises on purpose; raised on all ranks, before anything is changed."""


class ConfigError(ComposerFSDP2Error, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another; FSDP1 raised ValueError here too."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A setting is understood, and cannot be carried out; the message names the key and the way out."""


class PlanError(ComposerFSDP2Error, ValueError):
    """The model or the optimizer does not fit: sharded already, foreign parameters, a wrap function that failed."""


class CheckpointError(ComposerFSDP2Error):
    """A checkpoint cannot be read as asked. An ordinary Exception, unlike torch's CheckpointException."""


class RanksPartedError(ComposerFSDP2Error, RuntimeError):
    """Ranks stand before different collectives, or one did not come; names where each of them stands.

    A RuntimeError, as what torch raises when a collective times out.
    """


class ControlGroupError(ComposerFSDP2Error, RuntimeError):
    """No process group for votes and guard could be made between the ranks' hosts; names what to set."""


class IncompatibleVersionError(ComposerFSDP2Error, ImportError):
    """An installed package is of a version that this one was not written for."""
