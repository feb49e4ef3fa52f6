"""The architecture, read from the source: imports go one way, pure files stay pure, every setting is used."""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from megatron.config.config import Config
from megatron.spec.activations import BUILT_IN_FIELDS
from megatron.training.features import FEATURES
from tests.support.code_lines import count_code_lines

ROOT = Path(__file__).resolve().parents[2]
MEGATRON, LAB = ROOT / "megatron", ROOT / "megatron_lab"
FILES = sorted(path.relative_to(ROOT) for path in MEGATRON.rglob("*.py") if path.parent != MEGATRON)
"""The core. What lies beside its rooms are former names (tests/unit/test_moved_names.py)."""
FILES_AROUND = sorted(path.relative_to(ROOT) for path in LAB.rglob("*.py"))
STRICT_AROUND = "planner verification proofs flight resilience audit inference monitoring foreign node_memory tokenizers".split()
PREPROCESS = ("megatron_lab", "data_tools", "preprocess")
IN_RUNS = [*FILES, *(file for file in FILES_AROUND if file.parts[1] in STRICT_AROUND or file.parts[:3] == PREPROCESS)]
"""The core, what works with the ranks of a run, what reads the weights of others, and what makes datasets of texts."""

ABOVE = {
    "config": {"spec"},
    "spec": {"config"},
    "parallel": {"config"},
    "precision": {"config", "parallel"},
    "tensor_parallel": {"config", "parallel", "precision"},
    "pipeline_parallel": {"config", "parallel"},
    "data_parallel": {"config", "parallel"},
    "attention": {"config", "parallel"},
    "context_parallel": {"config", "parallel", "attention"},
    "moe": {"config", "parallel"},
    "model": {
        "config",
        "parallel",
        "attention",
        "moe",
        "context_parallel",
        "precision",
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel",
    },
    "optimizer": {"config", "parallel", "tensor_parallel", "pipeline_parallel", "data_parallel"},
    "checkpoint": {"config", "parallel", "tensor_parallel", "pipeline_parallel", "data_parallel", "model", "optimizer"},
    "data": {"config"},
    "metrics": {"config"},
}
ABOVE["memory"] = set()
for room in set(ABOVE) - {"config", "spec", "memory"}:
    ABOVE[room] |= {"spec", "memory"}
"""What each room may import beside itself. (Between config and spec: see `test_spec_lies_between_the_settings_and_their_rules`.)"""
SETTINGS = {
    f"megatron.config.{name}" for name in "data experts memory model outputs parallel param_groups precision training".split()
}
"""The dataclasses of the settings, which know nothing of the spec but its tables that read no settings."""
ABOVE["training"] = set(ABOVE)
ABOVE["api"] = set(ABOVE)

CHECKPOINT_WITHOUT_TORCH = (
    *("errors", "safetensors_file", "manifest", "storage", "local_storage", "object_storage", "storage_url"),
    *("save_folder", "save_plan", "writer_messages", "writer_main"),
)
"""What the process that writes checkpoints needs, and the command line."""
WITHOUT_TORCH = [
    *(str(file) for file in FILES if file.parts[1] in ("config", "spec")),
    "megatron/parallel/topology.py",
    "megatron/parallel/tensor_slice.py",
    "megatron/parallel/sequence_split.py",
    *(str(file) for file in FILES if file.parts[1] == "pipeline_parallel" and file.name not in ("executor.py", "p2p.py")),
    "megatron/training/progress.py",
    "megatron/training/signals.py",
    *(
        f"megatron_lab/resilience/{name}.py"
        for name in ("job_state", "verdict", "layouts", "ranks", "command", "messages", "supervisor")
    ),
    *(f"megatron_lab/flight/{name}.py" for name in ("record", "diagnosis", "watcher")),
    *(f"megatron/checkpoint/{name}.py" for name in CHECKPOINT_WITHOUT_TORCH),
    "megatron/data/samples.py",
    "megatron_lab/migration/checkpoint_args.py",
    "megatron_lab/planner/units.py",
    "megatron_lab/pages/run_page.py",
    *(f"megatron_lab/commands/{name}.py" for name in ("plot_loss", "report")),
]


@functools.cache
def nodes(file: Path) -> Sequence[ast.AST]:
    """Its whole tree, the module first."""
    return [*ast.walk(ast.parse((ROOT / file).read_text()))]


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    """At the end: they are millions of objects, which every search for cycles would visit, in these tests and in later ones."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


@functools.cache
def imports(file: Path) -> Sequence[str]:
    """Modules that a file imports, anywhere in it."""
    found: list[str] = []
    for child in nodes(file):
        if isinstance(child, ast.Import):
            found += (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            found.append(child.module or "")
    return found


def test_there_is_something_to_read() -> None:
    assert len(FILES) > 60 and {file.parts[1] for file in FILES} == set(ABOVE)
    assert all((ROOT / file).exists() for file in WITHOUT_TORCH)


def test_megatron_is_a_namespace_package_of_rooms() -> None:
    assert not (MEGATRON / "__init__.py").exists()
    for room in ABOVE:
        assert (MEGATRON / room / "py.typed").exists(), f"{room}: who imports it has its types (PEP 561 asks it of each room)"
        if room == "api":  # which is there for its names
            continue
        body = [*ast.iter_child_nodes(nodes(Path("megatron", room, "__init__.py"))[0])]
        moved = ["from megatron.moved import find_moved", "find_moved()"]
        assert isinstance(body[0], ast.Expr) and [*map(ast.unparse, body[1:])] in ([], moved), (
            f"{room}/__init__.py is one docstring, and at most finds what has moved"
        )


def test_imports_go_one_way() -> None:
    wrong = []
    for file in FILES:
        room = file.parts[1]
        for module in imports(file):
            top, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if (file.name, module) == ("__init__.py", "megatron.moved"):
                continue
            if top == "megatron_lab":
                if room != "api":
                    wrong.append(f"{file} imports {module}")
            elif top in ("tests", "tools", "pretrain_gpt") or (top == "megatron" and other != room and other not in ABOVE[room]):
                wrong.append(f"{file} imports {module}")
    for file in FILES_AROUND:
        wrong += [
            f"{file} imports {module}" for module in imports(file) if module.split(".")[0] in ("tests", "tools", "pretrain_gpt")
        ]
    assert not wrong, "\n".join(wrong)


def texts_of_parts(file: Path) -> Iterator[str]:
    """The texts, such as `package.module:Name`, by which a file takes parts."""
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"megatron[\w.]*:\w+", node.value):
            yield node.value


def test_parts_that_are_taken_by_name_exist() -> None:
    """Nothing but the run that needs it would find a name that is spelled wrong."""
    wrong, count = [], 0
    for file in [*FILES, *FILES_AROUND]:
        for text in texts_of_parts(file):
            module, _, name = text.partition(":")
            path = path_of(module)
            tree = nodes(path)[0] if (ROOT / path).exists() else ast.Module([], [])
            assert isinstance(tree, ast.Module)
            defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            wrong += [] if name in defined else [f"{file}: {text}"]
            count += 1
    assert not wrong and count > 30


def test_the_loop_knows_no_feature() -> None:
    """Neither the module of one nor its flag: they enter by the table of features."""
    loop = (MEGATRON / "training" / "loop.py").read_text().lower()
    assert len(FEATURES) > 12
    for row in FEATURES:
        module = row.class_path.partition(":")[0].rpartition(".")[2]
        words = {module, row.flag.lstrip("-").replace("-", "_")} - {"", "callbacks", "feature"}  # which are words of the interface
        assert not [word for word in words if word in loop], row


def cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sets of names that import each other, by way of others or not."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: Mapping[str, Collection[str]]) -> list[str]:
        """What is reached from there and not seen before, in the order in which it is left."""
        left: list[str] = []
        stack = [(start, iter(edges[start]))]
        seen.add(start)
        while stack:
            name, rest = stack[-1]
            for other in rest:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(edges[other])))
                    break
            else:
                left.append(name)
                stack.pop()
        return left

    for name in graph:
        if name not in seen:
            order += visit(name, graph)
    reverse: dict[str, list[str]] = {name: [] for name in graph}
    for name, others in graph.items():
        for other in others:
            reverse[other].append(name)
    seen.clear()
    return [sorted(found) for name in reversed(order) if name not in seen and len(found := visit(name, reverse)) > 1]


def test_a_cycle_is_found() -> None:
    assert cycles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}) == [["b", "c"]]


IN_CYCLES: set[str] = set()
"""Packages whose modules still import each other."""


def test_no_modules_import_each_other() -> None:
    """Nor do packages; imports within functions count."""
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in [*FILES, *FILES_AROUND]}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        names = {name for name in imports(file) if name in modules}
        names |= {
            f"{node.module}.{alias.name}" for node in nodes(file) if isinstance(node, ast.ImportFrom) for alias in node.names
        } & {*modules}
        graph[module] = names - {module}
    found = cycles(graph)
    assert {".".join(name.split(".")[:2]) for cycle in found for name in cycle} == IN_CYCLES, found
    between: dict[str, set[str]] = {}
    for module, others in graph.items():
        if module.startswith("megatron_lab"):  # those of the core are in ABOVE
            package = ".".join(module.split(".")[:2])
            packages = {".".join(other.split(".")[:2]) for other in others if other.startswith("megatron_lab.")}
            between.setdefault(package, set()).update(packages - {package})
    assert not cycles(between)


def path_of(module: str) -> Path:
    """The file of a module."""
    return Path(*module.split(".")).with_suffix(".py")


def within(file: Path, files: set[Path]) -> bool:
    """Whether a file imports nothing of ours but these."""
    return all(path_of(module) in files for module in imports(file) if module.startswith("megatron"))


def test_spec_lies_between_the_settings_and_their_rules() -> None:
    """The spec reads the settings' dataclasses and nothing else; of the spec, these read only what reads no settings."""
    wrong = []
    below = {file for file in FILES if file.parts[1] == "spec"}
    while above := {file for file in below if not within(file, below)}:
        below -= above
    for file in FILES:
        module = ".".join(file.with_suffix("").parts)
        for imported in imports(file):
            if file.parts[1] == "spec" and imported.startswith("megatron.config") and imported not in SETTINGS:
                wrong.append(f"{file} imports {imported}")
            if module in SETTINGS and imported.startswith("megatron.spec") and path_of(imported) not in below:
                wrong.append(f"{file} imports {imported}, which reads settings")
    assert not wrong, "\n".join(wrong)


def test_pure_files_do_not_load_torch() -> None:
    """Not by way of others either; settings load no numpy."""
    modules = [file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for file in WITHOUT_TORCH]
    config = [module for module in modules if module.startswith("megatron.config")]
    code = (
        "import importlib, sys\n"
        f"for module in {config}: importlib.import_module(module)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'config loads one'\n"
        f"for module in {modules}: importlib.import_module(module)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_are_short() -> None:
    lengths = {str(file): count_code_lines((ROOT / file).read_text()) for file in IN_RUNS}
    assert not {file: length for file, length in lengths.items() if length > 340}


def test_count_code_lines() -> None:
    source = '"""A module\nin two lines."""\n\n# why\nx = [\n    1,  # one\n\n]\n"""Its meaning."""\ny = """a\nb"""\n'
    assert count_code_lines(source) == 2


def test_class_names_are_unique() -> None:
    """One word, one thing."""
    files: dict[str, list[str]] = {}
    for file in IN_RUNS:
        if file.parts[1] == "api":  # a facade, whose classes add to those of the same names
            continue
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(file))
    assert not {name: found for name, found in files.items() if len(found) > 1}


def defined_names(file: Path) -> Iterator[str]:
    """Names of the functions, classes, arguments, variables and attributes that a file defines."""
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_names_do_not_contain_words_that_contributing_replaces() -> None:
    rows = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    replaced = {word for cell in rows for word in re.findall(r"`(\w+)`", cell)}
    assert len(replaced) >= 15
    wrong = {
        f"{file}: {name}"
        for file in (*FILES, *FILES_AROUND)
        for name in defined_names(file)
        if replaced & {word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)}
    }
    assert not wrong, wrong


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each, those below attributes too."""
    for child in nodes(file):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            yield child.lineno, child.value.value.strip()


def test_docstrings_say_what_a_thing_is() -> None:
    """Not only what it belongs to: a reader who begins there would have to guess the noun."""
    found = [f"{file}:{line}" for file in IN_RUNS for line, text in docstrings(file) if text.startswith(("Of ", "Likewise"))]
    assert not found, f"begin with a noun at {found}"


def test_files_that_docstrings_name_exist() -> None:
    """A file that moves leaves no text behind that sends a reader to its old place."""
    folders = (MEGATRON, LAB, ROOT / "tools", ROOT / "tests")
    there = {path.name for folder in folders for path in folder.rglob("*.py")} | {path.name for path in ROOT.glob("*.py")}
    found = [
        f"{file}: {name}"
        for file in (*FILES, *FILES_AROUND)
        for name in re.findall(r"`[\w/]*?(\w+\.py)`", (ROOT / file).read_text())
        if name not in there
    ]
    assert not found, found


def calls(file: Path) -> Iterator[ast.Call]:
    """Every call."""
    return (child for child in nodes(file) if isinstance(child, ast.Call))


def names_a_device(argument: ast.expr) -> bool:
    """Whether it is a text such as "cuda:0"."""
    return (
        isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.split(":")[0] in ("cuda", "cpu")
    )


def test_no_device_is_hard_wired() -> None:
    """No `.cuda()`, no current device, no device by name, but where the device is chosen."""
    found = []
    for file in IN_RUNS:
        if file.parts[1] == "config" or str(file) == "megatron/parallel/context.py":
            continue
        for call in calls(file):
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if method == "replace":  # the name of a setting
                continue
            devices = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
            devices += call.args if method in ("to", "device") else []
            if method in ("cuda", "set_device", "current_device") or any(map(names_a_device, devices)):
                found.append(f"{file}:{call.lineno}")
    # The generator of a device that was given without a number is the current one's; a plan sorts documents on the host; and
    # --fsdp-params-cpu is asked to take host memory.
    allowed = {"megatron/parallel/random.py", "megatron_lab/planner/planned_inputs.py", "megatron/data_parallel/fsdp.py"}
    assert {place.rpartition(":")[0] for place in found} == allowed, found


def test_parallel_state_is_passed_on() -> None:
    """Ranks and world sizes are asked of the context; process groups are no globals of a module."""
    found = set()
    for file in IN_RUNS:
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr in ("get_rank", "get_world_size"):
                found.add(f"{file} {node.attr}")
            if isinstance(node, ast.Global) and file.parts[1] != "data":
                found.add(f"{file} global {', '.join(node.names)}")
    assert found == {
        "megatron/memory/recompute.py global _current_store",
        "megatron/memory/recompute.py global recomputing_region",
        "megatron/memory/recompute.py global _running_region",
        "megatron/parallel/accumulate.py global _deferred",
        "megatron/tensor_parallel/chunked_loss.py global _repeats",
        "megatron/training/failure.py get_world_size",  # when all is lost, the context too
    }


def test_the_groups_of_data_and_of_gradients_are_named() -> None:
    """Samples are cut among the data group, gradients summed over the gradient group: who writes the axes out confuses the two."""
    found = []
    for path in [*MEGATRON.rglob("*.py"), *LAB.rglob("*.py"), *ROOT.glob("*.py")]:
        if path == MEGATRON / "parallel" / "topology.py":
            continue
        for node in nodes(path.relative_to(ROOT)):
            written = node.elts if isinstance(node, ast.Tuple | ast.List) else node.args if isinstance(node, ast.Call) else []
            axes = [argument.value for argument in written if isinstance(argument, ast.Constant)]
            if axes in (["cp", "dp"], ["dp", "cp"], ["tp", "cp", "dp"]):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found, f"take GRADIENT_AXES or DATA_AXES of parallel/topology.py at {found}"


# ---- settings

_WORDS = "megatron/config/data.py"
READ_WITHIN = {
    "use_checkpoint_args": "megatron/config/cli.py",
    **dict.fromkeys(("data_args_path", "train_data_path", "test_data_path"), _WORDS),
}
"""Act while the settings are read, or are read by a function of that room."""


def last_name(node: ast.expr) -> str:
    """`b` of `a.b` and of `b`, without leading underscores."""
    return (node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "").lstrip("_")


def read_of_settings(file: Path) -> set[str]:
    """Names read as `config.name`, `training.name`, `self._optimizer.name`: of something called as a topic is."""
    topics = {"config", *(topic.name for topic in dataclasses.fields(Config))}
    attributes = (node for node in nodes(file) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if isinstance(node.ctx, ast.Load) and last_name(node.value) in topics}


def behind_properties(topic: type) -> dict[str, set[str]]:
    """For each property of a topic, the fields that it reads."""
    found = {}
    for name, value in (item for base in topic.__mro__ for item in vars(base).items()):
        if isinstance(value, property):
            body = ast.parse(textwrap.dedent(inspect.getsource(value.fget)))  # type: ignore[arg-type]
            found[name] = {
                node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute) and last_name(node.value) == "self"
            }
    return found


def test_every_setting_is_read_where_it_acts() -> None:
    """Outside the room of settings: no flag is accepted, printed and ignored."""
    used = set().union(
        *(read_of_settings(file) for file in [*FILES, *FILES_AROUND] if file.parts[1] != "config"),
        read_of_settings(Path("pretrain_gpt.py")),
    )
    used |= set(BUILT_IN_FIELDS)  # looked up by name, in the table of activations
    unread: list[str] = []
    for topic in dataclasses.fields(Config):
        settings = topic.default_factory
        assert isinstance(settings, type)
        behind = set().union(*(fields for name, fields in behind_properties(settings).items() if name in used))
        unread += [field.name for field in dataclasses.fields(settings) if field.name not in used | behind]
    assert set(unread) == {*READ_WITHIN}
    assert all(name in read_of_settings(Path(file)) for name, file in READ_WITHIN.items())


def test_nothing_waits_with_select() -> None:
    """`select.select` fails for file descriptors of 1,024 and more, which a process with many files has; `selectors` does not."""
    files = [*(ROOT / file for file in (*FILES, *FILES_AROUND)), *(ROOT / "tools").glob("*.py"), ROOT / "pretrain_gpt.py"]
    nodes = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    users = {file for file, node in nodes if isinstance(node, ast.Import) and "select" in [name.name for name in node.names]}
    users |= {file for file, node in nodes if isinstance(node, ast.ImportFrom) and node.module == "select"}
    assert not users
