"""The README's example runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).parents[2] / "README.md"


def test_example_runs_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    assert "draft acceptance per pass" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "my-draft").iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_linked_files_exist():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README.read_text())
    missing = [link for link in links if not (README.parent / link).exists()]
    assert links
    assert not missing
