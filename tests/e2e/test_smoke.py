"""Every recipe as a user starts it, shortened by flags: it ends, and leaves what docs/metrics.md says."""

import json
import re
import runpy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from datasets import Dataset

from cospec.config import ConfigError, DataConfig, PolicyConfig
from cospec.rl.tasks import CountBits
from cospec.train import loop
from cospec.train.cli import main
from cospec.train.loop import run_rl, run_sft
from cospec.train.metrics import read_rows
from cospec.train.saved import find_checkpoint, read_draft, read_policy
from support.offline_case import save_policy
from support.tiny_runs import tiny_rl, tiny_sft

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--policy.hidden_size=32",
    "--policy.num_attention_heads=2",
    "--policy.num_key_value_heads=1",
    "--policy.head_dim=16",
    "--policy.intermediate_size=64",
    "--train.steps=2",
    "--checkpoint.every=2",
]
RL = [
    "--policy.num_hidden_layers=4",
    "--warm_start.policy_steps=2",
    "--warm_start.draft_steps=2",
    "--warm_start.batch_documents=2",
    "--warm_start.draft_batch_documents=2",
    "--rl.prompts_per_step=2",
    "--rl.samples_per_prompt=2",
    "--rollout.max_new_tokens=16",
    "--eval.prompts=2",
    "--eval.speed_batch=2",
]


@pytest.mark.parametrize(
    "recipe, run, argv", [("smoke", "run_rl", RL), ("cotrain_rl", "run_rl", RL), ("cotrain_sft", "run_sft", [])]
)
def test_a_recipe_runs_and_leaves_its_record(tmp_path, capsys, recipe, run, argv):
    module = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))
    assert module[run] is getattr(loop, run)
    main(module["config"](), module[run], [*SMALL, *argv, "--output_dir", str(tmp_path / "run")])

    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["policy_loss"] is not None and row["draft_loss"] > 0 for row in rows)
    assert json.loads((folder / "config.json").read_text())["train"]["steps"] == 2
    assert json.loads((folder / "run.json").read_text())["versions"]["torchtitan"]
    assert any((folder / "checkpoints").glob("step-*"))
    report = (folder / "report.md").read_text()
    assert "## Seconds of a step" in report
    for picture in re.findall(r"\]\((\S+\.png)\)", report):
        assert (folder / picture).stat().st_size > 1000
    if run == "run_rl":
        evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        assert [row["step"] for row in evaluations] == [0, 2]
        lengths = ("acceptance_length_cotrained", "acceptance_length_static")
        assert all(row[name] >= 1 for row in evaluations for name in lengths)
        assert {"reward.png", "acceptance.png", "seconds.png"} <= {p.name for p in folder.iterdir()}
    shown = capsys.readouterr().out
    assert "policy" in shown
    assert "# Report" in shown


def test_every_field_of_a_row_is_documented(tmp_path):
    module = runpy.run_path(str(ROOT / "recipes" / "smoke.py"))
    main(module["config"](), loop.run_rl, [*SMALL, *RL, "--train.steps=1", "--output_dir", str(tmp_path / "run")])
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        row = json.loads((tmp_path / "run" / name).read_text().splitlines()[0])
        for field in row:
            shown = re.sub(r"_pass_\d+$", "_pass_k", field)
            assert f"`{shown}`" in text or field.startswith("acceptance_length_"), field


@dataclass(frozen=True)
class MoreTokens(CountBits):
    """A task of a user's own: a larger vocabulary, and one point for every response."""

    vocab_size = 120

    def reward(self, prompt, token_ids):
        return 1.0


def test_rl_on_a_task_of_your_own(tmp_path):
    run_rl(tiny_rl(tmp_path / "run", steps=2), MoreTokens())
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["reward_mean"] for row in rows] == [1.0, 1.0]
    assert all(row["policy_kl_rollout"] < 1e-2 and row["policy_truncated_fraction"] == 0 for row in rows)
    manifest = json.loads(next((tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json")).read_text())
    assert manifest["definition"]["policy"]["vocab_size"] == 120
    policy = read_policy(find_checkpoint(tmp_path / "run"))
    assert policy.stop_token_id == MoreTokens.stop_token_id  # an exported policy says where its texts end
    draft_card = read_draft(find_checkpoint(tmp_path / "run"))[2]
    assert draft_card.data.startswith("rollouts of MoreTokens")


def test_a_task_without_a_method_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"task='object': must have .* lacks \['demonstrations', 'train_prompt'"):
        run_rl(tiny_rl(tmp_path / "run"), object())


def test_a_task_with_more_tokens_than_the_policy_is_refused(tmp_path):
    config = tiny_rl(tmp_path / "run")
    save_policy(tmp_path / "policy")
    config = replace(config, policy=PolicyConfig(hf_path=str(tmp_path / "policy")))
    with pytest.raises(ConfigError, match=r"policy.vocab_size=\d+: .* at least 120: the task's vocabulary"):
        run_rl(config, MoreTokens())
    assert not (tmp_path / "run").exists()


def test_sft_on_a_folder_of_datasets(tmp_path):
    rows = [{"input_ids": [1, 2, 3, 4, 5 + i], "loss_mask": [0, 0, 1, 1, 1]} for i in range(6)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    run_sft(replace(tiny_sft(tmp_path / "run", steps=2), data=DataConfig(path=str(tmp_path / "data"))))
    assert all(row["policy_loss"] > 0 for row in read_rows(tmp_path / "run" / "metrics.jsonl"))
