"""What cannot work ends in one message that names field, value and rule, with exit code 2, and nothing is written.

Known failure 39 (a value of 0 becomes 1, unknown keys ignored), 36, 37.
"""

import json
import re
import shutil
from dataclasses import replace

import pytest

from cospec.config import OptimConfig
from cospec.policy.build import build_policy
from cospec.policy.weights import save_hf
from cospec.train.cli import main
from cospec.train.loop import run_rl, run_sft
from support.tiny_runs import tiny_rl, tiny_sft


def refusal(config, run, argv, capsys):
    """The message of a run that must end with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(config, run, argv)
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert "Traceback" not in shown.out + shown.err
    # argument errors come in a box: join its lines
    return re.sub(r"[\s│╭╮╰╯─]+", " ", shown.err + shown.out)


SETTINGS = [
    (["--draft.num_pases", "3"], r"(?i)unrecognized.*--draft.num.pases"),
    (["--draft.num_passes", "many"], r"(?i)--draft.num.passes.*many"),
    (["--train.steps", "1.5"], r"(?i)--train.steps.*1\.5"),
    (["--attention.kernel", "fast"], r"(?i)invalid choice.*fast.*--attention.kernel"),
    (["--draft.num_passes", "0"], r"draft.num_passes=0: must be 1\.\.8"),
    (["--draft.num_passes", "9"], r"draft.num_passes=9: must be 1\.\.8"),
    (["--rollout.num_draft_tokens", "17"], r"rollout.num_draft_tokens=17: must be 0\.\.16"),
    (["--rollout.num_draft_tokens", "-1"], r"rollout.num_draft_tokens=-1: must be 0\.\.16"),
    (["--rollout.max_new_tokens", "0"], r"rollout.max_new_tokens=0: must be >= 1"),
    (["--draft.draft_vocab_size", "1000"], r"draft.draft_vocab_size=1000: must be 1\.\.vocab_size=96"),
    (["--draft.draft_vocab_size", "0"], r"draft.draft_vocab_size=0: must be 1\.\."),
    (["--draft.tap_layers", "1", "2", "4"], r"draft.tap_layers=\(1, 2, 4\): must be .* layers in 0\.\.3"),
    (["--draft.tap_layers", "2", "1", "3"], r"draft.tap_layers=\(2, 1, 3\): must be .*ascending"),
    (["--draft.share", "0.1"], r"draft.share=0.1: picks none of the 8 rollouts of a step"),
    (["--policy.rope.factor", "2"], r"policy.rope.factor=2.0: has no effect with policy.rope.scaling none"),
    (["--rl.prompts_per_step", "0"], r"rl.prompts_per_step=0: must be >= 1"),
    (["--eval.prompts", "0"], r"eval.prompts=0: must be >= 1"),
    (["--train.row_tokens", "32"], r"train.row_tokens=32: must be at least 38: the longest prompt .* 37 tokens"),
    (["--policy.max_position_embeddings", "64"], r"policy.max_position_embeddings=64: must be at least \d+"),
    (["--rl.task", "chess"], r"rl.task='chess': must be"),
    (["--train.device", "cuda"], r"train.device='cuda': no CUDA device|mesh"),
    (["--mesh.dp", "2"], r"mesh=.*the product is 2 but 1 process"),
    (["--mesh.dp", "0"], r"mesh.dp=0: must be >= 1"),
    (["--checkpoint.keep", "0"], r"checkpoint.keep=0: must be >= 1"),
    (["--policy_optim.lr", "-1"], r"policy_optim.lr=-1.0: must be >= 0"),
    (["--policy_optim.lr", "1e38"], r"policy_optim.lr=1e\+38: must be >= 0 and at most 1e30"),
    (["--policy_optim.eps", "0"], r"policy_optim.eps=0.0: must be > 0"),
    (["--policy_optim.weight_decay", "-1"], r"policy_optim.weight_decay=-1.0: must be >= 0"),
    (["--draft_optim.muon_lr", "-1"], r"draft_optim.muon_lr=-1.0: must be >= 0"),
    (["--warm_start.policy_optim.lr", "-1"], r"warm_start.policy_optim.lr=-1.0: must be >= 0"),
    (["--warm_start.draft_optim.clip_norm", "0"], r"warm_start.draft_optim.clip_norm=0.0: must be > 0"),
    (["--rl.importance_cap", "0"], r"rl.importance_cap=0.0: must be > 0"),
    (["--rl.clip_low", "-3"], r"rl.clip_low=-3.0: must be >= 0"),
    (["--rollout.temperature", "inf"], r"rollout.temperature=inf: must be > 0 and finite"),
    (["--seed", "99999999999999999999"], r"seed=99999999999999999999: must be a signed integer of 64 bits"),
    (["--output_dir", ""], r"output_dir='': must name a folder"),
    (["--eval.prompts", "1000000000"], r"eval.prompts=1000000000: must be 1\.\.\d+, the held-out prompts"),
    (["--attention.kernel", "cuda_flash"], r"attention.kernel='cuda_flash': .*cannot run torch.float32"),
    (["--draft.init", "/nowhere"], r"/nowhere.*must hold config.json"),
]


@pytest.mark.parametrize("argv, message", SETTINGS, ids=[" ".join(argv) for argv, _ in SETTINGS])
def test_settings(tmp_path, capsys, argv, message):
    if argv[:2] == ["--train.device", "cuda"]:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
    folder = tmp_path / "run"
    assert re.search(message, refusal(tiny_rl(folder), run_rl, argv, capsys))
    assert not folder.exists()


DOCUMENTS = [
    ("", "data.path=.* holds no documents"),
    (json.dumps({"input_ids": [1] * 129}), r"train.row_tokens=128: must be at least 130: a document has 129 tokens"),
    (json.dumps({"input_ids": [1, 64]}), r"data.path=.*holds token 64, must be 0\.\.63"),
    (json.dumps({"input_ids": [1, 2], "loss_mask": [1, 0]}), r"data.path=.*jsonl:1.*supervises no token"),
    ("[1, 2]", r"data.path=.*jsonl:1: must be a JSON object"),
]


@pytest.mark.parametrize("text, message", DOCUMENTS)
def test_documents(tmp_path, capsys, text, message):
    """Known failures 29 and 31."""
    path = tmp_path / "documents.jsonl"
    path.write_text(text + "\n")
    argv = ["--data.path", str(path)]
    assert re.search(message, refusal(tiny_sft(tmp_path / "run"), run_sft, argv, capsys))


def test_a_document_file_that_is_not_there(tmp_path, capsys):
    shown = refusal(tiny_sft(tmp_path / "run"), run_sft, ["--data.path", str(tmp_path)], capsys)
    assert re.search(r"data.path=.*is no folder of datasets.save_to_disk", shown)
    shown = refusal(tiny_sft(tmp_path / "run"), run_sft, ["--data.path", "/nowhere.jsonl"], capsys)
    assert re.search(r"data.path='/nowhere.jsonl': .*No such file", shown)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field, value", [("num_experts", 2), ("num_experts", 8), ("moe_intermediate_size", 8)])
def test_a_policy_folder_whose_tensors_do_not_fit_its_config(tmp_path, capsys, field, value):
    sizes = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16}
    policy = build_policy(replace(tiny_sft(tmp_path).policy, **sizes))
    save_hf(policy.config, dict(policy.state_dict()), tmp_path / "policy")
    path = tmp_path / "policy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    shown = refusal(tiny_sft(tmp_path / "run"), run_sft, ["--policy.hf_path", str(tmp_path / "policy")], capsys)
    assert re.search(r"policy.hf_path='.*/policy': its tensors do not fit its config: ", shown)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short supervised run with checkpoints after steps 2 and 3."""
    folder = tmp_path_factory.mktemp("finished")
    run_sft(tiny_sft(folder, steps=3))
    return folder


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_output_folder_that_holds_a_run(finished, capsys):
    before = contents(finished)
    shown = refusal(tiny_sft(finished), run_sft, [], capsys)
    assert re.search(r"output_dir='.*': holds a run already; .* checkpoint.resume", shown)
    assert contents(finished) == before


def test_an_output_folder_with_checkpoints_only(finished, tmp_path, capsys):
    """A run that was killed in its warm start has no row yet."""
    shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    assert "holds a run already" in refusal(tiny_sft(tmp_path), run_sft, [], capsys)


def test_an_output_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    shown = refusal(tiny_sft(tmp_path / "file" / "run"), run_sft, [], capsys)
    assert re.search(r"output_dir='.*file/run': cannot be written: Not a directory", shown)


def _foreign(path):
    shutil.rmtree(path)
    path.mkdir()
    (path / "weights.bin").write_bytes(b"x")


def _newer(path):
    manifest = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(manifest | {"format_version": 99}))


def _truncate(path):
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    "harm, message",
    [
        (_foreign, r"skipping a broken checkpoint: .*not a cospec checkpoint.*none of its checkpoints can be read"),
        (_truncate, r"skipping a broken checkpoint: .* bytes instead of .*none of its checkpoints can be read"),
        (_newer, r"format version 99, this cospec reads up to 1"),
    ],
)
def test_checkpoints_that_cannot_be_read(finished, tmp_path, capsys, harm, message):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for path in (folder / "checkpoints").iterdir():
        harm(path)
    before = contents(folder)
    shown = refusal(tiny_sft(folder, steps=3), run_sft, ["--checkpoint.resume"], capsys)
    # what is said on the way goes to stdout, which comes after stderr here
    error, _, rest = shown.partition("skipping")
    assert re.search(message, f"skipping{rest} {error}" if rest else shown)
    assert contents(folder) == before


def test_a_truncated_newest_checkpoint_is_passed_over_with_a_message(finished, tmp_path, capsys):
    """Known failure 37."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    _truncate(folder / "checkpoints" / "step-00000003")
    main(tiny_sft(folder, steps=3), run_sft, ["--checkpoint.resume"])
    shown = capsys.readouterr().out
    assert re.search(r"skipping a broken checkpoint: .*step-00000003", shown)
    assert re.search(r"resuming from .*step-00000002", shown)


def test_checkpoints_of_another_policy(finished, capsys):
    before = contents(finished)
    argv = ["--checkpoint.resume", "--policy.hidden_size", "48"]
    shown = refusal(tiny_sft(finished, steps=3), run_sft, argv, capsys)
    assert re.search(r"(policy|draft)\.\S+ was 32 when it was saved and is 48 in this run", shown)
    assert contents(finished) == before


def test_a_draft_of_another_shape(tmp_path, capsys):
    """draft.init names a draft that was made for a policy of another width."""
    from cospec.config import PolicyConfig
    from cospec.draft.attach import attach_draft
    from cospec.export.eagle3 import save_draft
    from cospec.policy.build import build_policy

    config = tiny_sft(tmp_path / "run")
    other = replace(config.policy, hidden_size=48)
    assert isinstance(other, PolicyConfig)
    draft = attach_draft(build_policy(other, None, seed=0), config.draft)
    for parameter in draft.parameters():  # an export refuses an untrained draft
        parameter.data += 0.01
    save_draft(draft, tmp_path / "draft")
    shown = refusal(config, run_sft, ["--draft.init", str(tmp_path / "draft")], capsys)
    assert re.search(r"draft.target_hidden_size=48: the policy's hidden size is 32", shown)
    assert not (tmp_path / "run").exists()


def test_a_wrong_optimizer_setting_is_seen_before_work(tmp_path, capsys):
    config = replace(tiny_sft(tmp_path / "run"), draft_optim=OptimConfig(clip_norm=0.0))
    assert "draft_optim.clip_norm=0.0: must be > 0" in refusal(config, run_sft, [], capsys)
