"""``composer-fsdp2 checkpoint``: the verbs below it."""

import typer

TRUST_HELP = "Unpickle classes that are not plain data, which can run any code; only for files whose author you trust."

checkpoint = typer.Typer(name="checkpoint", help="Inspect, convert and verify checkpoints.", no_args_is_help=True)
