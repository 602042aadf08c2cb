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
def interruptible() -> Iterator[None]:
    """SIGINT, and SIGTERM as of a scheduler, are KeyboardInterrupt in the block, so that what is half done is undone.

    Libraries that are interrupted while they are imported raise other errors, or fail later; that is the same.
    """
    is_interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # others cannot have handlers
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # by nohup, say
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    except Exception as error:
        if is_interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
