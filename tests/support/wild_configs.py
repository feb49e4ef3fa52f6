"""Command lines as nobody should type them: every flag may take any text, and the world any size."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron.config.compat import KNOWN
from megatron.config.flags import Flag, flags
from tests.support.random_configs import CommandLine, command_lines
from tests.support.random_draws import Draw, chance, number, one_of

WORDS = (
    *("0", "-1", "1", "2", "3", "7", "-0", "+4", "1_000", "٣", "10000000", "2147483648", "9223372036854775808", f"1{'0' * 30}"),
    *(f"1{'0' * 400}", f"-1{'0' * 400}", "9" * 4000, "9" * 5000),
    *("0.5", "-0.5", "1e-320", "1e308", "1e999", "-1e999", "nan", "-nan", "inf", "-inf", "0x10", "1.0", "1.", "1e3"),
    *(
        "",
        " ",
        "None",
        "none",
        "True",
        "false",
        "-",
        "--",
        "---",
        "=",
        "\n",
        "\0",
        "é",
        "\ud800",
        "'",
        '"',
        "%s",
        "{}",
        "../..",
        "/",
    ),
    *(
        "EttL",
        "E|L",
        "L|E",
        "t*999999999",
        f"E{'(' * 300}t{')*2' * 300}L",
        "E(t|)*10000000L",
        "((((",
        "E*3L",
        "|",
        "E" + "t|" * 9999 + "L",
    ),
    *("interleaved", "optim_grads_params", "balanced", "rope", "WSD", "NullTokenizer", "HuggingFaceTokenizer", "cuda", "nccl"),
    *("1,2,3", "0,0,0", "1e999,1", "-1,2", ",,,", "1 a 1", "a b", "s3://", "file:///", "https://example.invalid/x"),
)
"""Texts that some reader of numbers, names or paths may stumble over."""

WORLDS = (1, 2, 8, 0, -1, 7, 1000, 1_048_576, 1_048_577, 9_999_991, 10_000_000, 2**31, 2**63, 10**30)
"""Numbers of ranks."""


@st.composite
def wild_lines(draw: Draw) -> CommandLine:
    """A command line of which some flags make sense, or none."""
    argv = list(draw(command_lines()).argv) if not chance(draw, 4) else []
    names = [*flags(), *(f"no-{name}" for name, flag in flags().items() if flag.kind is bool)]
    for _ in range(number(draw, 1, 5)):
        name = draw(st.sampled_from(names))
        if chance(draw, 12):
            name = one_of(draw, *sorted(KNOWN), "hiden-size", "", "-", "lr=1", "tensor_model_parallel_size")
        argv += [f"--{name}", *_values(draw, flags().get(name))]
    return CommandLine(tuple(argv), one_of(draw, *WORLDS, *WORLDS[:3], *WORLDS[:3]))


def _values(draw: Draw, flag: Flag | None) -> list[str]:
    """As many as the flag takes, most times."""
    count = flag.count if flag is not None and flag.count is not None and not chance(draw, 10) else number(draw, 0, 3)
    if flag is not None and flag.choices and not chance(draw, 4):
        return [one_of(draw, *flag.choices)]
    return [draw(st.sampled_from(WORDS) | st.text(max_size=6)) for _ in range(count)]
