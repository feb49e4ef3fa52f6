"""A model trained with --mup-base-width, and one that predicts later tokens too, becomes one that transformers computes alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lab.commands.checkpoint import main
from tests.support.model_styles import STYLES
from tests.support.runs import arguments, run


@pytest.mark.parametrize("style", ["gpt2", pytest.param("llama", marks=pytest.mark.full("gpt2, whose embedding is tied too"))])
def test_transformers_computes_the_logits_of_a_mup_model(style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its logits are divided by 4 here, and its embedding, tied in one of the styles, is not."""
    pytest.importorskip("transformers")
    settings = {**STYLES[style], "train_iters": 2, "mup_base_width": 8, "mtp_num_layers": 2}
    run(arguments(**settings, save=tmp_path / "run"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "of multi-token prediction (--mtp-num-layers 2; " in told
    assert "Verified: the logits" in told and "divided by 4 (--mup-base-width)" in told
