"""The modules that are units, which TorchTitan's models choose in their parallelize.py."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.migration.run import Wrap, WrapKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """A model's units, as the ``wrap`` of a run and as a text for reports."""

    wrap: Wrap
    told: str


CLASSES = ("TransformerBlock",)
USUAL_WRAP = Wrap(kind=WrapKind.CLASSES, classes=CLASSES, embeddings=True, output=True)
USUAL_UNITS = (
    "the token embedding, each block, the last norm together with the output (which default leaves gathered; here it "
    "is freed like the others), and the rest (in v0.1.0 each block, and the rest)"
)
_OWN_UNITS = {
    "flux": Units(
        wrap=Wrap(kind=WrapKind.CLASSES, classes=("DoubleStreamBlock", "SingleStreamBlock")),
        told="each block, the four layers before them, the last one, and the rest; the four and the last one stay with "
        "the rest here",
    ),
    "llama3-siglip2": Units(
        wrap=replace(USUAL_WRAP, classes=(*CLASSES, "TransformerLayer")),
        told=f"each layer of the encoder, {USUAL_UNITS}",
    ),
    "transformers_modeling_backend": Units(
        wrap=replace(USUAL_WRAP, classes=()), told=f"{USUAL_UNITS}; blocks are the layers of transformers' model"
    ),
}


def units_of(values: Mapping[str, Any]) -> Units:
    """Return the units of the model that a file names."""
    model = values.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return _OWN_UNITS.get(str(name), Units(wrap=USUAL_WRAP, told=USUAL_UNITS))
