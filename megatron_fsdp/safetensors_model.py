"""Models in safetensors files, by the path that users know; see ``megatron_fsdp.checkpoint.safetensors_model``."""

from megatron_fsdp.checkpoint.safetensors_model import export_safetensors, import_safetensors

__all__ = ["export_safetensors", "import_safetensors"]
