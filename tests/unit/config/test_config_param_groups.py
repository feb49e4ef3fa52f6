"""Parameter groups in the settings: a file, a YAML of settings and the command line mean the same; wrong ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.cli import load, parse
from megatron.config.errors import ConfigError
from megatron.config.save import from_dict, to_dict, to_yaml
from megatron.spec.groups import LearningRateBounds, build_group_lookup
from megatron.spec.weights import iter_weights
from tests.support.rule_cases import argv

BASE = argv("")

ENTRIES = ("layers.*.weight lr-mult=0.5 wd-mult=2", "*.mlp.* lr=2e-4 min-lr=1e-5 adam-beta2=0.9", "layers.1.* lr-mult=0.25")
MAPPING = """
{pad}layers.*.weight: {{lr-mult: 0.5, wd-mult: 2}}
{pad}"*.mlp.*":
{pad}  lr: 2e-4
{pad}  min_lr: 1e-5
{pad}  adam_beta2: 0.9
{pad}layers.1.*: {{lr-mult: 0.25}}
"""


def test_every_spelling_means_the_same(tmp_path: Path) -> None:
    alone, inside, saved = (tmp_path / name for name in ("groups.yaml", "run.yaml", "saved.yaml"))
    alone.write_text(MAPPING.format(pad=""))
    inside.write_text("optimizer:\n  param_groups:" + MAPPING.format(pad="    "))
    typed = parse([*BASE, "--param-groups", *ENTRIES])
    assert typed.optimizer.param_groups == ENTRIES
    assert parse([*BASE, "--param-groups", str(alone)]) == parse([*BASE, "--config", str(inside)]) == typed
    saved.write_text(to_yaml(typed))
    assert parse(["--config", str(saved)]) == from_dict(to_dict(typed)) == typed


def test_a_value_comes_from_the_last_entry_that_gives_it() -> None:
    config = parse([*BASE, "--lr", "1e-3", "--decoupled-lr", "5e-3", "--no-decay-embeddings", "--param-groups", *ENTRIES])
    group_of = build_group_lookup(config.optimizer)
    groups = {one.name: group_of(one) for one in iter_weights(config.model, 100)}
    up, bias, qkv = groups["layers.1.mlp.up.weight"], groups["layers.0.mlp.up.bias"], groups["layers.0.attention.qkv.weight"]
    assert (up.lr_mult, up.wd_mult, up.lr_bounds, up.betas) == (0.25, 2.0, LearningRateBounds(2e-4, 1e-5), (0.9, 0.9))
    assert (bias.lr_mult, bias.wd_mult, bias.lr_bounds) == (1.0, 0.0, LearningRateBounds(2e-4, 1e-5))
    assert (qkv.lr_mult, qkv.wd_mult, qkv.lr_bounds, qkv.betas) == (0.5, 2.0, LearningRateBounds(), (0.9, 0.999))
    assert groups["layers.0.attention_norm.weight"].wd_mult == 2.0, "an entry may switch on the decay of a norm"
    word, position = groups["embedding.word.weight"], groups["embedding.position.weight"]
    assert (word.lr_bounds, word.wd_mult, position.lr_bounds, position.wd_mult) == (
        LearningRateBounds(5e-3),
        0.0,
        LearningRateBounds(),
        0.0,
    )
    assert groups["final_norm.weight"].wd_mult == 0.0


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("layers.*.mpl.up.weight lr-mult=2", "a name like layers.*.mpl.up.weight. The nearest names are layers.*.mlp.up.weight"),
        ("embedding.word lr-mult=2", "nearest names are embedding.word.weight"),
        ("* lr-mul=2", "there is no key lr-mul. Did you mean lr-mult?"),
        ("* lr-mult=-1", "sets lr-mult=-1, but lr-mult must be a number that is at least 0"),
        ("* adam-beta1=1", "at least 0 and below 1"),
        ("* lr-mult=2 lr_mult=3", "sets lr-mult twice"),
        ("* wd-mult=2 lr-mult", "lr-mult is not of the form key=value"),
        ("lr-mult=2 *", "must start with a pattern of parameter names, not with lr-mult=2"),
        ("* optimizer=adan", "there is no optimizer adan. Did you mean adam?"),
        ("* optimizer=sgd adam-eps=1", "act only on parameters that adam"),
        ("*.bias lr=1e-9 min-lr=1e-8", "the minimum learning rate of"),
    ],
)
def test_what_cannot_act_is_refused(entry: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*BASE, "--param-groups", entry], 1)
    assert told in " ".join(str(caught.value).split())


def test_a_value_that_a_file_gives_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text("embedding.*: {lr-mult: 1, lr-mult: 2}\n")
    with pytest.raises(ConfigError, match="sets lr-mult twice"):
        load([*BASE, "--param-groups", str(file)], 1)


@pytest.mark.parametrize("text", ["- a\n- b\n", "embedding.*: 3\n", "embedding.*: {lr-mult: [1, 2]}\n", "a b: {lr-mult: 1}\n"])
def test_a_file_that_is_no_mapping_of_mappings(text: str, tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="It should hold lines such as"):
        load([*BASE, "--param-groups", str(file)], 1)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load([*BASE, "--param-groups", str(tmp_path / "none.yaml")], 1)
