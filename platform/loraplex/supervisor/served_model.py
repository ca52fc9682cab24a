"""The model that `loraplex serve` is to serve: found, and of files that can be used."""

from pathlib import Path

from adapter_store.base_model import read_base_model
from adapter_store.errors import BaseModelError
from engine.text.errors import TextError
from engine.text.tokenizer import Tokenizer
from loraplex.supervisor.serve_options import ServeError


def resolve_model(model: str) -> Path:
    """Return the model's folder, from the hub where it is no folder; raises `ServeError`."""
    if Path(model).is_dir():
        return Path(model).resolve()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ServeError(
            f"--model {model}: there is no such folder, and it is no hub name (org/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ServeError(f"--model {model} cannot be fetched from the hub: {error}") from None


def check_model(model: str, model_dir: Path) -> None:
    """Refuse a folder whose files no process could use; raises `ServeError`.

    What takes torch to find out (an unknown family, too little memory) the engine refuses.
    """
    try:
        read_base_model(model_dir)
        Tokenizer.from_pretrained(model_dir)
    except (BaseModelError, TextError, OSError, ValueError, RecursionError) as error:
        raise ServeError(
            f"--model {model} cannot be served: {str(error) or type(error).__name__}. It must be a "
            "Llama, Mistral, Qwen2, Qwen3, SmolLM, Phi-3 or Gemma (1 or 2) model as transformers "
            "saves it: config.json, tokenizer.json and safetensors"
        ) from None
