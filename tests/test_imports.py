"""Who may import what: the table of the architecture, checked against the source itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("harness", "workloads", "gates", "reports")

# The floors of the project, lowest first. A module imports from floors below its own, its own
# package, and of what lies below only what TABLE names.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("harness", "harness.errors", "harness.interrupts", "harness.records", "harness.stats"),
    ("harness.verdicts",),
    ("harness.connector", "harness.placement", "harness.sim", "workloads"),
    ("harness.campaign", "harness.collectors", "harness.tier", "reports"),
    ("harness.evidence", "harness.load", "harness.server"),
    ("harness.analysis",),
    ("harness.judge",),
    ("harness.run",),
    ("harness.cli",),
    ("gates", "harness.__main__"),
)
VALUES = {"harness.records", "harness.verdicts", "harness.errors", "harness.stats"}

# Package, or a module that differs from its package -> what it may import of ours, and of others.
# The longest name that fits counts. A package in a set allows all its modules.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "harness": (set(), set()),
    "harness.errors": (set(), set()),
    "harness.interrupts": (set(), set()),
    "harness.stats": (set(), set()),
    "harness.records": (set(), set()),
    "harness.verdicts": ({"harness.records"}, set()),
    "workloads": ({"harness.records"}, {"numpy"}),
    "harness.sim": ({"harness.records"}, set()),
    "harness.connector": (set(), {"vllm", "torch", "transformers", "numpy", "huggingface_hub"}),
    "harness.connector.peer": (
        {"harness.connector.device", "harness.connector.layout", "harness.connector.peer_copy"},
        {"vllm", "numpy"},
    ),
    "harness.connector.peer_copy": ({"harness.connector.layout"}, set()),
    "harness.connector.blockfile": (set(), {"xxhash"}),
    "harness.connector.budget": (set(), set()),
    "harness.connector.keys": ({"harness.connector.blockfile"}, set()),
    "harness.placement": ({"harness.errors", "harness.records", "harness.stats"}, set()),
    "harness.campaign": (VALUES | {"harness.placement", "harness.sim.config"}, {"pydantic"}),
    "harness.campaign.generated_model": (set(), {"numpy"}),
    "harness.collectors": ({"harness.records"}, {"httpx", "psutil", "prometheus_client"}),
    "harness.tier": (
        {
            "harness.connector",  # the empty package itself
            "harness.connector.blockfile",
            "harness.connector.directories",
            "harness.connector.keys",
            "harness.connector.partial_files",
            "harness.connector.quota",
            "harness.errors",
        },
        set(),
    ),
    "reports": ({"harness.records", "harness.verdicts"}, {"jinja2", "matplotlib", "rich"}),
    "harness.evidence": (VALUES | {"harness", "harness.campaign"}, {"numpy", "pydantic"}),
    "harness.load": (VALUES | {"workloads.prompts"}, set()),
    "harness.load.locustfile": (
        {"harness.records", "harness.load"},
        {"locust", "gevent", "geventhttpclient"},
    ),
    "harness.server": (
        {
            "harness.campaign.arms",
            "harness.errors",
            "harness.records",
            "harness.collectors",
            "harness.interrupts",
        },
        {"httpx", "psutil"},
    ),
    "harness.server.supervisor": (set(), set()),
    "harness.analysis": (
        VALUES - {"harness.errors"}
        | {"harness.campaign", "harness.evidence.store", "workloads.cold_recovery"},
        set(),
    ),
    "harness.judge": (
        VALUES - {"harness.errors"} | {"harness.analysis", "harness.campaign"},
        set(),
    ),
    "harness.run": (
        VALUES
        | {
            "harness",  # its version
            "harness.analysis",
            "harness.campaign",
            "harness.collectors",
            "harness.connector",  # the empty package itself
            "harness.connector.budget",
            "harness.connector.config",
            "harness.evidence",
            "harness.interrupts",
            "harness.judge",
            "harness.load",
            "harness.server",
            "workloads",
        },
        {"httpx", "psutil"},
    ),
    "harness.run.controls": (
        {
            "harness.connector",  # the empty package itself
            "harness.connector.blockfile",
            "harness.connector.keys",
            "workloads.cold_recovery",
        },
        {"numpy"},
    ),
    "harness.cli": (
        VALUES
        | {
            "harness",
            "harness.analysis.measures",
            "harness.campaign",
            "harness.evidence",
            "harness.interrupts",
            "harness.judge.causes",
            "harness.judge.power",
            "harness.placement",
            "harness.run",
            "harness.server.environment",
            "harness.tier",
            "reports",
        },
        {"rich"},
    ),
    "harness.__main__": ({"harness.cli.main"}, set()),
    "gates": (
        VALUES
        | {
            "harness.campaign",
            "harness.cli.console",
            "harness.evidence",
            "harness.judge.signoff",
            "harness.run",
            "reports",
        },
        {"pytest", "rich"},
    ),
}
# A package's row allows its modules as well, except where only the named ones are meant.
EXACT = {"harness", "harness.connector"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions; names of ours are made whole."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else str(node.module)


def covers(allowed: str, module: str) -> bool:
    return module == allowed or (allowed not in EXACT and module.startswith(allowed + "."))


def row_of(module: str) -> str:
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next(name for name in names if name in TABLE)


def own_package(module: str) -> str:
    """The package whose modules belong together: harness.load, reports, ..."""
    row = row_of(module)
    return row if (ROOT / row.replace(".", "/")).is_dir() and row != "harness" else module


def bad_edges(module: str) -> list[str]:
    ours, others = TABLE[row_of(module)]
    found = []
    for line, imported in imports_of(MODULES[module]):
        top = imported.split(".")[0]
        if top in OURS:
            inside = imported.startswith(own_package(module) + ".") or imported == module
            fine = inside or any(covers(name, imported) for name in ours)
        else:
            fine = top in sys.stdlib_module_names or top in others
        if not fine:
            found.append(f"{MODULES[module].relative_to(ROOT)}:{line}: {imported}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_the_table_allows(module: str) -> None:
    assert bad_edges(module) == []


def floor_of(module: str) -> tuple[int, str]:
    """Number of the floor, from below, and the package that stands on it."""
    fitting = [
        (len(name), level, name)
        for level, floor in enumerate(FLOORS)
        for name in floor
        if f"{module}.".startswith(f"{name}.")
    ]
    return max(fitting)[1:]


def test_the_table_only_leads_down() -> None:
    up = []
    for row, (ours, _others) in TABLE.items():
        own_floor, package = floor_of(row)
        for imported in ours:
            floor, other = floor_of(imported)
            if floor >= own_floor and other != package:
                up.append(f"{row} -> {imported}")
    assert up == []


def test_no_module_stands_beside_the_packages() -> None:
    assert {m for m in MODULES if m.count(".") == 1 and m.startswith("harness.")} == {
        name for floor in FLOORS for name in floor if name.startswith("harness.")
    }


def test_every_row_of_the_table_has_a_module() -> None:
    assert [row for row in TABLE if row not in MODULES] == []


def test_a_new_top_level_module_needs_a_row() -> None:
    single = [m for m in MODULES if m.count(".") == 1 and m.startswith("harness.")]
    assert [module for module in single if row_of(module) == "harness"] == []


def test_only_the_locustfile_imports_locust() -> None:
    patched = {"locust", "gevent", "geventhttpclient"}
    assert {
        module
        for module, path in MODULES.items()
        for _line, imported in imports_of(path)
        if imported.split(".")[0] in patched
    } == {"harness.load.locustfile"}


def test_nothing_of_ours_imports_tests() -> None:
    for path in MODULES.values():
        assert "tests" not in {name.split(".")[0] for _line, name in imports_of(path)}


def test_a_forbidden_edge_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "signoff.py"
    bad.write_text("def f():\n    from harness.judge.signoff import judge_run\n    import vllm\n")
    monkeypatch.setitem(MODULES, "reports.signoff", bad)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert bad_edges("reports.signoff") == [
        "signoff.py:2: harness.judge.signoff",
        "signoff.py:3: vllm",
    ]


@pytest.mark.parametrize("module", ["harness.cli.main", "gates.conftest", "reports.signoff"])
def test_importing_loads_no_patching_library(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print(sorted({'locust', 'gevent', 'vllm', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout == "[]\n"


@pytest.mark.parametrize(
    "module", ["harness.connector.blockfile", "harness.connector.budget", "harness.connector.keys"]
)
def test_the_file_format_needs_the_standard_library_only(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'vllm', 'torch', 'numpy'}} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout == "[]\n"
