"""What ranks that compute one batch together do, as values."""

import enum


class BroadcastBatch(enum.Enum):
    """How ranks that share one batch come to have it; the values are what a configuration says.

    ``OFF``: each takes what its own loader gives, which must be the same on all of them. ``FIRST``: all take the first
    rank's. ``GATHER``: all take the rows that they read, one rank's after the other's.
    """

    OFF = False
    FIRST = "first"
    GATHER = "gather"
