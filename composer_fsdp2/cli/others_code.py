"""Silence and interruption of models and libraries that a command calls."""

import contextlib
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings and log records of models and libraries, and redirect their prints to standard error.

    Programs parse the standard output of a command.
    """
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)  # errors too: torch logs the errors that it raises
        try:
            yield
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGINT and SIGTERM (sent by schedulers), for cleanup of partial results.

    A library that is interrupted during its import may raise another error; that becomes KeyboardInterrupt too.
    """
    is_interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # ignored under nohup
    previous = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    except Exception as error:
        if is_interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
