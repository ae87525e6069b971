"""Settings in the spelling of other programs: Megatron-LM's flags and Hugging Face's keys."""
