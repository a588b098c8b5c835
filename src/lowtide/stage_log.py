"""What lowtide says while it works: one line about a result, for everyone.

The line goes to the logger `lowtide` at level INFO where that shows it, else to stderr. A program that sets
the level of this logger higher, `logging.getLogger("lowtide").setLevel(logging.WARNING)`, hears nothing.
"""

import logging
import sys

logger = logging.getLogger("lowtide")


def say(line: str) -> None:
    """Say one line about a result.

    A handler of the root logger that shows warnings alone, as notebooks have, does not swallow the line: only
    the level of lowtide's own logger does.
    """
    is_silenced = logger.level > logging.INFO or logging.root.manager.disable >= logging.INFO
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info(line)
    elif not is_silenced:
        print(f"lowtide: {line}", file=sys.stderr)
