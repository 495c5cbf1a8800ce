"""Bytes, dtypes, times, and how they are written. Standard library only."""

from __future__ import annotations

import math
import re
import time

KiB, MiB, GiB = 1024, 1024**2, 1024**3

BYTES_OF = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "uint64": 8, "uint32": 4, "uint16": 2,
}  # fmt: skip
"""Bytes of one element, by the dtype's torch name."""


def dtype_name(dtype: object) -> str:
    """Return `"bfloat16"` for `torch.bfloat16`, without importing torch."""
    return str(dtype).removeprefix("torch.")


def ceil_div(amount: int, parts: int) -> int:
    """Return the smallest integer that is at least `amount / parts`."""
    return -(-amount // parts)


def round_up(amount: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `amount`."""
    return ceil_div(amount, multiple) * multiple


def format_bytes(size: float) -> str:
    """Return bytes in the largest binary unit with a number of 1 or more: `"1.50 GiB"`, `"77.0 MiB"`."""
    if size >= GiB:
        return f"{size / GiB:,.2f} GiB"
    if size >= MiB:
        return f"{size / MiB:.1f} MiB"
    return f"{size / KiB:.1f} KiB" if size >= KiB else f"{size:.0f} B"


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a size such as `"60GiB"`, `"60 GB"` or `"512 MiB"`; None for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    return int(float(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2].upper())))


def format_count(count: float) -> str:
    """Return a count of parameters or tokens in the usual short form: `"5.05M"`, `"8.03B"`."""
    for bound, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= bound:
            return f"{count / bound:.2f}{suffix}"
    return f"{count:g}"


def format_seconds(seconds: float) -> str:
    """Return seconds as `"45 s"`, `"3 min 20 s"` or `"2 h 05 min"`; below a second in ms."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_step_seconds(seconds: float) -> str:
    """Return seconds as `format_seconds`, but small differences stay visible: `"2.35 s"`."""
    return f"{seconds:.2f} s" if 1 <= seconds < 10 else format_seconds(seconds)


def timestamp() -> str:
    """Return the current time to the second, with its offset from UTC (ISO 8601)."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
