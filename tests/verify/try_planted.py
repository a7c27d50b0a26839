import sys, tempfile, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from planted import FAULTS, MARK
from lockstep.launch import Script
from lockstep.verify import VerifyPlan, report, verify
names = sys.argv[1:] or list(FAULTS)
for name in names:
    fault = FAULTS[name]
    text = fault.script()
    with tempfile.TemporaryDirectory() as d:
        path = Path(d, "train.py"); path.write_text(text)
        right = [n for n, l in enumerate(text.splitlines(), 1) if MARK in l]
        t=time.monotonic()
        try:
            result = verify(VerifyPlan(Script(str(path))))
        except Exception as e:
            print(f"## {name}: ERROR {e}", flush=True); continue
    hits = [w for w in result.differing if fault.varies in w.way]
    ok = any(w.line in right and fault.what in w.what + w.module for w in hits)
    print(f"## {name}: {'ok' if ok else 'BAD'} {time.monotonic()-t:.0f} s, {len(result.differing)} differ", flush=True)
    if not ok or len(names) < 3:
        print("   wanted", fault.varies, fault.what, right)
        print("   " + "\n   ".join(report(result)), flush=True)
