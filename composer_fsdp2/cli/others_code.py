"""What a command that calls somebody else's code keeps from its user, and how it ends where it is interrupted."""

import contextlib
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Around code of models and libraries: their warnings and log lines would stand between a command and its answer.

    What they print goes to standard error, because programs read what a command prints itself.
    """
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)  # errors, too: torch logs what it raises
        try:
            yield
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, as of a scheduler, is KeyboardInterrupt in the block, so that what is half done is undone."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # others cannot have handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
