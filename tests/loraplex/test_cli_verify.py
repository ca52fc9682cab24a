"""`loraplex verify`: tells a served adapter from one that is not, and says what is missing."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from engine.models import projection
from engine.models.projections import ProjectionSpec
from lora_kernels import LoraSlice
from loraplex import verification
from loraplex.cli import main
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model, modules_of

TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("verify")
    base = make_tiny_model(folder / "base", "smollm")
    adapter = make_tiny_adapter(folder / "adapter", base, r=5, target_modules=TARGETS)
    return base, adapter


def verify(*arguments: object) -> Result:
    torch.set_num_threads(1)
    return CliRunner().invoke(main, ["verify", "--max-tokens", "4", *map(str, arguments)])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_served_adapter_passes_module_by_module_and_end_to_end(folders, kernels):
    base, adapter = folders
    result = verify(adapter, "--base", base, "--cpu-kernels", kernels, "--all")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    modules = [line for line in lines if line.startswith("model.layers.")]
    assert len(modules) == 3 * len(TARGETS) and all(line.endswith("ok") for line in modules)
    assert [line.split()[:2] for line in lines if line.startswith("prompt")] == [
        ["prompt", "1"], ["prompt", "2"], ["prompt", "3"],
    ]  # fmt: skip
    assert "is served exactly" in result.output


def test_what_is_done_is_said_first_and_then_the_worst_of_each_kind_and_the_verdict(folders):
    base, adapter = folders
    every = verify(adapter, "--base", base, "--all").stdout.splitlines()
    result = verify(adapter, "--base", base)
    assert result.stderr.startswith(f"Comparing {adapter} with PEFT, module by module ...\n")
    lines = result.stdout.splitlines()
    assert len(lines) == 6 and [line.endswith("ok") for line in lines[2:4]] == [True, True]
    rows = [line.split() for line in every if line.startswith("model.layers.")]
    module = lines[2].split()
    worst = max(max(float(row[2]), float(row[3])) for row in rows)
    assert max(float(module[2]), float(module[3])) == worst and lines[3].startswith("prompt ")
    assert lines[4] == "The worst of 12 modules and 3 replies; --all shows every one."
    assert lines[5] == f"{adapter} is served exactly."


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_lacks_a_file_is_a_sentence(folders, tmp_path, missing):
    base, adapter = folders
    for file in adapter.iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    result = verify(tmp_path, "--base", base)
    assert result.exit_code == 1
    assert result.stderr == f"Error: {tmp_path} is no PEFT adapter: it has no {missing}\n"


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
def test_adapters_of_every_kind_of_checkpoint_pass(family, tmp_path):
    base = make_tiny_model(tmp_path / "base", family)
    names = modules_of(family, TARGETS)
    adapter = make_tiny_adapter(tmp_path / "adapter", base, r=6, target_modules=names)
    result = verify(adapter, "--base", base, "--all")
    assert result.exit_code == 0, result.output
    modules = [line for line in result.output.splitlines() if line.startswith("model.layers.")]
    assert len(modules) == 3 * len(names) and all(line.endswith("ok") for line in modules)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "use_dora": True, "bias": "all"},
    ],
    ids=["both ends", "DoRA"],
)
def test_what_is_beside_lora_of_the_layers_passes_too(config, tmp_path):
    base = make_tiny_model(tmp_path / "base", "qwen2")
    adapter = make_tiny_adapter(tmp_path / "adapter", base, **config)
    result = verify(adapter, "--base", base, "--all")
    assert result.exit_code == 0, result.output
    found = [line.split()[0].rpartition(".")[2] for line in result.output.splitlines()]
    for module in config["target_modules"]:
        assert module in found


def test_the_base_is_taken_from_the_adapters_config(folders):
    base, adapter = folders
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert verify(adapter).exit_code == 0


def test_an_adapter_that_is_served_wrongly_fails_and_is_named(folders, monkeypatch):
    base, adapter = folders
    load = verification.BuiltRunner.load_adapter

    def slightly_wrong(self, digest, folder):
        weights = load(self, digest, folder)
        key, fused = next(item for item in weights.projections.items() if item[0].name == "down")
        part = fused.slice(0)
        weights.projections[key] = self.kernels.fuse(
            [LoraSlice(part.a, part.b, part.scaling * 1.01)], torch.float32
        )
        return weights

    monkeypatch.setattr(verification.BuiltRunner, "load_adapter", slightly_wrong)
    result = verify(adapter, "--base", base)
    assert result.exit_code == 1
    [wrong] = [line for line in result.output.splitlines() if line.endswith("TOO LARGE")][:1]
    assert wrong.startswith("model.layers.0.mlp.down_proj")
    assert " modules and 3 replies, of which " in result.output
    assert "NOT served exactly" in result.output


def test_rows_that_are_right_only_alone_fail(folders, monkeypatch):
    base, adapter = folders
    exact = projection.add_lora

    def mixes_up(y, x, table, batch):
        exact(y, x, table, batch)
        if batch.num_segments > 1:
            y[0] = y[1]

    monkeypatch.setattr(projection, "add_lora", mixes_up)
    result = verify(adapter, "--base", base)
    assert result.exit_code == 1 and "TOO LARGE" in result.output


def test_a_module_that_peft_does_not_have_is_not_passed_over(folders, monkeypatch):
    base, adapter = folders
    renamed = ProjectionSpec("down", ("mlp.other_proj",))
    real = verification.iter_projections

    def rename(*args):
        for key, spec in real(*args):
            yield key, renamed if spec.name == "down" else spec

    monkeypatch.setattr(verification, "iter_projections", rename)
    result = verify(adapter, "--base", base)
    assert result.exit_code == 1
    assert "model.layers.0.mlp.down_proj" in result.output


def test_a_reply_that_goes_past_the_served_context_is_refused(folders):
    base, adapter = folders
    result = verify(adapter, "--base", base, "--max-tokens", 512)
    assert result.exit_code == 1
    assert "prompt 1 has " in result.output and "more than the 512" in result.output
    assert "--max-tokens" in result.output


def test_without_peft_the_fix_is_named(folders, monkeypatch):
    base, adapter = folders
    monkeypatch.setitem(sys.modules, "peft", None)
    result = verify(adapter, "--base", base)
    assert result.exit_code == 1
    assert "pip install 'loraplex[train]'" in result.output
    assert ".venv/bin/python -m pip install -c constraints.txt -e '.[train]'" in result.output


def test_an_adapter_of_another_base_is_refused(folders, tmp_path):
    _, adapter = folders
    other = make_tiny_model(tmp_path / "other", "llama")
    result = verify(adapter, "--base", other)
    assert result.exit_code == 1 and "Error" in result.output


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": ""}'])
def test_a_config_that_names_no_base_asks_for_it(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    (tmp_path / "adapter_model.safetensors").touch()
    result = verify(tmp_path)
    assert result.exit_code == 1
    assert "give --base" in result.output


def test_a_folder_without_weights_is_no_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    result = verify(tmp_path)
    assert result.exit_code == 1
    assert "it has no adapter_model.safetensors" in result.output


def test_a_base_that_is_not_there_is_an_error(folders):
    _, adapter = folders
    result = verify(adapter, "--base", "/nowhere/at/all")
    assert result.exit_code == 1
    assert "--base /nowhere/at/all" in result.output


def test_a_base_that_only_the_config_names_is_said_to_come_from_there(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/absent"}')
    (tmp_path / "adapter_model.safetensors").touch()

    def no_hub(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    result = verify(tmp_path)
    assert result.exit_code == 1 and "--base org/absent" not in result.output
    assert result.output.strip() == (
        f"Error: org/absent (the base that {tmp_path}/adapter_config.json names) cannot be fetched "
        "from the hub: no network. Give --base DIR"
    )
    assert "--base org/absent cannot be fetched" in verify(tmp_path, "--base", "org/absent").output
