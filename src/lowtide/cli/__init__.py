"""The command line. Data goes to stdout, everything else to stderr.

Exit codes: 0 done, 1 error, 2 usage, 3 does not fit, 4 results differ, 130 interrupted.
torch is imported by the commands that need it, when they need it.

- `app`: the command and its subcommands, each in the file of its name
- `options`, `completion`: the options that commands share; what Tab offers
- `terminal`, `output`: what goes to stdout and stderr; tables and folders
- `sources`, `files`: from what was typed to a profile; the files between commands
- `summaries`, `results`: profiles, plans and verifications as data and as tables
- `bundle`, `pages`: all that `run` leaves behind; plots and how it was measured
- `exits`: which error ends with which code
"""

from lowtide.cli.app import main

__all__ = ["main"]
