"""The end of a run: report.md and plots that can be read without colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

# Parts of a step in the order they happen: field of metrics.jsonl, label, hatch of its bar.
_PARTS = (
    ("rollout_s", "rollouts", "//"),
    ("policy_s", "policy", ".."),
    ("draft_s", "draft", "xx"),
    ("refit_s", "refit", ""),
)

_COLUMNS = {
    "step": "after steps",
    "reward_mean": "reward",
    "tokens_mean": "tokens",
    "acceptance_length_cotrained": "acceptance length, co-trained",
    "acceptance_length_static": "acceptance length, static draft",
    "acceptance_length_none": "without draft",
    "num_draft_tokens": "draft tokens",
    "batch": "batch",
    "seconds": "seconds",
    "speed_up": "speed-up",
    "acceptance_length": "acceptance length",
}


def write_report(
    folder: str | Path, *, rows: Sequence[Row], evaluations: Sequence[Row], speed: Sequence[Row] = ()
) -> str:
    """Write report.md, reward.png, acceptance.png, loss.png and seconds.png; returns the tables for the console.

    Args:
        rows: of metrics.jsonl, in order of steps.
        evaluations: on held-out prompts: step, reward_mean, acceptance_length_cotrained,
            acceptance_length_static (the draft as co-training found it).
        speed: same prompts and weights by num_draft_tokens: seconds, speed_up, acceptance_length.

    A plot whose figures do not exist is left out.
    """
    folder = Path(folder)
    plots = []
    if _has(rows, "reward_mean") or _has(evaluations, "reward_mean"):
        plots.append(("Reward", _plot_reward(folder, rows, evaluations)))
    if _has(rows, "rollout_acceptance_length") or _has(evaluations, "acceptance_length_cotrained"):
        plots.append(("Acceptance length", _plot_acceptance(folder, rows, evaluations)))
    if _has(rows, "policy_loss") and not evaluations:
        plots.append(("Loss", _plot_loss(folder, rows)))
    if any(_has(rows, field) for field, _, _ in _PARTS):
        plots.append(("Seconds, step by step", _plot_seconds(folder, rows)))

    sections = ["# Report"]
    if evaluations:
        sections.append("## Held-out prompts\n\n" + markdown_table(evaluations))
    if speed:
        sections.append("## Wall clock of rollouts\n\n" + markdown_table(speed))
    if rows and not evaluations:
        sections.append("## Training\n\n" + markdown_table(_training_table(rows)))
    if rows:
        sections.append("## Seconds of a step\n\n" + markdown_table(_seconds_table(rows)))
    pictures = [f"## {title}\n\n![{title}]({name})" for title, name in plots]
    (folder / "report.md").write_text("\n\n".join(sections + pictures) + "\n")
    return "\n\n".join([*sections, f"report and plots: {folder / 'report.md'}"]) + "\n"


def markdown_table(rows: Sequence[Row]) -> str:
    """Aligned columns, so that it also reads well in a terminal."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_COLUMNS.get(n, n) for n in names]] + [[_cell(row.get(n)) for n in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ["| " + " | ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _training_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """First and last step: losses, and what the draft would be accepted for on the training rows."""
    fields = {
        "policy_loss": "policy loss",
        "draft_loss": "draft loss",
        "draft_acceptance_pass_0": "acceptance of the first draft token",
        "draft_simulated_acceptance_length": "acceptance length, simulated",
    }
    ends = [rows[0], rows[-1]] if len(rows) > 1 else [rows[0]]
    return [{"step": row["step"] + 1, **{name: row.get(field) for field, name in fields.items()}} for row in ends]


def _seconds_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean seconds of each part of a step and its share, the first step (warm-up) left out where there are more."""
    counted = rows[1:] or rows
    means = {}
    for field, label, _ in _PARTS:
        values = [row[field] for row in counted if row.get(field) is not None]
        if values:
            means[label] = sum(values) / len(values)
    total = sum(means.values()) or 1.0
    return [{"part": label, "seconds": mean, "share": f"{mean / total:.0%}"} for label, mean in means.items()]


def _plot_reward(folder: Path, rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    figure, axes = _figure("mean reward")
    _line(axes, rows, "reward_mean", "training rollouts", shift=1, color="0.5", linewidth=1)
    _line(axes, evaluations, "reward_mean", "held-out prompts", color="C0", marker="o")
    return _save(figure, axes, folder, "reward.png")


def _plot_loss(folder: Path, rows: Sequence[Row]) -> str:
    figure, axes = _figure("loss")
    _line(axes, rows, "policy_loss", "policy", shift=1, color="C0")
    _line(axes, rows, "draft_loss", "draft", shift=1, color="C1", linestyle="--")
    return _save(figure, axes, folder, "loss.png")


def _plot_acceptance(folder: Path, rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    figure, axes = _figure("acceptance length (tokens a verification)")
    _line(axes, rows, "rollout_acceptance_length", "training rollouts", shift=1, color="0.5", linewidth=1)
    _line(axes, evaluations, "acceptance_length_cotrained", "co-trained draft", color="C0", marker="o")
    _line(axes, evaluations, "acceptance_length_static", "static draft", color="C1", marker="s", linestyle="--")
    return _save(figure, axes, folder, "acceptance.png")


def _plot_seconds(folder: Path, rows: Sequence[Row]) -> str:
    figure, axes = _figure("seconds")
    steps = [row["step"] + 1 for row in rows]
    bottom = [0.0] * len(rows)
    for i, (field, label, hatch) in enumerate(_PARTS):
        heights = [row.get(field) or 0.0 for row in rows]
        if any(heights):
            axes.bar(
                steps, heights, bottom=bottom, width=1.0, label=label, hatch=hatch, color=f"C{i}", edgecolor="white"
            )
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    return _save(figure, axes, folder, "seconds.png")


def _figure(ylabel: str) -> tuple[Any, Any]:
    # pyplot would choose a backend by the environment and keep figures alive
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("optimization steps")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Any, rows: Sequence[Row], field: str, label: str, *, shift: int = 0, **style: Any) -> None:
    """One curve; `shift` turns a 0-based step into the number of steps done."""
    points = [(row["step"] + shift, row[field]) for row in rows if row.get(field) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


def _save(figure: Any, axes: Any, folder: Path, name: str) -> str:
    axes.legend()
    figure.savefig(folder / name, dpi=120)
    return name


def _has(rows: Sequence[Row], field: str) -> bool:
    return any(row.get(field) is not None for row in rows)


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
