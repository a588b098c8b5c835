"""The command line. Data goes to stdout, everything else to stderr.

Exit codes: 0 done, 1 error, 2 usage, 3 does not fit, 4 results differ, 130 interrupted.
torch is imported by the commands that need it, when they need it.
"""

from lowtide.cli.app import main

__all__ = ["main"]
