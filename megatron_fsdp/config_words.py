"""What FsdpConfig.explain says of the values of flags."""

__all__ = ["CHOICES", "SHARDED"]

SHARDED = {
    "no_shard": "nothing is sharded, gradients are all-reduced",
    "optim": "optimizer state and main weights are sharded (ZeRO-1)",
    "optim_grads": "optimizer state, main weights and gradients are sharded (ZeRO-2)",
    "optim_grads_params": "optimizer state, gradients and weights are sharded (ZeRO-3)",
}
# Of flags that a default leaves nothing to be said about; the words for another value.
CHOICES = {
    "init_model_with_meta_device": "the model is built without memory, sharded, then initialised",
    "suggested_communication_unit_size": "gathers run ahead by units of {} elements or more",
    "fsdp_double_buffer": "units of equal size take turns in buffers that stay",
    "megatron_fsdp_max_pool_double_buffer": "units take turns in buffers that stay, as large as the largest one",
    "nccl_ub": "buffers that stay are registered with NCCL, on GPUs",
    "disable_symmetric_registration": "registered buffers are not symmetric memory",
    "gradient_accumulation_fusion": "weight gradients are added after the GEMM, not in it",
    "calculate_per_token_loss": "gradients are summed over ranks and divided by the tokens of the step",
    "optimizer": "{} steps the main weights",
    "optimizer_cpu_offload": "weights at rest, gradients and the optimizer step are on the CPU",
    "clip_grad": "the global norm of gradients is at most {} (0: measured only)",
    "check_for_nan_in_loss_and_grad": "NaN in losses and gradients ends nothing",
    "check_for_large_grads": "gradient norms far above those before are said",
    "async_save": "checkpoints are written while training goes on",
    "strict_fsdp_dtensor_load": "what a checkpoint has of another model is left out",
    "dump_param_to_param_group_map": "the optimizer's groups are written to {}",
    "fake_process_group": "one process stands for all ranks and communicates with none; losses mean nothing",
}
