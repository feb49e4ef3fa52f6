"""Settings from a TOML file: the same settings, limits and errors as from YAML."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.cli import load, parse
from megatron.config.errors import ConfigError
from megatron.config.yaml_file import read_param_groups
from megatron_lab.migration.toml_nodes import compose_toml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that does not exist yet."""
    return tmp_path / "run.toml"


def _error(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(path)])
    return str(caught.value)


TOML = """
# a comment with a "quote and [a bracket
num-layers = 12
adam_eps = 1e-8
bf16 = true
no-save-optim = true
mock_data = false
optimizer = "sgd"
wandb-exp-name = 'no'  # a text

[model]
hidden_size = 6_4
"rotary-base" = 5.0e+5

[training]
rampup_batch_size = [2, 2, # in
  100]
iterations_to_skip = []

[data]
split = "969, 30, 1"
data_path = [
  "corpus # 1",
  'the "second" ] one',
]
"""

YAML = """
num-layers: 12
adam_eps: 1e-8
bf16: true
no-save-optim: true
mock_data: false
optimizer: sgd
wandb-exp-name: 'no'
model: {hidden_size: 64, rotary-base: 5.0e+5}
training: {rampup_batch_size: [2, 2, 100], iterations_to_skip: []}
data: {split: '969, 30, 1', data_path: ['corpus # 1', 'the "second" ] one']}
"""


def test_toml_has_the_meaning_of_yaml(file: Path) -> None:
    file.write_text(TOML)
    file.with_suffix(".yaml").write_text(YAML)
    config = parse(["--config", str(file)])
    assert config == parse(["--config", str(file.with_suffix(".yaml"))])
    assert (config.model.hidden_size, config.optimizer.adam_eps, config.training.rampup_batch_size) == (64, 1e-8, (2, 2, 100))
    assert config.data.data_path == ("corpus # 1", 'the "second" ] one') and config.logging.wandb_exp_name == "no"


def test_flags_and_later_files_win(file: Path) -> None:
    file.write_text("lr = 0.5\nseed = 7\nswiglu = true\n")
    file.with_suffix(".yaml").write_text("seed: 8\n")
    config = parse(["--no-swiglu", "--config", str(file), "--config", str(file.with_suffix(".yaml"))])
    assert (config.optimizer.lr, config.training.seed, config.model.swiglu) == (0.5, 8, False)


def test_an_upper_case_ending_and_an_empty_file(file: Path) -> None:
    file.with_name("RUN.TOML").write_text("[optimizer]\nlr = 0.5\n")
    assert parse(["--config", str(file.with_name("RUN.TOML"))]).optimizer.lr == 0.5
    file.write_text("# nothing\n")
    assert parse(["--config", str(file)]) == parse([])


def test_a_byte_order_mark_is_no_key(file: Path) -> None:
    """As editors on Windows write it; YAML accepts it too."""
    for path in (file, file.with_suffix(".yaml")):
        path.write_text("lr = 0.5\n" if path == file else "lr: 0.5\n", encoding="utf-8-sig")
        assert parse(["--config", str(path)]).optimizer.lr == 0.5


def test_dots_in_strings_and_comments_are_no_levels() -> None:
    dots = ".".join("a" * 30)
    text = f"# {dots}\nx = '{dots}'\ny = \"\"\"\n{dots}\n\"\"\"\nz = '''\n{dots}'''\n{dots[:39]} = 1 # {dots}\n\"{dots}\" = 1\n"
    assert compose_toml(text, 20, 1000) is not None


@given(st.integers(1, 30), st.integers(0, 30), st.sampled_from(["a", '"a.b"', "' '", '"\\"."']), st.sampled_from([".", " . "]))
def test_levels_of_keys_are_counted(num_header_parts: int, num_parts: int, part: str, dot: str) -> None:
    text = f"[{dot.join([part] * num_header_parts)}]\n" + (f"{dot.join([part] * num_parts)} = 1\n" if num_parts else "")
    if num_header_parts + num_parts > 20:
        with pytest.raises(ValueError, match="more than 20 levels"):
            compose_toml(text, 20, 1000)
    else:
        assert compose_toml(text, 20, 1000) is not None


def test_parameter_groups(file: Path) -> None:
    file.write_text("['embedding.*']\nlr-mult = 0.1\n\n['*.norm']\nwd-mult = 0\n")
    assert read_param_groups(str(file)) == ("embedding.* lr-mult=0.1", "*.norm wd-mult=0")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lr = 0.5\n\nnum-layrs = 3\n", ["line 3: --num-layrs is not a flag", "--num-layers"]),
        ('lr = "abc"\n', ["line 1: --lr abc", "takes a number"]),
        ("[model]\nnum_layers = 1.5\n", ["line 2: --num-layers 1.5", "takes a whole number"]),
        ("[training]\n# text\nlearning-rate = 1e-3\n", ["line 3: --learning-rate is not a flag", "Use --lr."]),
        ('bf16 = "true"\n', ["--bf16 true", "true or false"]),
        ("bf16 = 1\n", ["--bf16 1", "true or false"]),
        ("lr = [1, 2]\n", ["--lr takes a number, but has 2 values."]),
        ("lr = 1\n[optimizer]\nlr = 2\n", ["line 3: lr was already set in", "line 1"]),
        ("[model]\nlr = 1\n", ["line 2: lr belongs under optimizer, not under model"]),
        ("model.lr = 1\n", ["line 1: lr belongs under optimizer, not under model"]),
        ("[modle]\nlr = 1\n", ["modle is not a setting", "model, training, spikes"]),
        ("seed = 1\n[[data]]\nsplit = '1'\n", ["line 2: data is not a setting"]),
        ('config = "other.toml"\n', ["config is allowed on the command line only"]),
        ('note = """\n[data]\n"""\nnum-layrs = 3\n', ["line 4: --num-layrs"]),
        ("data-path = [\n 'a',\n 'b', ]\nnum-layrs = 3\n", ["line 4: --num-layrs"]),
        ("lr = [1\n", ["is not a TOML file of settings: Unclosed array"]),
        ("lr: 1\n", ["is not a TOML file of settings", "at line 1, column 3"]),
        ("lr = 1\nlr = 2\n", ["is not a TOML file of settings: Cannot overwrite a value (at line 2"]),
        (f"lr = {'[' * 30}1{']' * 30}\n", ["has more than 20 levels"]),
        (f"lr = {'[' * 5000}1{']' * 5000}\n", ["has more than 20 levels"]),
        (f"{'.'.join('a' * 5000)} = 1\n", ["has more than 20 levels"]),
        ("[" + " . ".join(["a-b", '"c.d"', "'e'"] * 6000) + "]\n", ["has more than 20 levels"]),
        (f"[[{'.'.join('a' * 21)}]]\n", ["has more than 20 levels"]),
        (f"x = {{ {'.'.join('a' * 5000)} = 1 }}\n", ["has more than 20 levels"]),
        (f"[{'.'.join('a' * 15)}]\n{'.'.join('b' * 15)} = 1\n", ["has more than 20 levels"]),
        ("seed = [" + "1," * 110_000 + "]\n", ["holds more than 100,000 keys and values"]),
    ],
)
def test_errors_name_the_file_and_the_line(text: str, parts: list[str], file: Path) -> None:
    file.write_text(text)
    message = _error(file)
    assert str(file) in message
    for part in parts:
        assert part in message


def test_notes_name_the_line(file: Path) -> None:
    file.write_text(
        "num-layers = 4\nhidden-size = 64\nnum-attention-heads = 8\nseq-length = 32\nmicro-batch-size = 2\nlr = 1e-3\n"
        'train-iters = 10\nmock-data = true\ntokenizer-type = "NullTokenizer"\nvocab-size = 100\nuse-flash-attn = true\n'
    )
    (note,) = load(["--config", str(file)], 1).notes
    assert note.startswith(f"{file} line 11: --use-flash-attn has no effect")


_KEYS = st.sampled_from(["a", "b-1", "'c d'", '"e#\\""'])
_VALUES = st.recursive(
    st.sampled_from(["1", "0.5", "true", '"#["', "'\"'", '"""x\n[y]\n= "" """', "'''\n'''", "1979-05-27 07:32:00", '"\\\\"']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", # [\n".join(items) + "]")
        | st.lists(inner, max_size=2).map(lambda items: "{" + ", ".join(f"k{i} = {item}" for i, item in enumerate(items)) + "}")
    ),
    max_leaves=4,
)
_LINES = st.one_of(
    st.tuples(_KEYS, _VALUES).map(lambda pair: f"{pair[0]} = {pair[1]} # \"'["),
    _KEYS.map(lambda key: f" [{key}.t]"),
    _KEYS.map(lambda key: f"[[ {key} ]] # x"),
    st.sampled_from(["", "# '''", "  "]),
)


@given(st.lists(_LINES, max_size=6).map("\n".join))
def test_each_key_has_the_line_on_which_it_is_set(text: str) -> None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    root = compose_toml(text, 100, 1000)

    def check(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                line = text.split("\n")[key.start_mark.line]
                assert key.value.replace('"', '\\"') in line, (text, key.value, line)
                check(value)

    if root is not None:
        check(root)
