"""The alarm on a quarantine that does not drain, and when a worker has to be restarted to get its blocks back.

::

    QUIET -- the oldest is _OLD_S old | a share of _ALARM_SHARE is out --> ALARM (logged and counted, each _REPEAT_S)
    ALARM -- nothing ends for _STUCK_S, and it is _RESTART_SHARE or more --> RESTART
    ALARM -- the oldest is _LOST_S old --------------------------------------> RESTART

Blocks come back by the truth about their operations only (custody.py). Where a backend can end what is under way, it
has done so long before; what is left hangs in a library, and ends with the process that loaded it. Pure.
"""

from enum import StrEnum

from kvtransfer.custody import CustodyStats

_OLD_S = 30.0
_ALARM_SHARE = 0.05
_REPEAT_S = 60.0
_STUCK_S = 60.0
_RESTART_SHARE = 0.10
_LOST_S = 600.0


class Verdict(StrEnum):
    QUIET = "quiet"
    ALARM = "alarm"
    RESTART = "restart"


class QuarantineWatch:
    """Look every second or so. ``num_alarms`` is the total since start."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._ended = 0
        self._progress_at: float | None = None
        self._told_at: float | None = None
        self.num_alarms = 0

    def look(self, stats: CustodyStats, now: float) -> Verdict:
        """ALARM only when it is time to tell; RESTART as often as it is true."""
        ended = sum(count for _, count in stats.ended)
        since = stats.oldest_quarantine_at
        if since is None:
            self._told_at = None
        if since is None or ended != self._ended or self._progress_at is None:
            self._ended, self._progress_at = ended, now
        if since is None:
            return Verdict.QUIET
        share, age_s = stats.num_quarantined_blocks / self._num_blocks, now - since
        if age_s >= _LOST_S or (share >= _RESTART_SHARE and now - self._progress_at >= _STUCK_S):
            return Verdict.RESTART
        if age_s < _OLD_S and share < _ALARM_SHARE:
            return Verdict.QUIET
        if self._told_at is not None and now - self._told_at < _REPEAT_S:
            return Verdict.QUIET
        self._told_at = now
        self.num_alarms += 1
        return Verdict.ALARM
