"""Keep a library's chatter off the screen for the length of a block."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log lines from transformers or torch inside; everything as before after."""
    variable = "TRANSFORMERS_VERBOSITY"
    before = os.environ.get(variable)
    os.environ[variable] = "error"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _quiet_transformers():
                yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    try:
        from transformers.utils import logging
    except ModuleNotFoundError:
        # Whoever needs it says so, in its own words.
        yield
        return
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
