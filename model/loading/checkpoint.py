"""Opens the weights of a checkpoint: a folder of safetensors files or of converted weights, or a GGUF file."""

from __future__ import annotations

from model.config import LlamaConfig
from model.inputs.gguf import is_gguf
from model.inputs.paths import Place
from model.inputs.remote import RemotePath
from model.loading.tensor_files import TensorFiles
from model.loading.tensors import Checkpoint


def open_checkpoint(path: Place, config: LlamaConfig, *, is_converted: bool = False) -> Checkpoint:
    """The weights at `path`. ValueError if they are not those of `config`."""
    if is_converted:
        from model.loading.orbax_format import OrbaxFiles  # it imports Orbax

        return OrbaxFiles(path, config)
    if isinstance(path, RemotePath) or not is_gguf(path):
        return TensorFiles(path, config)
    from model.loading.gguf_tensors import GgufTensors

    return GgufTensors(path, config)
