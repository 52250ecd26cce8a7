"""Progress of a run on the console."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rich import progress
from rich.console import Console

PLAIN_EVERY_S = 5.0


class Progress:
    """Progress on the console: a bar on a terminal, else a line every few seconds and at the end."""

    def __init__(self, console: Console):
        self.console = console
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)
        self._name = ""
        self._first_step, self._first_time, self._last_line = 0, 0.0, -math.inf

    def update(self, name: str, step: int, total: int, parts: Mapping[str, Any]) -> None:
        """Step `step` (0-based) of `total` is done."""
        now = time.perf_counter()
        if name != self._name:
            self.stop()
            self._name = name
            self._first_step, self._first_time, self._last_line = step, now, -math.inf
        figures = "  ".join(f"{key} {short(value)}" for key, value in parts.items() if value is not None)
        done = step - self._first_step
        left = ""
        if done:
            pace = (now - self._first_time) / done
            figures += f"  {pace:.2f} s/step"
            left = f"  {_clock(pace * (total - step - 1))} left"
        if self.console.is_terminal:
            self._show_bar(name, step, total, figures)
        elif now - self._last_line >= PLAIN_EVERY_S or step + 1 == total:
            self._last_line = now
            self.console.print(f"{name} {step + 1}/{total}  {figures}{left}", markup=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._name = None, ""

    def _show_bar(self, name: str, step: int, total: int, figures: str) -> None:
        if self._bar is None:
            columns = (
                progress.TextColumn("{task.description}"),
                progress.MofNCompleteColumn(),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[figures]}"),
                progress.TimeRemainingColumn(),
            )
            self._bar = progress.Progress(*columns, console=self.console)
            self._task = self._bar.add_task(name, total=total, completed=step, figures=figures)
            self._bar.start()
        self._bar.update(self._task, completed=step + 1, figures=figures)


def short(value: Any) -> str:
    """A figure in few characters."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
