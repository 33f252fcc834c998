import json, subprocess
from pathlib import Path
from tests.e2e.runs import EVALUATED, UNMEASURED, metrics, rollouts, run_here, small_run

def test_real(tmp_path):
    rows = tmp_path/"q.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i} + {j} =", "answer": str(i+j)})+"\n" for i in range(9) for j in range(9)))
    env = [{"type":"questions","name":"q","path":str(rows),"reward":{"type":"python","import_path":"tests.envs.grading.misbehaving:longer","kwargs":{"than":2}}}]
    ev = [{"type":"questions","name":"qh","path":str(rows),"split":"heldout","heldout_frac":0.1,"reward":{"type":"math_verify"}}]
    out = run_here(small_run(tmp_path/"run", f"--orchestrator.train.env={json.dumps(env)}", f"--orchestrator.eval.env={json.dumps(ev)}", "--run.max_steps=2"))
    assert out.is_complete
    for s in (1,2):
        r = metrics(tmp_path/"run")[s]; print({k:v for k,v in r.items() if "reward" in k or "ledger" in k or "time/" in k})
    print(metrics(tmp_path/"run")[0])
    print(subprocess.run("ps aux | grep '[g]rading/worker'", shell=True, capture_output=True, text=True).stdout)
