"""Imported by Python itself where this folder is on its path: the processes that verify a row of the table
are then without the same levers as the one that planned it."""

import os

if os.environ.get("LEVERS_OFF"):
    from switches import without

    ABSENT = without(os.environ["LEVERS_OFF"].split(","))
    ABSENT.__enter__()
