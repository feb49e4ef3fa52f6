"""What an export says besides its weights: lengths, tokens that end a text, sampling, chat templates; as other programs read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lab.commands.checkpoint import main
from megatron_lab.commands.generate_text import main as generate_text
from tests.support.huggingface_models import saved
from tests.support.runs import arguments, run
from tests.support.vocabularies import BPE, tokenizer_json, write_json

END = BPE.vocabulary["<|endoftext|>"]
TURN, CALL, UNUSED = END + 2, END + 3, END + 20
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
CHAT = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "that hat"}]
Texts = pytest.CaptureFixture[str]


def tool(*words: object) -> int:
    return main([str(word) for word in words])


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_tokenizer(folder: Path, **fields: Any) -> None:
    """A tokenizer with tokens that end a turn and a call, beside its end of document."""
    content = tokenizer_json(BPE, "qwen2")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": TURN, "content": "<|turn|>", **flags}, {"id": CALL, "content": "<|call|>", **flags}]
    write_json(folder, content)
    write_json(folder, {"eos_token": "<|endoftext|>"} | fields, "tokenizer_config.json")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions, with a tokenizer, several tokens that end a text, and sampling settings."""
    folder = tmp_path_factory.mktemp("llama")
    saved("llama", folder, vocab_size=400, num_hidden_layers=2)
    write_tokenizer(folder, model_max_length=64, chat_template=TEMPLATE, tokenizer_class="TokenizersBackend")
    write_json(folder, read_json(folder / "config.json") | {"bos_token_id": None, "pad_token_id": None}, "config.json")
    tokens = {"bos_token_id": None, "eos_token_id": [CALL, END], "pad_token_id": END, "transformers_version": "5.0.0"}
    write_json(folder, SAMPLING | tokens, "generation_config.json")
    return folder


def train(folder: Path, save: Path, seq_length: int | None, **settings: Any) -> None:
    """Two steps from the weights of an imported model."""
    model = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "attention_dropout", "hidden_dropout", "vocab_size"))
    source = {"use_checkpoint_args": True, "pretrained_checkpoint": folder, "save": save, "seq_length": seq_length}
    run(arguments(train_iters=2, lr=1e-4, global_batch_size=2, **{"tokenizer_type": None} | model | source | settings))


def test_stop_tokens_sampling_and_lengths_go_through_a_training(llama: Path, tmp_path: Path, capsys: Texts) -> None:
    """And transformers opens all of it: model, tokenizer, template, generation."""
    transformers = pytest.importorskip("transformers")
    assert tool("import", llama, tmp_path / "base") == 0
    train(tmp_path / "base", tmp_path / "run", 128)
    assert tool("export", tmp_path / "run", tmp_path / "out", "--verify") == 0
    told = capsys.readouterr().out
    assert f"the ids {CALL}, {END}, {TURN} end a generated text" in told
    assert "model_max_length in tokenizer_config.json becomes 128" in told

    folder = tmp_path / "out"
    config, tokenizer_config = read_json(folder / "config.json"), read_json(folder / "tokenizer_config.json")
    assert config["eos_token_id"] == [CALL, END, TURN] and config["max_position_embeddings"] == 128
    assert (tokenizer_config["model_max_length"], tokenizer_config["tokenizer_class"]) == (128, "PreTrainedTokenizerFast")
    assert tokenizer_config["chat_template"] == (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert read_json(folder / "generation_config.json") == SAMPLING | {"eos_token_id": [CALL, END, TURN], "pad_token_id": END}

    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [CALL, END, TURN] and generation.temperature == 0.6 and generation.do_sample
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [CALL, END, TURN] and model.config.pad_token_id == END
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == END and tokenizer.model_max_length == 128
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == "<|user|>the cat?<|turn|>\n<|assistant|>that hat<|turn|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(TURN) == 2


def test_without_other_stop_tokens_there_is_one_id(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "plain")
    write_tokenizer(folder)
    (folder / "generation_config.json").unlink()
    write_json(folder, read_json(folder / "config.json") | {"eos_token_id": END}, "config.json")
    assert tool("export", folder, tmp_path / "out") == 0
    assert read_json(tmp_path / "out" / "generation_config.json") == {"eos_token_id": END}
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_ids_without_a_row_and_templates_that_fail_are_told(llama: Path, tmp_path: Path, capsys: Texts) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    write_json(folder, {"eos_token_id": [END, 999]}, "generation_config.json")
    write_tokenizer(folder, chat_template="{% if %}")
    assert tool("export", folder, tmp_path / "out") == 0
    told = capsys.readouterr().out
    assert "the ids 999, which end a text, have no row" in told and "the end of an answer is not known" in told
    assert read_json(tmp_path / "out" / "config.json")["eos_token_id"] == END


def test_another_family_than_that_of_the_imported_model_is_told(tmp_path: Path, capsys: Texts) -> None:
    folder = tmp_path / "phi3"
    saved("phi3", folder, vocab_size=400, num_hidden_layers=1, sliding_window=None)
    write_tokenizer(folder)
    assert tool("import", folder, tmp_path / "base") == 0
    assert tool("export", tmp_path / "base", tmp_path / "out") == 0
    family = read_json(tmp_path / "out" / "config.json")["model_type"]
    assert family != "phi3" and f"is a phi3 model. As a {family} model it computes the same" in capsys.readouterr().out
    assert tool("export", tmp_path / "base", tmp_path / "same", "--family", "phi3") == 0
    assert "it computes the same" not in capsys.readouterr().out
    assert read_json(tmp_path / "same" / "config.json")["model_type"] == "phi3"


@pytest.mark.parametrize("value", ["abc", [[1]], [END, None], True, 2.0], ids=repr)
def test_stop_tokens_that_are_no_ids_are_refused(llama: Path, tmp_path: Path, capsys: Texts, value: Any) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    write_json(folder, {"eos_token_id": value}, "generation_config.json")
    assert tool("export", folder, tmp_path / "out") == 1
    assert f"eos_token_id is {value!r}, but must be an id or a list of ids" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer_config.json", {"eos_token": {"content": 3}}, "eos_token is {'content': 3}, but must be a text"),
        ("tokenizer_config.json", {"eos_token": ["a"]}, "eos_token is ['a'], but must be a text"),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>", "chat_template": 3}, "chat_template has 3, but must be a text"),
        (
            "tokenizer_config.json",
            {"eos_token": "<|endoftext|>", "chat_template": [{"name": "a"}]},
            "chat_template has {'name': 'a'}",
        ),
        ("config.json", {"bos_token_id": "x"}, "bos_token_id is 'x', but must be an id or a list of ids"),
        ("generation_config.json", {"pad_token_id": True}, "pad_token_id is True, but must be an id"),
        ("generation_config.json", [], "must contain a JSON object"),
    ],
    ids=str,
)
def test_files_of_another_form_are_refused(
    llama: Path, tmp_path: Path, capsys: Texts, file: str, content: Any, reason: str
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    former = read_json(folder / file) if file == "config.json" else {}
    write_json(folder, former | content if isinstance(content, dict) else content, file)
    assert tool("export", folder, tmp_path / "out") == 1
    assert reason in (said := capsys.readouterr().err) and file in said
    assert not (tmp_path / "out").exists()


def test_the_eos_token_that_only_an_id_names_gets_its_name(llama: Path, tmp_path: Path, capsys: Texts) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    write_tokenizer(folder, eos_token=None, extra_special_tokens=["<|call|>"])
    assert tool("export", folder, tmp_path / "out") == 0
    assert "gets eos_token '<|call|>'" in capsys.readouterr().out
    written = read_json(tmp_path / "out" / "tokenizer_config.json")
    assert written["eos_token"] == "<|call|>" and written["additional_special_tokens"] == ["<|call|>"]
    assert "extra_special_tokens" not in written


def test_the_template_of_the_training_can_be_written(llama: Path, tmp_path: Path, capsys: Texts) -> None:
    transformers = pytest.importorskip("transformers")
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE.replace("<|turn|>", "<|call|>"))
    assert tool("export", llama, tmp_path / "out", "--chat-template", template) == 0
    folder = tmp_path / "out"
    assert read_json(folder / "tokenizer_config.json")["chat_template"] == template.read_text()
    assert (folder / "chat_template.jinja").read_text() == template.read_text()
    assert read_json(folder / "config.json")["eos_token_id"] == [CALL, END]
    text = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, tokenize=False)
    assert text.endswith("<|assistant|>that hat<|call|>\n")

    assert tool("export", llama, tmp_path / "named", "--chat-template", "chatml") == 0
    assert "ends an answer by '<|im_end|>', which is not a token of its own" in capsys.readouterr().out
    for flags, reason in (
        (["--no-tokenizer"], "--chat-template has no effect with --no-tokenizer"),
        (["--format", "peft"], "--chat-template has no effect with --format peft"),
        (["--tokenizer-type", "ByteTokenizer"], "a conversation needs the tokenizer of a Hugging Face folder"),
    ):
        assert tool("export", llama, tmp_path / "no", "--chat-template", template, *flags) == 1
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_several_templates_are_written_in_both_forms(llama: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(llama, tmp_path / "model")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert tool("import", folder, tmp_path / "base") == 0
    assert tool("export", tmp_path / "base", tmp_path / "out") == 0
    templates = {"default": TEMPLATE, "tool_use": "tools"}
    written = read_json(tmp_path / "out" / "tokenizer_config.json")["chat_template"]
    assert written == [{"name": name, "template": text} for name, text in templates.items()]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates


def test_generation_ends_at_every_stop_token(llama: Path, tmp_path: Path, capsys: Texts) -> None:
    """Every token that the model writes is made one that ends the text: then the text is empty."""
    folder = shutil.copytree(llama, tmp_path / "model")
    words = ["--load", str(folder), "--prompt", "the cat", "--max-new-tokens", "3", "--temperature", "0", "--json"]
    assert generate_text(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(first["tokens"]) == 3 and not first["ended"]
    write_json(folder, {"eos_token_id": [END, first["tokens"][1]]}, "generation_config.json")
    assert generate_text(words) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["ended"] and second["tokens"] == first["tokens"][: first["tokens"].index(first["tokens"][1])]
    assert generate_text([*words, "--ignore-eod"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == first["tokens"]


NUMBERS = {"tokenizer_type": "NullTokenizer", "vocab_size": 127}


@pytest.mark.parametrize(
    ("case", "changes", "lengths", "expected"),
    [
        ("llama", {}, [32], 64),
        ("llama", {}, [128, 32], 128),
        ("llama-linear", {}, [96], 96),
        ("llama-dynamic", {}, [48], 24),
        ("llama-yarn", {}, [128], 64),
        ("phi3-longrope", {}, [96], 64),
        ("deepseek-v3", {}, [96], 64),
        ("gpt2", {}, [32], 64),
        ("gpt-neox", {}, [96], 96),
    ],
)
def test_the_length_follows_from_training(
    case: str, changes: dict[str, Any], lengths: list[int], expected: int, tmp_path: Path, capsys: Texts
) -> None:
    """And the logits stay those of this framework, also where transformers computes frequencies from the field."""
    saved(case, tmp_path / "model", vocab_size=128, **changes)
    folder = tmp_path / "model"
    assert tool("import", folder, tmp_path / "base", "--no-tokenizer") == 0
    source = tmp_path / "base"
    for index, length in enumerate(lengths):
        train(source, tmp_path / f"run{index}", length, **NUMBERS)
        source = tmp_path / f"run{index}"
    assert tool("export", source, tmp_path / "out", "--no-tokenizer", "--verify") == 0
    config = read_json(tmp_path / "out" / "config.json")
    assert config["n_positions" if case == "gpt2" else "max_position_embeddings"] == expected
    is_shorter = max(lengths) > expected
    assert (f"sequences of up to {max(lengths)} tokens, but max_position_embeddings is {expected}" in capsys.readouterr().out) == (
        is_shorter
    )


def test_a_run_continued_with_shorter_sequences_keeps_the_longest(tmp_path: Path) -> None:
    """Without --use-checkpoint-args, from the record of what the run has read."""
    settings = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
    for length, iterations in ((32, 1), (16, 2)):
        folders = {"save": tmp_path / "run", "load": tmp_path / "run"}
        run(arguments(**settings, **folders, seq_length=length, train_iters=iterations, lr_decay_style="constant"))
    assert tool("export", tmp_path / "run", tmp_path / "out", "--no-tokenizer") == 0
    assert read_json(tmp_path / "out" / "config.json")["max_position_embeddings"] == 32


def test_an_extension_is_exported_with_its_base_and_scaling(tmp_path: Path, capsys: Texts) -> None:
    transformers = pytest.importorskip("transformers")
    saved("llama", tmp_path / "model", vocab_size=128)
    assert tool("import", tmp_path / "model", tmp_path / "base", "--no-tokenizer") == 0
    yarn = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 64, "rotary_base": 20000}
    train(tmp_path / "base", tmp_path / "run", 128, **NUMBERS, **yarn, attention_dropout=0.125, bf16=True)
    assert tool("export", tmp_path / "run", tmp_path / "main", "--no-tokenizer") == 0
    assert "main parameters of a run that computed in bfloat16" in capsys.readouterr().out
    assert tool("export", tmp_path / "run", tmp_path / "out", "--no-tokenizer", "--verify", "--dtype", "bfloat16") == 0
    assert "main parameters" not in capsys.readouterr().out
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.max_position_embeddings == 256 and config.attention_dropout == 0.125 and config.dtype == torch.bfloat16
    parameters = config.rope_parameters
    assert (parameters["rope_type"], parameters["factor"], parameters["rope_theta"]) == ("yarn", 4.0, 20000)


def test_adapters_have_the_names_of_the_base_and_are_compared_with_peft(tmp_path: Path, capsys: Texts) -> None:
    """Phi-3 has one module for queries, keys and values. Its config.json, next to the tokenizer or in --peft-base, tells."""
    pytest.importorskip("peft")
    base = tmp_path / "phi3"
    saved("phi3", base, vocab_size=400)
    write_tokenizer(base)
    assert tool("import", base, tmp_path / "base") == 0
    train(tmp_path / "base", tmp_path / "run", 32, lora_rank=2, lora_alpha=3.0)
    capsys.readouterr()
    for number, flags in enumerate(([], ["--peft-base", base], ["--dtype", "bfloat16", "--peft-base", base])):
        assert tool("export", tmp_path / "run", tmp_path / f"out{number}", "--format", "peft", "--verify", *flags) == 0
        told = capsys.readouterr().out
        assert "a phi3 model, next to mlp.down_proj, mlp.gate_up_proj, self_attn.o_proj, self_attn.qkv_proj" in told
        assert "and PEFT" in told and (f"The base model is {base}" in told) == bool(flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out0", "out1", "out2", "phi3", "run"]

    saved("phi3", tmp_path / "other", vocab_size=400, initializer_range=0.3)
    saved("gpt2", tmp_path / "gpt2")
    for name, reason in (("other", "its weights are others"), ("gpt2", "is a gpt2 model, but not that of the adapters")):
        flags = ["--format", "peft", "--verify", "--peft-base", tmp_path / name]
        assert tool("export", tmp_path / "run", tmp_path / "no", *flags) == 1
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
