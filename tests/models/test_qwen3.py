import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.models import load_pretrained, save_pretrained

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
KINDS = ["qwen3_tied", "qwen3_untied"]


def our_logits(directory: Path, token_ids_BT: np.ndarray) -> np.ndarray:
    model, params = load_pretrained(directory)
    token_ids = jnp.asarray(token_ids_BT)
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1])[None], token_ids.shape)
    hidden = model.hidden(params, token_ids, positions, jnp.ones_like(token_ids))
    return np.asarray(hidden @ model.head(params).T)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind):
    golden = np.load(GOLDEN / kind / "logits.npz")
    np.testing.assert_allclose(our_logits(GOLDEN / kind, golden["token_ids"]), golden["logits"], atol=2e-5)


@pytest.mark.parity
def test_the_golden_files_are_what_transformers_writes_today(tmp_path):
    pytest.importorskip("torch")
    subprocess.run([sys.executable, GOLDEN / "make_qwen3_golden.py", tmp_path], check=True)
    for kind in KINDS:
        np.testing.assert_allclose(
            np.load(tmp_path / kind / "logits.npz")["logits"], np.load(GOLDEN / kind / "logits.npz")["logits"], atol=1e-5
        )
        fresh, committed = (load_file(root / kind / "model.safetensors") for root in (tmp_path, GOLDEN))
        assert fresh.keys() == committed.keys()
        assert all(np.array_equal(fresh[name], committed[name]) for name in fresh)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_logits_from_a_directory_that_we_wrote(tmp_path, kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    save_pretrained(*load_pretrained(GOLDEN / kind), tmp_path / kind)
    golden = np.load(GOLDEN / kind / "logits.npz")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind)
    with torch.no_grad():
        logits = theirs(input_ids=torch.from_numpy(golden["token_ids"]).long()).logits.numpy()
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-5)
