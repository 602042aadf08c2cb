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
    """In the block, suppress warnings and log records, and redirect prints of models and libraries to standard error.

    The standard output of a command must contain its result only, because programs parse it.
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
    """In the block, raise KeyboardInterrupt on SIGINT and on SIGTERM (sent by schedulers), to clean up partial results.

    If a library is interrupted during its import and raises another error, that error is converted to
    KeyboardInterrupt.
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
