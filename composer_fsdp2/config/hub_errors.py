"""Find an error of the Hugging Face Hub's client in a traceback, and show the user the next step."""

import re
import traceback

_LOGIN = "run huggingface-cli login, or set HF_TOKEN"
# By the class in huggingface_hub.errors, the cause before its consequence. {name} is a model, {page} its page.
_NEXT_STEPS = {
    "GatedRepoError": f"{{name}} is gated: accept its licence on {{page}}, then {_LOGIN}, with the same account",
    "RepositoryNotFoundError": "there is neither a folder {name} nor a model of that name on the Hub, or it is "
    f"private: correct the name ({{page}}), or {_LOGIN}, with an account that may read it",
    "OfflineModeIsEnabled": "{name} is not in the cache, and HF_HUB_OFFLINE forbids its download: unset it, or set "
    "HF_HOME to a cache that has the model",
    "HFValidationError": "there is no folder {name}, and no model on the Hub can have that name",
    "LocalEntryNotFoundError": "{name} is not in the cache, and the Hub cannot be reached: run "
    "huggingface-cli download {name} on a machine with a network, and set HF_HOME to a copy of its cache",
}
_REPO = re.compile(r"(?:https?://[^/\s]+)?/((?:[\w.-]+/)?[\w.-]+)/resolve/")
_INVALID = re.compile(r"HFValidationError: .*?'([^'\s]+/[^'\s]+)'\.")


def hub_advice(text: str) -> str | None:
    """Return the next step for the user if a traceback contains an error of the Hub's client, else None.

    Args:
        text: A traceback as printed by Python, including chained exceptions.
    """
    kind = next((kind for kind in _NEXT_STEPS if re.search(rf"\b{kind}: ", text)), None)
    if kind is None:
        return None
    found = (_INVALID if kind == "HFValidationError" else _REPO).search(text)
    name = found[1] if found else "the model"
    page = f"https://huggingface.co/{name}" if found else "https://huggingface.co"
    return _NEXT_STEPS[kind].format(name=name, page=page)


def hub_advice_of(error: BaseException) -> str | None:
    """The same for an exception, or its causes."""
    return hub_advice("".join(traceback.format_exception(error)))
