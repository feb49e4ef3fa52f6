"""pretrain_gpt.py as users start it: real processes, also under torchrun. (Everything else forks, which is quicker.)"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.data.indexed_writer import write_dataset
from tests.support.cli import spawn_cli
from tests.support.runs import arguments, digest, run

SCRIPT = "pretrain_gpt.py"


def test_one_plain_process_ends_by_itself(tmp_path: Path) -> None:
    """With loader threads, evaluation and TensorBoard; it saves what a forked run saves."""
    settings = {"train_iters": 2, "num_workers": 2, "eval_iters": 1}
    done = spawn_cli(
        [SCRIPT, *arguments(**settings, save=tmp_path / "own", tensorboard_dir=tmp_path / "board")], nproc=None, fresh=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "done after 2 iterations" in done.stdout
    run(arguments(**settings, save=tmp_path / "forked"))
    assert digest(tmp_path / "own", 2) == digest(tmp_path / "forked", 2)


def test_torchrun_ends_all_ranks_of_a_run_that_fails(tmp_path: Path, full: bool) -> None:
    """One rank reads a token that is not in the vocabulary: its message stands on the screen, and nothing is left behind."""
    prefix = tmp_path / "ids"
    with write_dataset(str(prefix), np.uint16) as writer:
        for document in range(20):
            writer.add_documents(np.full(17, 99 if document == 7 else 7))
    settings = {"mock_data": None, "data_path": prefix, "split": "1,0,0", "train_iters": 20, "save": tmp_path / "save"}
    done = spawn_cli([SCRIPT, *arguments(**settings)], nproc=2, fresh=full)
    assert done.returncode != 0
    assert "has token id 99, but the tokenizer has 61 ids" in done.stderr
    assert [path.name for path in (tmp_path / "save").glob("*.json")] == ["run.json"]
