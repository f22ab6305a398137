"""Peak resident memory of this process, from a moment of one's choice on."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

__all__ = ["PeakMemory"]

_PROC = Path("/proc/self")
_RESET_PEAK = "5"  # what Linux takes in clear_refs for: let VmHWM begin anew (proc_pid_clear_refs(5))


class PeakMemory:
    """Growth of the peak since this object was made, which all that was resident then is taken off from.

    Where the system cannot reset its peak (not Linux), an earlier peak hides growth below it.

    Example:
        >>> peak = PeakMemory()
        >>> peak.growth_bytes() >= 0
        True
    """

    def __init__(self) -> None:
        try:
            (_PROC / "clear_refs").write_text(_RESET_PEAK)
            self._before_bytes = _status_bytes("VmRSS")
            self._resets = True
        except OSError:
            self._before_bytes = _largest_ever_bytes()
            self._resets = False

    def growth_bytes(self) -> int:
        """Bytes."""
        peak = _status_bytes("VmHWM") if self._resets else _largest_ever_bytes()
        return max(0, peak - self._before_bytes)


def _status_bytes(field: str) -> int:
    lines = (_PROC / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _largest_ever_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
