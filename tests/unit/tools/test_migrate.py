"""Launch scripts and configurations of other frameworks: the line that becomes of them, and what is told beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.cli import load
from megatron.config.config import Config
from megatron_lab.commands import migrate
from megatron_lab.migration.shell import Script, remove_marks
from tests.support.cli import ROOT

FOREIGN = ROOT / "tests/support/foreign"


def migrated(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[list[str], str]:
    """The words of the command that the tool prints, and all that it says."""
    assert migrate.main(list(words)) == code, capsys.readouterr()
    said = capsys.readouterr().out
    return shlex.split(said.partition("\n\n")[0].replace("\\\n", " ")), said


def config_of(words: list[str], world_size: int) -> Config:
    return load(words[words.index("pretrain_gpt.py") + 1 :], world_size).config


CASES: dict[str, tuple[list[str], int, dict[str, Any], list[str]]] = {
    # file: flags of the tool, ranks, settings of the line, what is said
    "gpt3_175b.sh": (
        ["--set", "1=ckpt", "--set", "DATA_PATH=data/c4_text_document"],
        128,
        {
            "num_layers": 96,
            "hidden_size": 12288,
            "fp16": True,
            "lr": 6e-5,
            "init_method_std": 0.006,
            "save": "ckpt",
            "step_batch_size_schedule": ("0:16 3B:768 12B:1536",),
            "tensor_model_parallel_size": 8,
            "split": "949,50,1",
            "data_path": ("data/c4_text_document",),
            "vocab_file": "$VOCAB_FILE",
            "lr_warmup_fraction": 0.001,
        },
        ["torchrun --nproc-per-node 8 --nnodes 16", "VOCAB_FILE: it is $3 in the script", 'merge-file "$MERGE_FILE"'],
    ),
    "llama3_8b.sh": (
        [],
        8,
        {
            "rotary_base": 1e6,
            "bf16": True,
            "decoupled_min_lr": 4.5e-5,
            "use_distributed_optimizer": True,
            "vocab_size": 128256,
            "fp8_format": "hybrid",
            "split": "99,1,0",
            "mock_data": True,
            "save": "checkpoints/llama3_8b",
            "num_workers": 1,
            "pipeline_model_parallel_size": 1,
            "tensor_model_parallel_size": 2,
            "num_query_groups": 8,
        },
        [
            "#   --fp8-amax-history-len 1024, --fp8-amax-compute-algo max have no effect: ",
            "argument 1 of the script\n#     checkpoints/llama3_8b",
        ],
    ),
    "mixtral.sh": (
        [],
        2,
        {"num_experts": 2, "position_embedding_type": "rope", "eval_iters": 10, "wandb_project": None, "lr_decay_style": "linear"},
        [
            "#   --no-position-embedding\n#     with rotary embeddings it does nothing",
            "condition [ -n ${WANDB_API_KEY} ] cannot be evaluated",
        ],
    ),
    "llama2_deepspeed.sh": (
        [],
        8,
        {
            "num_query_groups": 4,
            "group_query_attention": True,
            "normalization": "RMSNorm",
            "log_interval": 1,
            "bf16": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "data_parallel_sharding_strategy": "no_shard",
            "data_path": ("1", "./tmp/data/bookcorpus_train_text_sentence"),
            "position_embedding_type": "rope",
        },
        ["steps_per_print 1", "--num-key-value-heads 4", "--data-impl mmap"],
    ),
    "gpt_13b_old.sh": (
        ["--world-size", "8"],
        8,
        {
            "train_samples": 146484375,
            "lr_warmup_samples": 1464843,
            "lr_decay_samples": 146484375,
            "recompute_num_layers": 1,
            "data_parallel_sharding_strategy": "optim",
            "pipeline_model_parallel_size": 2,
            "init_method_std": 0.013,
        },
        ["ds_config.json: give it as FILE", "current_time: it is $(date", "for loop cannot be evaluated"],
    ),
    "llama3_8b.toml": (
        ["--world-size", "64"],
        64,
        {
            "num_layers": 32,
            "ffn_hidden_size": 14336,
            "rotary_base": 5e5,
            "seq_length": 8192,
            "micro_batch_size": 1,
            "bf16": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "train_iters": 1000,
            "param_groups": ("* wd-mult=1",),
            "lr_warmup_iters": 200,
            "lr_decay_style": "linear",
            "tensorboard_dir": "./outputs/tb",
            "recompute_modules": ("layernorm", "mlp_act"),
            "clip_grad": 1.0,
            "tokenizer_type": "TikTokenizer",
            "hidden_dropout": 0.0,
        },
        ["torchrun --nproc-per-node 8 --nnodes 8", "profiling.enable_profiling", "DATA_PATH: prefix of c4"],
    ),
    "llama3_405b.toml": (
        ["--world-size", "128"],
        128,
        {
            "lr_decay_style": "WSD",
            "lr_wsd_decay_iters": 2400,
            "lr_wsd_decay_style": "cosine",
            "min_lr": 8e-6,
            "compile": True,
            "fp8_format": "hybrid",
            "pipeline_model_parallel_size": 4,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "fsdp_reshard_after_forward": "never",
            "sequence_parallel": True,
            "async_save": True,
            "tp_comm_overlap": False,
        },
        ["parallelism.pipeline_parallel_mystery 3\n#     This tool does not know the key."],
    ),
    "debug_old.toml": (
        ["--world-size", "4"],
        4,
        {
            "micro_batch_size": 8,
            "lr": 8e-4,
            "lr_warmup_iters": 2,
            "tensor_model_parallel_size": 2,
            "num_layers": 6,
            "eval_iters": 0,
        },
        ["selective_ac_option 2", "6 layers of width 256"],
    ),
    "tiny_llama.yaml": (
        [],
        8,
        {
            "hidden_size": 16,
            "ffn_hidden_size": 64,
            "global_batch_size": 4,
            "tp_comm_overlap": True,
            "lr_decay_iters": 15,
            "lr_decay_style": "cosine",
            "min_lr": 1e-5,
            "param_groups": ("* wd-mult=1",),
            "seed": 42,
            "save": "checkpoints",
            "make_vocab_size_divisible_by": 1,
            "swiglu": True,
            "untie_embeddings_and_output_weights": False,
        },
        ["data_stages[1], from step 10 on", "DATA_PATH: prefix of stas/openwebtext-10k"],
    ),
    "qwen.yaml": (
        [],
        4,
        {
            "add_qkv_bias": True,
            "num_query_groups": 2,
            "window_size": "19,0",
            "z_loss_coeff": 1e-4,
            "lr": 3e-4,
            "lr_decay_style": "WSD",
            "lr_wsd_decay_style": "minus_sqrt",
            "lr_wsd_decay_iters": 20,
            "lr_decay_iters": 100,
            "global_batch_size": 24,
            "data_parallel_sharding_strategy": "optim",
            "recompute_granularity": "full",
            "norm_epsilon": 1e-6,
        },
        ["model.model_config.mystery 7", "weight_decay_exclude_named_params"],
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_line_that_the_rules_accept(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, ranks, wanted, texts = CASES[name]
    words, said = migrated(capsys, str(FOREIGN / name), *flags)
    found = config_of(words, ranks)
    values = {field: value for part in dataclasses.fields(found) for field, value in vars(getattr(found, part.name)).items()}
    schedule = values["step_batch_size_schedule"]
    values["step_batch_size_schedule"] = (" ".join(schedule),) if schedule else ()
    assert {field: values[field] for field in wanted} == wanted
    for text in texts:
        assert text in said


def test_a_line_whose_flags_mean_the_same_goes_through_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 3 --lr 1e-3 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 64"
    )
    file = tmp_path / "line"
    for text in (f"python pretrain_gpt.py {flags}", flags, f"  {flags}\n"):
        file.write_text(text)
        words, said = migrated(capsys, str(file), "--world-size", "1")
        assert words == ["python", "pretrain_gpt.py", *flags.split()] and "#" not in said.replace("# Notes", "")
    words, _ = migrated(capsys, str(file), "--world-size", "2", "--", "--lr", "5e-4", "--tensor-model-parallel-size", "2")
    assert words[:3] == ["torchrun", "--nproc-per-node", "2"]
    assert config_of(words, 2).optimizer.lr == 5e-4 and config_of(words, 2).parallel.tensor_model_parallel_size == 2


BASE = (
    "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 2 --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 "
)
EXPERTS = "--num-experts 4 --disable-bias-linear "
DISPATCH = "--moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("given_flags", "same", "told"),
    [
        ("--moe-token-dispatcher-type flex", DISPATCH, ["--moe-token-dispatcher-type flex", "which computes the same"]),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep --moe-deepep-num-sms 20", DISPATCH, ["#   --moe-deepep-num-sms 20"]),
        ("--moe-flex-dispatcher-backend hybridep", DISPATCH, ["#   --moe-flex-dispatcher-backend hybridep"]),
        (
            "--recompute-granularity selective --recompute-modules core_attn moe_act",
            "--recompute-granularity selective --recompute-modules core_attn mlp_act",
            ["#   --recompute-modules moe_act\n#     --recompute-modules mlp_act, which computes the same"],
        ),
        (
            "--recompute-granularity selective --recompute-modules moe mlp moe_act",
            "--recompute-granularity selective --recompute-modules mlp",
            ["#   --recompute-modules moe\n", "#   --recompute-modules moe_act\n"],
        ),
        ("--moe-layer-recompute", "--recompute-granularity selective --recompute-modules core_attn mlp", ["mlp includes experts"]),
        (
            "--moe-layer-recompute --recompute-granularity selective --recompute-modules mlp_act",
            "--recompute-granularity selective --recompute-modules mlp",
            ["#   --moe-layer-recompute"],
        ),
        (
            "--moe-layer-recompute --recompute-granularity full --recompute-method uniform",
            "--recompute-granularity full --recompute-method uniform",
            ["--recompute-granularity full recomputes experts too"],
        ),
        ("--attention-backend local", "--attention-backend unfused", ["#   --attention-backend local"]),
        ("--position-embedding-type yarn", "--position-embedding-type rope --rope-type yarn", ["a type of rotary embedding"]),
        ("--openai-gelu --use-te-activation-func", "", ["approximation of GELU", "the same activation functions"]),
        ("--moe-expert-parallel-size 2", "--expert-model-parallel-size 2", ["#   --moe-expert-parallel-size 2"]),
        ("--moe-loss-coeff 0.5", "--moe-aux-loss-coeff 0.5", ["#   --moe-loss-coeff 0.5"]),
        ("--save x --persistent-save-interval 3", "--save x --save-interval 3", ["#   --persistent-save-interval 3"]),
    ],
)
def test_what_computes_the_same_is_replaced(
    given_flags: str, same: str, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings are those of the replacement, and the report says what it replaces."""
    file = tmp_path / "train.sh"
    file.write_text(BASE + EXPERTS + given_flags)
    words, said = migrated(capsys, str(file))
    base = shlex.split(BASE + EXPERTS)
    assert config_of(words, 2) == config_of([*base, *same.split()], 2)
    for text in told:
        assert text in said
    assert "COULD NOT" not in said and "NOT READY" not in said


def run_migrated(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, output and messages of the tool and of the program that it runs."""
    code = migrate.main(list(words))
    return code, *capfd.readouterr()


def test_a_plan_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With the ranks of the launcher, flags after `--` and variables of the shell; nothing but the plan is on stdout."""
    file, plan = tmp_path / "train.sh", tmp_path / "plan.json"
    monkeypatch.setenv("PLACE", str(tmp_path / "save"))
    file.write_text(BASE + EXPERTS + "--moe-token-dispatcher-type flex --exit-signal-handler --save $PLACE")
    code, said, told = run_migrated(capfd, str(file), "--", "--dry-run", "--dry-run-json", str(plan), "--bf16")
    assert code == 0 and "torchrun" not in said and "which computes the same" not in said and "bfloat16" in said, told
    assert "#   --moe-token-dispatcher-type flex" in told and "COULD NOT" not in told
    assert json.loads(plan.read_text())["job"]["world_size"] == 2
    code, said, told = run_migrated(capfd, str(file), "--", "--dry-run", "--world-size", "4", "--tensor-model-parallel-size", "3")
    assert code == 2 and "world size 4 is not divisible by TP" in told
    code, said, _ = run_migrated(capfd, str(file), "--", "--print-config", "--lr", "0.25")
    assert code == 0 and "lr: 0.25" in said and f"save: {tmp_path / 'save'}" in said
    assert not (tmp_path / "save").exists(), "nothing is trained"


def test_other_requests_are_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.sh"
    file.write_text(BASE)
    for words, expected in (("--help", "train on one device"), ("--explain lr", "--lr"), ("--model list llama3-8b", "llama3-8b")):
        code, said, told = run_migrated(capfd, str(file), "--", *words.split())
        assert code == 0 and expected in said and "#" not in told, (words, said, told)
    code, said, told = run_migrated(capfd, str(file), "--", "--plan", "--cluster", "h100", "--rows", "1")
    assert code == 0 and "2 " in said, told
    code, said, _ = run_migrated(capfd, str(file), "--", "--model", "llama3-8b")
    assert "--model llama3-8b" in said, "a model that is chosen is part of the command"


def test_a_deepspeed_configuration_beside_a_launch_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What both say is told, and the line counts."""
    line = tmp_path / "train.sh"
    line.write_text(
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
        "--train-iters 9 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --deepspeed_config ds.json --micro-batch-size 1"
    )
    words, said = migrated(capsys, str(FOREIGN / "zero3.json"), "--with", str(line))
    found = config_of(words, 8)
    assert (found.training.micro_batch_size, found.training.global_batch_size) == (1, 16)
    assert found.precision.fp16 and found.precision.initial_loss_scale == 2**15 and found.parallel.sharding == "optim_grads_params"
    assert found.parallel.sharding == "optim_grads_params" and found.logging.timing_log_level == 1
    assert "train_micro_batch_size_per_gpu 2\n#     The launch script sets --micro-batch-size 1, which is used." in said
    _, said = migrated(capsys, str(FOREIGN / "zero2.json"), code=1)
    assert "mystery.depth 2" in said and "the model, data and rates: --with SCRIPT" in said and "--num-layers is missing" in said
    (tmp_path / "ds.json").write_text((FOREIGN / "zero2.json").read_text())
    words, said = migrated(capsys, str(line))  # the file that the line names, beside the script
    assert config_of(words, 8).training.global_batch_size == 96 and config_of(words, 8).parallel.sharding == "optim_grads"
    assert "optimizer.params.lr 0.00015\n#     --lr 0.001 is used" in said


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, substitutions, redirections, files that are read: none of them acts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(
        'touch a; X=$(touch b); Y=`touch c`; source ./other.sh; echo "$(touch d)" > e\n'
        "cat <<EOF > f\n$(touch g)\nEOF\nfor i in 1 2; do touch h; done\n"
        "python pretrain_gpt.py --num-layers $((__import__('os').getpid())) --save $X/run --hidden-size `touch i` 2>&1 | tee j\n"
    )
    _, said = migrated(capsys, "train.sh", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]
    assert "X: it is $(touch b) in the script" in said and "source ./other.sh reads another file" in said
    assert "--num-layers takes a whole number" in said.replace("'", "")


SHELL = {
    'A=3; B=$((A * (2 + 1) / 2)); python t.py --x $B --y ${C:-d e} --z "${C:-d e}"': "--x 4 --y d e --z 'd e'",
    "L=(--a 1); L+=(--b '2 3'); python t.py \"${L[@]}\" --n ${#L[@]} --one ${L[1]}": "--a 1 --b '2 3' --n 4 --one 1",
    "python t.py \\\n  --a \\\n  # no\n": "--a",
    "A='--x 1 # no'\npython t.py $A --y \"it's\" --z=1": '--x 1 # no --y "it\'s" --z=1',
    "go() {\n  local K=$1\n  python t.py --k $K \"$@\"\n}\ngo 5 --q 'r s'": "--k 5 5 --q 'r s'",
    'CMD="python t.py --a 1"\nif [ $# -gt 3 ]; then exit; fi\neval $CMD': "--a 1",
    "bash -c \"python t.py --a 'b c'\"": "--a 'b c'",
    "A=1; if [ $A -eq 2 ]; then X=a; elif [[ $A != 1 && $A != 7 ]]; then X=b; else X=c; fi; python t.py --x $X": "--x c",
    "[ 1 ] && python t.py --a 1 > log 2>&1 &": "--a 1",
    "srun --jobid 3 python -u t.py --a 1 | tee log": "--a 1",
}


def test_words_of_scripts() -> None:
    for text, wanted in SHELL.items():
        (launch,) = Script().interpret(text).launches
        assert [remove_marks(word) for word in launch.argv] == list(shlex.split(wanted)), text


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*"'\"`$(){}[]<>|&;#\\\n =", "if", "fi", "then", "for", "done", "${", "$((", "python t.py --a", "A=", "<<E"]
        )
    )
)
def test_any_text_is_read_or_refused(pieces: list[str]) -> None:
    with contextlib.suppress(ValueError):
        Script().interpret("".join(pieces))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "echo hello\n", "No command was found that starts a Python program"),
        ("a.sh", 'python pretrain_gpt.py "--a 1\n', 'line 1: the quote " in the script is not closed'),
        ("a.toml", "[model\n", "is not valid TOML"),
        ("a.yaml", "- 1\n", "is not a YAML mapping"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[]", "is not a JSON object"),
    ],
)
def test_what_cannot_be_read_is_told(name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(text)
    assert migrate.main([str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
    assert migrate.main([str(tmp_path / "missing")]) == 2 and "is not a file" in capsys.readouterr().err
    assert migrate.main([str(tmp_path / name), "--set", "x"]) == 2 and "as NAME=VALUE" in capsys.readouterr().err


def test_several_launch_lines_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 3 --mock-data"
    )
    flags += " --tokenizer-type NullTokenizer --vocab-size 64 --lr"
    file = tmp_path / "two.sh"
    file.write_text(f"python pretrain_gpt.py {flags} 1\npython pretrain_gpt.py {flags} 2\n")
    words, said = migrated(capsys, str(file))
    assert words[-1] == "1" and "1 at line 1, 2 at line 2; 1 was taken (--pick N)" in said
    assert migrated(capsys, str(file), "--pick", "2")[0][-1] == "2"
    assert migrate.main([str(file), "--pick", "3"]) == 2


def test_a_validation_of_torchtitan_reads_all_of_the_data_or_some_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, flags, absent in ((-1, ["--full-validation"], "--eval-iters"), (7, ["--eval-iters", "7"], "--full-validation")):
        file = tmp_path / f"{steps}.toml"
        section = f"\n[validation]\nenable = true\nfreq = 50\nsteps = {steps}\n"
        file.write_text((FOREIGN / "llama3_8b.toml").read_text() + section)
        words, _ = migrated(capsys, str(file))
        place = words.index(flags[0])
        assert words[place : place + len(flags)] == flags and absent not in words
        assert words[words.index("--eval-interval") + 1] == "50"
