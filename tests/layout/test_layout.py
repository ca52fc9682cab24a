"""The shape of the repository: what may exist, what may import what, what a wheel carries."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = {
    "adapter_store": ROOT / "adapter_store",
    "engine": ROOT / "engine",
    "lora_kernels": ROOT / "lora_kernels",
    "loraplex": ROOT / "platform" / "loraplex",
}
MAY_IMPORT = {
    "lora_kernels": {"lora_kernels"},
    "adapter_store": {"adapter_store"},
    "engine": {"engine", "lora_kernels", "adapter_store"},
    "loraplex": set(SOURCE),
}
# What the engine may take from the store: plain types and the PEFT format, never SQL or blobs.
ENGINE_MAY_USE = {
    "adapter_store.base_model",
    "adapter_store.digest",
    "adapter_store.errors",
    "adapter_store.peft_config",
    "adapter_store.peft_format",
    "adapter_store.safetensors_header",
}

# Packages of the engine that decide, and those that compute.
WITHOUT_TENSORS = ("adapters", "scheduling", "simulation", "telemetry", "text", "transport")
WITH_TENSORS = (
    "engine.device", "engine.models", "engine.ops", "engine.quantization", "engine.runner.",
    "engine.triton",
)  # fmt: skip


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


def source_files() -> list[tuple[str, Path]]:
    return [(name, path) for name, root in SOURCE.items() for path in sorted(root.rglob("*.py"))]


def test_platform_is_a_plain_folder_that_does_not_shadow_the_standard_library():
    assert not (ROOT / "platform" / "__init__.py").exists()
    subprocess.run(  # from the root, where a shadowing package would be found first
        [sys.executable, "-c", "import platform; platform.system()"], cwd=ROOT, check=True
    )


def test_imports_point_in_one_direction():
    wrong: list[str] = []
    for package, path in source_files():
        for module in imported_modules(path):
            top = module.split(".")[0]
            if top in SOURCE and top not in MAY_IMPORT[package]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
            if package == "engine" and top == "adapter_store" and module not in ENGINE_MAY_USE:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_the_engine_decides_without_tensors():
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for package in WITHOUT_TENSORS
        for path in sorted((ROOT / "engine" / package).rglob("*.py"))
        for module in imported_modules(path)
        if module.split(".")[0] == "torch" or module.startswith(WITH_TENSORS)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["engine.core", "engine.client", "engine.text.tokenizer", "loraplex.app"]
)
def test_scheduler_and_service_do_not_load_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "PATH": "/usr/bin:/bin"},
        check=True,
    )


def test_the_explicit_package_list_equals_the_tree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join((name, *path.parent.relative_to(root).parts))
        for name, root in SOURCE.items()
        for path in root.rglob("*.py")
    }
    found |= {"loraplex.migrations", "loraplex.migrations.versions"}
    assert set(declared["packages"]) == found


def test_every_package_folder_has_an_init():
    folders = {path.parent for _, path in source_files()}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


def test_no_source_file_holds_two_nouns():
    long = {
        str(path.relative_to(ROOT)): lines
        for _, path in source_files()
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_nothing_opens_a_pickle():
    banned = ("torch.load(", "import pickle", "pickle.load", "yaml.load(", "shell=True")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for _, path in source_files()
        for word in banned
        if word in path.read_text()
    ]
    assert found == []
