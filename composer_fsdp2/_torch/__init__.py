"""All uses of torch's private API, and of behaviour that differs between torch versions.

Differences are detected by probes, not by comparing version numbers.
"""

# Must be imported first: it checks for the private names that the other modules import.
from composer_fsdp2._torch import api as api
