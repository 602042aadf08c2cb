"""``composer-fsdp2 checkpoint``: the verbs below it."""

import typer

checkpoint = typer.Typer(
    name="checkpoint", help="Look into checkpoints, convert them, check them.", no_args_is_help=True
)
