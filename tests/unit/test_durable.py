"""durable.new_folder: what it may replace, what it says where it cannot write, what a killed process leaves."""

import errno
import os
import subprocess
import sys

import pytest

from cospec.durable import naming, new_folder


def write_model(folder, **options):
    with new_folder(folder, **options) as partial:
        (partial / "config.json").write_text("{}")


def test_a_model_is_replaced_whole(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    write_model(tmp_path / "model", overwrite=True)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    "files, said",
    [
        (["config.json", "checkpoints/step-00000001/checkpoint.json"], "holds checkpoints"),
        (["config.json", "metrics.jsonl"], "holds metrics.jsonl"),
        (["checkpoint.json"], "holds checkpoint.json"),
        (["thesis.tex"], "has no config.json"),
    ],
)
def test_overwriting_spares_what_is_no_model(tmp_path, files, said):
    """A run, a checkpoint, a home folder: mistaken for the output, it must survive."""
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(FileExistsError, match=f"{said}: no folder of a model"):
        write_model(tmp_path / "out", overwrite=True)
    assert all((tmp_path / "out" / name).is_file() for name in files)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=rf"cannot be written: Not a directory: '{tmp_path}/file/model'"):
        write_model(tmp_path / "file" / "model")
    with (
        pytest.raises(OSError, match=rf"cannot be written: .*space.*'{tmp_path}/model'"),
        new_folder(tmp_path / "model"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a full disk does: no file is named
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_error_in_reading_is_left_as_it_is(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"No such file or directory: '/nowhere'"),
        new_folder(tmp_path / "model"),
    ):
        open("/nowhere")  # noqa: SIM115


def test_what_a_killed_process_left_goes_away(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f".model.partial-{pid}").mkdir()
    write_model(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".model.partial-{os.getppid()}", "model"]


def test_errors_get_the_name_that_they_lack(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '/record'"), naming("/record"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match=r"'/nowhere'"), naming("/record"):
        open("/nowhere")  # noqa: SIM115
