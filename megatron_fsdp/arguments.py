"""Megatron-LM's flags, by the path that users know; see ``megatron_fsdp.config.parser``."""

from megatron_fsdp.config.flag_rules import RULES, Rule
from megatron_fsdp.config.flags import FLAGS, Effect, Flag, flag_of
from megatron_fsdp.config.parser import add_megatron_fsdp_args, flags_markdown

__all__ = ["FLAGS", "RULES", "Effect", "Flag", "Rule", "add_megatron_fsdp_args", "flag_of", "flags_markdown"]
