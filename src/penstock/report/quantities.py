"""Numbers as people read them.

In: numbers with a unit. Out: short text, the same in the page and in the terminal. Decimal prefixes throughout (1 MB is
a million bytes), as in the benchmarks. Cost: constant time.
"""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["bytes_text", "compact", "count", "decimal", "duration", "moment", "percent", "rates", "scientific"]

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MINUTE_SECONDS = 60
HOUR_SECONDS = 3600


def count(value: float) -> str:
    """All digits, grouped: `1,234,567`."""
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    """A loss or a ratio: four significant digits, never an exponent for everyday sizes."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return scientific(value)
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f}"


def scientific(value: float) -> str:
    """A learning rate: `3e-4`, `2.5e-5`."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if value else "0"


def compact(value: float, *, unit: str = "") -> str:
    """Three significant digits with a prefix: `1.64 M`."""
    for scale, prefix in PREFIXES:
        # 999,600 would round to "1000 k": the next prefix begins half a digit earlier.
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    text = _three_digits(value)
    return f"{text} {unit}" if unit else text


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95 or (float(value).is_integer() and size < 1000):
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def bytes_text(value: float) -> str:
    """A size: `5.2 MB`."""
    return compact(value, unit="B")


def percent(value: float) -> str:
    """A share already in hundredths: `3.2 %`."""
    digits = 0 if abs(value) >= 10 or float(value).is_integer() else 1 if abs(value) >= 1 else 2
    return f"{value:.{digits}f} %"


def duration(seconds: float) -> str:
    """A time span: `0.42 s`, `48.2 s`, `3 min 12 s`, `2 h 05 min`."""
    if seconds >= HOUR_SECONDS:
        minutes = round(seconds / MINUTE_SECONDS)
        return f"{minutes // 60:,} h {minutes % 60:02d} min"
    if seconds >= MINUTE_SECONDS:
        whole_seconds = round(seconds)
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"


def rates(*, seconds: float | None, num_bytes: float | None = None, num_tokens: float | None = None) -> str:
    """What was done per second: `53.1 MB/s, 14.2 M tokens/s`; empty where nothing was counted or no time passed."""
    if not seconds or seconds <= 0:
        return ""
    parts = []
    if num_bytes:
        parts.append(compact(num_bytes / seconds, unit="B/s"))
    if num_tokens:
        parts.append(f"{compact(num_tokens / seconds)} tokens/s")
    return ", ".join(parts)


def moment(epoch_seconds: float) -> str:
    """A time as ISO 8601 in UTC, to the second; empty where no calendar has it."""
    try:
        return datetime.fromtimestamp(epoch_seconds, tz=UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return ""
