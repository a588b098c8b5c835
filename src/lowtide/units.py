"""Bytes and seconds as readable text. Imports nothing, so that errors can use it."""


def format_size(nbytes: int) -> str:
    """`nbytes` for people, in binary units."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def size_and_bytes(nbytes: int) -> str:
    """`1.9 GiB (2040109465 bytes)`: a size to read, and the number to copy; small ones as bytes alone."""
    return f"{nbytes} bytes" if nbytes < 1024 else f"{format_size(nbytes)} ({nbytes} bytes)"


def round_up_size(nbytes: int) -> str:
    """The next whole size above `nbytes` that `--budget` reads, three digits or more: `1946MiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= 100 * factor:
            return f"{-(-nbytes // factor)}{unit}"
    return str(nbytes)


def format_seconds(seconds: float) -> str:
    """`1.52 s`, `23.1 ms`, `392 µs`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"
    return f"{seconds * 1e6:.{0 if seconds >= 1e-5 else 1}f} µs"
