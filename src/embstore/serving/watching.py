"""What an operator is told about a reader that follows a log, through the logger "embstore.serving"."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("embstore.serving")

REPEAT_SECONDS = 60.0
ROUNDS_BEHIND = 5


class Watch:
    """Decides what to say, and not to say it again with every look at the log."""

    def __init__(self, warn_age_seconds: float | None) -> None:
        self._warn_age_seconds = warn_age_seconds
        self._failure = ""
        self._failing_since = self._said = 0.0
        self._news: list[int] = []  # increments of the last rounds, while they get more
        self._is_old = False

    def failed(self, number: int, error: Exception) -> None:
        """The log could not be followed."""
        now = time.monotonic()
        if not self._failure:
            self._failing_since = now
        if str(error) != self._failure or now - self._said >= REPEAT_SECONDS:
            self._failure, self._said = str(error), now
            seconds = now - self._failing_since
            logger.error("stays at state %d, for %.0f s so far: %s", number, seconds, error)

    def followed(self, number: int, news: int) -> None:
        """It could; `news` increments were new."""
        if self._failure:
            logger.info("follows again, at state %d", number)
            self._failure = ""
        if self._news and news <= self._news[-1]:
            self._news = []
        self._news.append(news)
        if len(self._news) > ROUNDS_BEHIND:
            logger.warning(
                "falls behind: %d increments came while the last %d were applied, and more each time; "
                "append less often, or compact the log",
                news,
                self._news[-2],
            )
            self._news = []

    def look_at_age(self, number: int, age_seconds: float) -> None:
        """The served state is so old."""
        if self._warn_age_seconds is None:
            return
        is_old = age_seconds > self._warn_age_seconds
        if is_old and not self._is_old:
            logger.warning(
                "state %d is %.0f s old, more than %g s: is the trainer still appending?",
                number,
                age_seconds,
                self._warn_age_seconds,
            )
        self._is_old = is_old
