import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from lora_kernels.compile_report import DTYPES, all_cases
from lora_kernels.ptx_access import read_accesses
from lora_kernels.tiles import ARCHITECTURES, VARIANTS

ROOT = Path(__file__).parents[2]
SOURCE = """\
def kernel():
    rank = tl.load(record_ptr)
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    tl.store(p_y, b_y, mask=m_y)
    b_t = tl.load(p_t)
"""


@pytest.fixture
def ptx(tmp_path: Path) -> str:
    source = tmp_path / "kernel.py"
    source.write_text(SOURCE)
    return f"""
    .loc 1 2 11
    ld.global.b32 {{ %r1 }}, [ %rd1 + 0 ];
    .loc 1 3 11
    // begin inline asm
    .loc 1 3 11
    mov.u32 %r2, 0x0;
    .loc 1 4 11
    @%p1 ld.global.v4.b32 {{ %r2, %r3, %r4, %r5 }}, [ %rd2 + 0 ];
    // end inline asm
    // begin inline asm
    .loc 1 3 11
    cp.async.cg.shared.global [ %r39 + 0 ], [ %rd21 + 0 ], 0x10, %r40;
    // end inline asm
    .loc 1 3 11
    cp.async.ca.shared.global [ %r39 + 0 ], [ %rd21 + 0 ], 0x4, %r40;
    ld.global.L1::evict_first.v2.b16 {{ %rs1, %rs2 }}, [ %rd2 + 0 ];
    .loc 1 4 5, function_name $L__info_string0, inlined_at 1 3 11
    st.global.v2.b32 [ %rd3 + 0 ], {{ %r2, %r3 }};
    .loc 1 5 5
    ld.global.v8.b32 {{ %r2, %r3, %r4, %r5, %r6, %r7, %r8, %r9 }}, [ %rd2 + 0 ];
    ld.shared.v4.b32 {{ %r2, %r3, %r4, %r5 }}, [ %rd2 + 0 ];
    .file 1 "{source}"
    """


def test_accesses_are_traced_to_the_array_that_they_touch(ptx):
    found = [(access.name, access.num_bytes) for access in read_accesses(ptx)]
    assert found == [("x", 16), ("x", 16), ("x", 4), ("x", 4), ("y", 8), ("t", 32)]


def test_the_report_covers_every_variant_dtype_and_architecture():
    covered = {
        (case.variant, case.dtype, case.architecture) for case in all_cases() if case.aligned
    }
    assert covered == set(product(VARIANTS, DTYPES, ARCHITECTURES))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_kernel_spills_or_moves_less_than_it_can_under_either_triton():
    report = subprocess.run(
        [sys.executable, "scripts/kernels_report.py", "lora_kernels.compile_report"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert report.returncode == 0, report.stdout + report.stderr
    assert report.stdout.count(" 0 faults") == 2
    assert "triton 3.6.0" in report.stdout
    for kernel, architecture in product(
        ("sgmv_shrink", "sgmv_expand", "bgmv_shrink", "bgmv_expand"), ARCHITECTURES
    ):
        rows = [
            line
            for line in report.stdout.splitlines()
            if line.startswith(f"| {kernel} |") and f"| sm_{architecture} |" in line
        ]
        assert len(rows) > 2 * len(DTYPES)
