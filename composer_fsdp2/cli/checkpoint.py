"""``composer-fsdp2 checkpoint``: the verbs below it."""

from composer_fsdp2.cli.lazy import Verb, lazy_typer

checkpoint = lazy_typer(
    Verb(name="convert", file="checkpoint_convert"),
    Verb(name="inspect", file="checkpoint_inspect"),
    Verb(name="verify", file="checkpoint_verify"),
    name="checkpoint",
    help="Inspect, convert and verify checkpoints.",
    add_completion=False,
)
