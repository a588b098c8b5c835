"""The command line. Data goes to stdout, all else to stderr.

Exit codes: 0 done, 1 error, 2 usage, 3 does not fit, 4 results differ, 130 interrupted.
Commands import torch only when they need it.

- `app`: the command `lowtide` and its subcommands
- `command`: the decorator `command`, and the options of all commands
- `options`: the options that several commands share
- `option_values`: their checks and completions
- `terminal`: one command's stdout and stderr, and its tables
- `exit_codes`: exit codes, and errors as a line and as data
- `help_texts`: examples of every command, and switches without a type
- `encoding`: text for terminals that lack characters
- `refusals`: the commands to type after a refused budget
- `sources`: from the typed options to a profile
- `step_commands`: profile, plan, verify, run; `search_command`: plan with `--search`; `pipeline_command`:
  plan with `--pipeline`
- `tradeoff_command`, `sweep_command`, `compare_command`, `fit_command`: experiments
- `launch_command`: an unmodified script inside a budget
- `file_commands`: explain, models, solve
- `diff_command`: two runs side by side
- `doctor_command`: check lowtide on this machine
- `tables`: profiles, plans and verifications as data and as tables
- `output_files`: the files that commands write and read
"""

from lowtide.cli.app import main

__all__ = ["main"]
