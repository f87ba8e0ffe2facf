"""Each of the three files that people take away works alone, in an empty folder."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

LIB = Path(__file__).parents[1] / "lib"
COPIES = """
from copies import CopyPlan, ReplayCopies, StaticInput, grouped_foreach_copy_
a, b = dsts = [torch.zeros(4, dtype=torch.int64), torch.zeros(4)]
one, other = torch.ones(2, 4, dtype=torch.int64)
plan = CopyPlan(dsts, [torch.int64] * 2, ["a", "b"])
for copy in (lambda srcs: grouped_foreach_copy_(dsts, srcs, ["a", "b"]), plan):
    copy([one + 1, other + 1])
    for bad in (None, [1, 2, 3, 4], other[:2], other.to("meta")):
        with pytest.raises(ValueError, match="^b: expected"):
            copy([one, bad])
    assert all(dst.eq(2).all() for dst in dsts)
    copy([one, other])
section = ReplayCopies({"a": StaticInput(a, pad=7), "b": StaticInput(b, required=False)})
section({"a": one[:3], "b": None}, 3, 4)
assert a.tolist() == [1, 1, 1, 7]
"""
FUSED = """
from fused import FusedLaunch, describe
dst, src = torch.zeros(4, dtype=torch.int32), torch.arange(4)
launch = FusedLaunch([dst], [src])
assert describe(dst, src) is not None and launch.fits([src])
triton, sys.modules["triton"] = sys.modules.pop("triton", None), None
with pytest.raises(ImportError, match="^FusedLaunch needs Triton: pip install triton$"):
    launch([src])
del sys.modules["triton"]
if HAS_TRITON:
    launch([src])
    assert dst.tolist() == [0, 1, 2, 3]
"""
PACKED = """
from packed import PackedInputs
packed = PackedInputs({"a": ((3,), torch.int64, 9)}, "cpu")
with packed.step() as host:
    host["a"][0] = 1
assert packed.device["a"].tolist() == [1, 9, 9]
"""


def test_each_file_works_alone_in_an_empty_folder(tmp_path):
    """In one process, for the time that torch takes to import; each from a folder that holds it alone."""
    code = f"import sys, pytest, torch\nsys.modules['lib'] = None\nHAS_TRITON = {bool(find_spec('triton'))}"
    for name, use in (("copies", COPIES), ("fused", FUSED), ("packed", PACKED)):
        (tmp_path / name).mkdir()
        shutil.copy(LIB / f"{name}.py", tmp_path / name)
        code += f"\nsys.path.insert(0, {str(tmp_path / name)!r}){use}"
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
