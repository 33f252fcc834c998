"""The network: specs, meshes, the decoder and Hugging Face directories in both directions.

`load_pretrained` gives a `Model` (a frozen description) and its parameters (a plain dict of arrays); `Model.hidden`
runs it. Scoring tokens is `jaxrl.losses`, generating them `jaxrl.engine`: neither is here.
"""

from jaxrl.models.hf import load_pretrained, load_spec, save_pretrained
from jaxrl.models.mesh import build_mesh
from jaxrl.models.spec import ModelSpec
from jaxrl.models.transformer import Model, build_model, init_params

__all__ = ["Model", "ModelSpec", "build_mesh", "build_model", "init_params", "load_pretrained", "load_spec", "save_pretrained"]
