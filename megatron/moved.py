"""Former names of modules: an import by one gives the module of today, and warns with its name.

`MOVED` lists the modules. A former package of `megatron` is a small file beside this one, since nothing of ours runs before
it is imported. A package that remains calls `find_moved` in its `__init__.py`, for the modules that it has lost.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

_MODULES = {
    ("megatron", "megatron_lab"): "audit flight inference planner proofs resilience verification",
    ("megatron.checkpoint", "megatron_lab.foreign"): (
        "adapters as_used dist_buffers dist_checkpoint distcp_files flat_buffers folded_source huggingface inert_pickle "
        "legacy_checkpoint legacy_files legacy_optimizer legacy_settings megatron_source source torch_file"
    ),
    ("megatron.checkpoint", "megatron_lab.node_memory"): "keeper node_link node_storage",
    ("megatron.data", "megatron_lab.data_tools"): "megatron_order preprocess",
    ("megatron.data", "megatron_lab"): "tokenizers",
    ("megatron.training", "megatron_lab.monitoring"): (
        "compilation compiler_facts goodput live_lines loss_picture memory_report out_of_memory plan_report profiler rehearsal"
    ),
    ("megatron.training", "megatron_lab.flight"): "stragglers",
    ("megatron.training", "megatron_lab.node_memory"): "kept_state",
    ("megatron.data_parallel", "megatron_lab.planner"): "passing state_layout",
    ("megatron.optimizer", "megatron_lab.planner"): "state_size",
    ("megatron.parallel", "megatron_lab.monitoring"): "forks",
    ("megatron.metrics", "megatron_lab.monitoring"): "loggers run_warnings",
    ("megatron.training", "megatron_lab.audit"): "nonfinite sentinel",
    ("megatron.training", "megatron_lab.resilience"): "ahead rewind spikes",
    ("megatron.config", "megatron_lab.migration"): "compat",
    ("megatron.checkpoint", "megatron_lab.migration"): "checkpoint_args",
}
"""Former and present package of modules that have kept their names, packages among them."""
_JOINED = {
    "megatron.config": "lora>model experts>model speed>precision batch_steps>training layer_costs>pipeline_layout "
    "module_start>launcher",
    "megatron.context_parallel": "travel>attention",
    "megatron.checkpoint": "agreement>savers content_sums>manifest",
    "megatron.data": "loss_mask>indexed_dataset mock>samples order>samples pieces>windows packed_dataset>gpt_dataset "
    "index_cache>indexed_writer",
    "megatron.data_parallel": "frozen>buckets",
    "megatron.memory": "kept>recompute",
    "megatron.metrics": "output>log_line timers>measures device_peaks>measures",
    "megatron.model": "init>build dropout>block treatment>block shared_heads>all_heads_norm",
    "megatron.moe": "capacity>dispatch choice>balance",
    "megatron.optimizer": "norms>statistics matrix_exchange>matrix_plan qk_clip>matrices elementwise>rules",
    "megatron.parallel": "backends>context shards>params scope>params",
    "megatron.pipeline_parallel": "returns>executor queues>exchange",
    "megatron.precision": "formats>fp8_products scaling>fp8_products scaled_product>fp8_products device>products",
    "megatron.spec": "registered>activations",
    "megatron.tensor_parallel": "embedding>layers",
    "megatron.training": "lost_contact>failure effective_model>resume own_metrics>watch attention_kernel>startup "
    "saved_schedule>progress life>signals",
}
"""By package the modules that are a part of another one now."""
MOVED = {f"{old}.{name}": f"{new}.{name}" for (old, new), names in _MODULES.items() for name in names.split()} | {
    "megatron.training.foreign_run": "megatron_lab.foreign.runs",
    "megatron.context_parallel.cost": "megatron_lab.planner.context_cost",
    "megatron.config.help": "megatron_lab.pages.flag_help",
    "megatron.data.tokenizers.tokenizer": "megatron.data.tokenizer",
    "megatron.data.tokenizers.simple_tokenizers": "megatron.data.tokenizer",
    "megatron.parallel.turns": "megatron.tensor_parallel.chunked_loss",
    "megatron.parallel.vectors": "megatron.tensor_parallel.layers",
    "megatron.training.model_norms": "megatron_lab.monitoring.norms",
    "megatron.optimizer.lr_schedule": "megatron.training.progress",
    "megatron.model.norms": "megatron.tensor_parallel.layers",
    "megatron.model.output_layer": "megatron.tensor_parallel.cross_entropy",
}
for _package, _names in _JOINED.items():
    MOVED |= {f"{_package}.{old}": f"{_package}.{new}" for old, new in (pair.split(">") for pair in _names.split())}
"""The name of today for each former one. What lies within a package moves with it."""


def name_today(name: str) -> str | None:
    """Return the name of today for a former one, and None for all others."""
    moved = name
    while moved not in MOVED:
        moved, dot, _ = moved.rpartition(".")
        if not dot:
            return None
    return MOVED[moved] + name.removeprefix(moved)


def find_moved() -> None:
    """Have imports find modules by their former names from now on."""
    if _FINDER not in sys.meta_path:
        # First: later finders would look in the folder of a package of today, and load a second copy of a module in it.
        sys.meta_path.insert(0, _FINDER)


def take_place(name: str) -> None:
    """Put the module of today in the place of a former one, which is being imported, and warn the file that imports it."""
    find_moved()
    today = name_today(name)
    assert today is not None, name
    warnings.warn(_words(name, today), DeprecationWarning, stacklevel=3)  # the caller's caller; Python leaves out its own frames
    sys.modules[name] = importlib.import_module(today)


def _words(name: str, today: str) -> str:
    return f"{name} has moved: use {today}"


def _spec_today(name: str) -> ModuleSpec | None:
    """The spec of the module of today, if there is one for this former name."""
    today = name_today(name)
    if today is None:
        return None
    from importlib.util import find_spec  # here, since a normal start needs none of it

    return find_spec(today)


class _Finder:
    """Finds and loads modules by their former names: `importlib.abc.MetaPathFinder` and `Loader`, whose import takes 5 ms."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to import a former name, and None for all others and for modules that never were."""
        today = _spec_today(name)
        if today is None:
            return None
        spec = ModuleSpec(name, self, origin=today.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = today.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the module of today in place of `module`."""
        take_place(module.__name__)

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the module of today, for `python -m`, and warn whoever has typed that."""
        today = _spec_today(name)
        if today is None or today.loader is None:
            raise ImportError(f"there is no code of {name}")
        warnings.warn_explicit(_words(name, today.name), DeprecationWarning, f"python -m {name}", 1, "__main__")
        code: CodeType | None = today.loader.get_code(today.name)  # type: ignore[attr-defined]
        return code


_FINDER = _Finder()
