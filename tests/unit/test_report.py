"""The report of a run."""

from pathlib import Path

from cospec.train.report import markdown_table, write_report

ROWS = [
    {"step": i, "reward_mean": i / 10, "rollout_acceptance_length": 2 + i / 10, "rollout_s": 5.0 if i == 0 else 3.0}
    | {"policy_s": 2.0, "draft_s": 1.0, "refit_s": 0.0, "draft_loss": None}
    for i in range(5)
]
EVALUATIONS = [
    {"step": 0, "reward_mean": 0.2, "acceptance_length_cotrained": 2.0, "acceptance_length_static": 2.0},
    {"step": 5, "reward_mean": 0.9, "acceptance_length_cotrained": 3.5, "acceptance_length_static": float("nan")},
]
SPEED = [
    {"num_draft_tokens": 0, "seconds": 2.0, "speed_up": 1.0},
    {"num_draft_tokens": 4, "seconds": 1.0, "speed_up": 2.0},
]


def test_a_report_has_its_figures_and_its_plots(tmp_path: Path):
    tables = write_report(tmp_path, rows=ROWS, evaluations=EVALUATIONS, speed=SPEED)
    text = (tmp_path / "report.md").read_text()
    assert str(tmp_path / "report.md") in tables, "the console says where the report is"
    assert text.startswith(tables.split("report and plots")[0])
    assert "png" not in tables
    for name in ("reward.png", "acceptance.png", "seconds.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in text
    assert "3.500" in text
    assert "nan" not in text
    rollouts = next(line for line in text.splitlines() if line.startswith("|") and " rollouts |" in line)
    assert "3.000" in rollouts, "the first step is warm-up and does not count"
    assert "50%" in rollouts


def test_figures_that_do_not_exist_leave_their_plots_out(tmp_path: Path):
    text = write_report(tmp_path, rows=[{"step": 0, "policy_loss": 1.0, "policy_s": 1.0}], evaluations=[])
    assert "reward" not in text.lower()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "report.md", "seconds.png"]


def test_a_table_lines_up():
    lines = markdown_table([{"a": 1, "long name": 2.0}, {"a": 100}]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[-1].split() == ["|", "100", "|", "-", "|"]
