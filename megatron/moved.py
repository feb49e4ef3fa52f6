"""Former names of modules. An import by a former name returns the current module, and warns with its current name.

`NEW_NAMES` lists the modules. A former package of `megatron` is a small file next to this one, because no other code of the project
runs before it is imported. A package that still exists calls `find_moved` in its `__init__.py` for the modules that have left it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

_MOVED_MODULES = {
    ("megatron", "megatron_lab"): "audit flight inference planner proofs resilience verification",
    ("megatron.checkpoint", "megatron_lab.foreign"): (
        "adapters dist_buffers dist_checkpoint distcp_files flat_buffers huggingface inert_pickle "
        "legacy_checkpoint legacy_files legacy_optimizer legacy_settings megatron_source source torch_file"
    ),
    ("megatron.checkpoint", "megatron_lab.node_memory"): "keeper node_link node_storage",
    ("megatron.data", "megatron_lab.data_tools"): "megatron_order preprocess",
    ("megatron.data", "megatron_lab"): "tokenizers",
    ("megatron.training", "megatron_lab.monitoring"): (
        "compilation goodput live_lines loss_picture memory_report out_of_memory plan_report profiler rehearsal"
    ),
    ("megatron.training", "megatron_lab.flight"): "stragglers",
    ("megatron.data_parallel", "megatron_lab.planner"): "state_layout",
    ("megatron.optimizer", "megatron_lab.planner"): "state_size",
    ("megatron.parallel", "megatron_lab.monitoring"): "forks",
    ("megatron.metrics", "megatron_lab.monitoring"): "loggers run_warnings",
    ("megatron.training", "megatron_lab.audit"): "nonfinite sentinel",
    ("megatron.training", "megatron_lab.resilience"): "rewind spikes",
    ("megatron.config", "megatron_lab.migration"): "compat",
    ("megatron.checkpoint", "megatron_lab.migration"): "checkpoint_args",
}
"""Modules that kept their names and moved to another package, by (former package, current package). Some of them are
packages."""
_MERGED_MODULES = {
    "megatron.config": "lora>model experts>model speed>precision batch_steps>training layer_costs>pipeline_layout "
    "module_start>launcher given>parsed_flags settle>resolve extras>optional_packages",
    "megatron.config.checks": "each>single_settings",
    "megatron.attention": "parts>range_pairs flash_parts>flash_range_pairs largest>max_logits",
    "megatron.context_parallel": "travel>attention",
    "megatron.checkpoint": "agreement>savers content_sums>manifest rank_parts>save_plan folder_kinds>folder_types "
    "storage_kinds>storage_url owner>heartbeat",
    "megatron.data": "loss_mask>indexed_dataset mock>samples order>samples pieces>windows packed_dataset>gpt_dataset "
    "index_cache>indexed_writer",
    "megatron.data_parallel": "frozen>buckets",
    "megatron.memory": "kept>recompute host>host_buffers",
    "megatron.metrics": "output>log_line timers>measures device_peaks>measures",
    "megatron.model": "init>build dropout>block treatment>block shared_heads>all_heads_norm",
    "megatron.moe": "capacity>dispatch choice>balance",
    "megatron.optimizer": "norms>statistics matrix_exchange>matrix_plan qk_clip>matrices elementwise>rules",
    "megatron.parallel": "backends>context shards>params scope>params boxes>tensor_slice cut>sequence_split meeting>rendezvous "
    "products>matmul",
    "megatron.pipeline_parallel": "returns>executor queues>exchange",
    "megatron.precision": "formats>fp8_gemms scaling>fp8_gemms scaled_product>fp8_gemms device>gemms products>gemms "
    "fp8_products>fp8_gemms",
    "megatron.spec": "registered>activations",
    "megatron.tensor_parallel": "embedding>layers",
    "megatron.training": "lost_contact>failure effective_model>resume own_metrics>callbacks watch>callbacks "
    "attention_kernel>startup saved_schedule>progress life>signals",
}
"""Modules that were merged into other modules or renamed within their package, by package, as `former>current`."""
NEW_NAMES = {f"{old}.{name}": f"{new}.{name}" for (old, new), names in _MOVED_MODULES.items() for name in names.split()} | {
    "megatron.training.foreign_run": "megatron_lab.foreign.runs",
    "megatron.checkpoint.as_used": "megatron_lab.foreign.inference_source",
    "megatron.checkpoint.folded_source": "megatron_lab.foreign.mup_folding",
    "megatron.training.compiler_facts": "megatron_lab.monitoring.compiler_inputs",
    "megatron.training.kept_state": "megatron_lab.node_memory.node_memory",
    "megatron.training.ahead": "megatron_lab.resilience.resume_check",
    "megatron.data_parallel.passing": "megatron_lab.planner.transient_buffers",
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
"""Current name of each former name. Submodules of a moved package move with it."""
for _package, _names in _MERGED_MODULES.items():
    NEW_NAMES |= {f"{_package}.{old}": f"{_package}.{new}" for old, new in (pair.split(">") for pair in _names.split())}


def find_new_name(name: str) -> str | None:
    """Return the current name of a moved module. Return None if `name` is not a former name."""
    prefix = name
    while prefix not in NEW_NAMES:
        prefix, dot, _ = prefix.rpartition(".")
        if not dot:
            return None
    return NEW_NAMES[prefix] + name.removeprefix(prefix)


def find_moved() -> None:
    """Install an import hook, so that moved modules can be imported by their former names."""
    if _FINDER not in sys.meta_path:
        # Insert it first: the standard finders would load a second copy of a module from the folder of a current package.
        sys.meta_path.insert(0, _FINDER)


def take_place(name: str) -> None:
    """Let the import of a former module name return the current module. The importing file gets a DeprecationWarning.

    Args:
        name: former name, under which Python is importing the calling module.
    """
    find_moved()
    new_name = find_new_name(name)
    assert new_name is not None, name
    # Level 3 is the importing file: Python does not count the frames of importlib.
    warnings.warn(_format_warning(name, new_name), DeprecationWarning, stacklevel=3)
    sys.modules[name] = importlib.import_module(new_name)


def _format_warning(name: str, new_name: str) -> str:
    return f"{name} has moved: use {new_name}"


def _find_new_spec(name: str) -> ModuleSpec | None:
    """Return the import spec of the module that has replaced the module `name`. Return None if `name` is not a former name."""
    new_name = find_new_name(name)
    if new_name is None:
        return None
    from importlib.util import find_spec  # imported here, because a normal start does not need it

    return find_spec(new_name)


class _Finder:
    """Finder and loader of modules by their former names. It has the methods of `MetaPathFinder` and `Loader` of `importlib.abc`,
    but does not derive from them, because importing `importlib.abc` takes 5 ms."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return an import spec with this loader if `name` is a former name. Return None for other names, and if no current module
        exists."""
        new_spec = _find_new_spec(name)
        if new_spec is None:
            return None
        spec = ModuleSpec(name, self, origin=new_spec.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = new_spec.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python creates an empty module. `exec_module` then replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the module under its new name, and put it into `sys.modules` in place of `module`, the empty module of the former
        name."""
        take_place(module.__name__)

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the current module and warn about the former name. Python calls this method for `python -m
        FORMER_NAME`."""
        new_spec = _find_new_spec(name)
        if new_spec is None or new_spec.loader is None:
            raise ImportError(
                f"python -m {name}: the module that had this name no longer exists. Run the script for your task in the folder "
                "tools/ "
                "instead; each script describes itself with --help."
            )
        warnings.warn_explicit(_format_warning(name, new_spec.name), DeprecationWarning, f"python -m {name}", 1, "__main__")
        code: CodeType | None = new_spec.loader.get_code(new_spec.name)  # type: ignore[attr-defined]
        return code


_FINDER = _Finder()
