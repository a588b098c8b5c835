"""Training code that people install, with and without a plan: the files of `bench/clients`.

    python bench/client_suite.py [--only TEXT] [--out CSV] [--limit 300] [--markdown PAGE.md]

Each client trains a few steps in eager and by a plan whose budget is halfway between the lowest reachable
peak and eager's measured one, each in a fresh process with the same seeds. Every loss, gradient, parameter,
buffer, optimizer state and random state is compared to the last bit. Rows that are in the CSV already are
not run again: delete one to do so. Needs `bench/clients/requirements.txt`: `make clients` installs it.
"""

import ast
import sys
import time
from pathlib import Path

from client_runs.client_page import markdown
from client_runs.client_row import ClientRow
from client_runs.compare import Client, run_client
from rows import append, read, row_options

CLIENTS = Path(__file__).parent / "clients"
OUT = Path("bench/out/clients.csv")


def main() -> None:
    options = row_options(__doc__, what="clients", out=OUT, limit=300).parse_args()
    finished = read(options.out, ClientRow)
    chosen = [client for client in every_client() if options.only in client.name]
    waiting = [client for client in chosen if client.name not in {row.client for row in finished}]
    logs = options.out.parent / "client-logs"
    try:
        for number, client in enumerate(waiting, 1):
            row = run_client(client, limit_seconds=options.limit, logs=logs)
            row.day = time.strftime("%Y-%m-%d", time.gmtime())
            finished.append(row)
            append(options.out, row)
            print(f"{number}/{len(waiting)} {client.name}: {row.outcome} {row.words}"[:150], file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; what is finished is kept, and the same command goes on", file=sys.stderr)
    if options.markdown:
        options.markdown.write_text(markdown(finished))


def every_client() -> list[Client]:
    """All files, by name; none is imported, since its library may be missing."""
    paths = sorted(path for path in CLIENTS.glob("*.py") if path.stem != "__init__")
    return [Client(path.stem, *(_constant(path, name) for name in ("LIBRARY", "LOOP"))) for path in paths]


def _constant(path: Path, name: str) -> str:
    for node in ast.parse(path.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == name
        ):
            return str(ast.literal_eval(node.value))
    raise ValueError(f"{path} has no {name}")


if __name__ == "__main__":
    main()
