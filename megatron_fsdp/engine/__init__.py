"""Everything that an ordinary training step does (docs/how_a_step_works.md follows one unit through a step).

| file, in order of time | what it has | in FSDP2 |
|---|---|---|
| forward.py | pre_forward, post_forward | FSDPState |
| backward.py | begin_backward, pre_backward | FSDPState, FSDPParamGroup |
| post_backward.py | post_backward | FSDPParamGroup |
| final_callback.py | the end of a backward | FSDPState._root_post_backward_final_callback |
| recovery.py | what follows a backward that raised | |
| manual_finalization.py | gradients that become final outside of a backward | |

| file | what it has | in FSDP2 |
|---|---|---|
| unit.py | the state of a unit, and of all units of a model; unshard, reshard | FSDPState, FSDPStateContext |
| param_group.py, weight_buffers.py | weights: gather, release, refresh | FSDPParamGroup, foreach_all_gather |
| freshness.py, optimizer_steps.py | are the gathered weights as new as the main weights? | |
| params.py, unsharded_param.py | sharded and unsharded parameters | FSDPParam |
| grads.py, lane_packer.py, reduce.py, last_reduction.py | gradients: pack, reduce, add to main_grad | foreach_reduce |
| accumulation.py, grad_memory.py, pending_gradient.py | main_grad as .grad | |
| streams.py | the order of work on a device | FSDPCommContext |
| outputs.py, graph_queries.py | hooks on outputs; questions about autograd's graph | RegisterPreBackwardFunction |
| fused_linear.py | weight gradients that are multiplied into the packed buffer | |
| split_main_params.py | FP32 main weights in two halves | |
| param_loops.py | loops over parameters that run in C | |
| hooks.py | StepHooks: the events that checks and variants receive | |
"""
