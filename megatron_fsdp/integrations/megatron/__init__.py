"""Megatron-LM, megatron-core and Megatron-FSDP over this engine."""
