"""The values of a whole adapter, and its report."""

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store.base_model import BaseModel
from adapter_store.conformance import ConformanceReport
from adapter_store.errors import AdapterFormatError
from tests.support.adapter_files import (
    PREFIX,
    Q0,
    V1,
    edit_adapter_config,
    edit_tensors,
    inspect_folder,
    load_tensors,
    refusal,
    set_tensor,
)
from tests.support.tiny_models import make_tiny_adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused(
    dtype: torch.dtype, value: float, adapter: Path, base: BaseModel
) -> None:
    key = f"{V1}.lora_B.weight"
    edit_tensors(adapter, lambda t: {k: v.to(dtype) for k, v in t.items()})
    assert not inspect_folder(adapter, base).report.no_op
    tensor = load_tensors(adapter)[key]
    tensor.view(-1)[-1] = value
    set_tensor(adapter, key, tensor)
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("not_finite", key)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]
)
def test_other_dtypes_are_refused(dtype: torch.dtype, adapter: Path, base: BaseModel) -> None:
    key = f"{Q0}.lora_A.weight"
    set_tensor(adapter, key, load_tensors(adapter)[key].to(dtype))
    error = refusal(adapter, base)
    assert (error.code, error.field) == ("unsupported_dtype", key)


def test_the_largest_and_smallest_finite_values_are_accepted(
    adapter: Path, base: BaseModel
) -> None:
    key = f"{Q0}.lora_B.weight"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        limits = torch.finfo(dtype)
        values = torch.tensor([limits.max, limits.min, limits.smallest_normal / 2, -0.0])
        set_tensor(adapter, key, values.to(dtype).repeat(32, 1))
        assert len(inspect_folder(adapter, base).bindings) == 4


@pytest.mark.parametrize(("side", "zero"), [("A", 0.0), ("B", 0.0), ("B", -0.0)])
def test_an_adapter_that_changes_nothing_says_so(
    side: str, zero: float, adapter: Path, base: BaseModel
) -> None:
    part = f"lora_{side}"
    edit_tensors(
        adapter,
        lambda t: {k: torch.full_like(v, zero) if part in k else v for k, v in t.items()},
    )
    report = inspect_folder(adapter, base).report
    assert report.no_op
    assert any("as the base does" in warning for warning in report.warnings)
    ones = torch.ones_like(load_tensors(adapter)[f"{V1}.{part}.weight"])
    set_tensor(adapter, f"{V1}.{part}.weight", ones)
    assert not inspect_folder(adapter, base).report.no_op


def test_a_file_without_lora_matrices_is_refused(adapter: Path, base: BaseModel) -> None:
    edit_tensors(adapter, lambda _: {})
    assert refusal(adapter, base).code == "no_tensors"
    key = f"{PREFIX}model.norm.weight"
    edit_tensors(adapter, lambda _: {key: torch.ones(32)})
    error = refusal(adapter, base)
    assert error.code == "no_modules_bound"
    assert key in error.message


def test_the_report_says_what_is_bound(base_dir: Path, base: BaseModel, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(
        tmp_path / "adapter",
        base_dir,
        target_modules=["q_proj", "up_proj"],
        r=4,
        alpha_pattern={"1.*up_proj": 2},
    )
    inspected = inspect_folder(adapter, base)
    report = inspected.report
    assert report.digest == inspected.digest
    assert [(m.module, m.layers, m.count, m.rank, m.scaling) for m in report.modules] == [
        ("mlp.up_proj", "1", 1, 4, 0.5),
        ("mlp.up_proj", "0", 1, 4, 4.0),
        ("self_attn.q_proj", "0-1", 2, 4, 4.0),
    ]
    assert report.scalings == [0.5, 4.0]
    assert report.dtypes == ["F32"]
    assert report.bytes == (adapter / "adapter_model.safetensors").stat().st_size
    assert report.base_match.same_name is True
    assert report.base_match.fingerprint == base.fingerprint
    assert msgspec.json.decode(msgspec.json.encode(report), type=ConformanceReport) == report
    edit_adapter_config(adapter, base_model_name_or_path="org/other-7b")
    assert inspect_folder(adapter, base).report.base_match.same_name is False


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_damage_is_refused_or_leaves_every_tensor_bound(
    data: st.DataObject, saved_adapter: Path, base: BaseModel, tmp_path: Path
) -> None:
    """Never another exception, never an adapter with nothing bound, never a key left aside."""
    config = bytearray((saved_adapter / "adapter_config.json").read_bytes())
    content = bytearray((saved_adapter / "adapter_model.safetensors").read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    target, limit = data.draw(
        st.sampled_from([(config, len(config)), (content, header_bytes), (content, len(content))])
    )
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, limit - 1))
        target[where : where + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    try:
        inspected = inspect_folder(tmp_path, base)
    except AdapterFormatError:
        return
    bound = {key for b in inspected.bindings for key in (b.a_key, b.b_key)}
    assert bound
    assert bound == load_tensors(tmp_path).keys()
