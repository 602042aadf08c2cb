"""The one place that knows torch's private API and what differs between its versions.

Differences are found by probes, not by comparing versions.
"""

# Before any other file of this folder: it looks for the private names that they import.
from composer_fsdp2._torch import api as api
