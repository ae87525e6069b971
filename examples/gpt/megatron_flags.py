"""Flags of Megatron-LM's training scripts that this script does not have, to tell them from misspelled ones."""

from __future__ import annotations

NOT_HERE = frozenset(
    f"--{name}"
    for name in """
    accumulate-allreduce-grads-in-fp32 adaptive-muon-beta2 add-bias-linear add-position-embedding add-qkv-bias
    adlr-autoresume adlr-autoresume-interval allow-ambiguous-pad-tokens apply-layernorm-1p
    apply-query-key-layer-scaling apply-residual-connection-post-layernorm apply-rope-fusion
    apply-wd-to-qk-layernorm async-strategy async-tensor-model-parallel-allreduce attention-backend
    attention-softmax-in-fp32 auto-detect-ckpt-format auto-tune bert-load bf16-main-params bias-dropout-fusion
    bias-gelu-fusion bias-swiglu-fusion calc-ft-timeouts check-for-spiky-loss
    check-weight-hash-across-dp-replicas-interval ckpt-assume-constant-structure ckpt-convert-format
    ckpt-convert-save ckpt-fully-parallel-load ckpt-fully-parallel-save ckpt-step config-logger-dir
    context-parallel-size cp-comm-type cpu-offloading-num-layers create-attention-mask-in-dataloader
    cross-entropy-fusion-impl cross-entropy-loss-fusion cuda-graph-scope cuda-graph-warmup-steps data-args-path
    data-cache-path data-parallel-random-init data-per-class-fraction data-sharding dataloader-type
    ddp-bucket-size-mb deallocate-pipeline-outputs decode-only-cuda-graphs decoder-first-pipeline-num-layers
    decoder-last-pipeline-num-layers decoder-num-layers decoder-seq-length decoupled-lr decoupled-min-lr
    defer-embedding-wgrad-compute delay-wgrad-compute deprecated-use-mcore-models deterministic-mode
    disable-bf16-reduced-precision-matmul disable-mamba-mem-eff-path disable-straggler-on-startup
    disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    dist-ckpt-format distribute-saved-activations distributed-timeout-seconds-after-init embedding-path
    empty-unused-memory-level enable-cuda-graph enable-ft-package enable-gloo-process-groups enable-msc
    enable-one-logger encoder-num-layers encoder-pipeline-model-parallel-size encoder-seq-length
    encoder-tensor-model-parallel-size end-weight-decay eod-mask-loss-in-data error-injection-rate
    eval-micro-batch-size exit-duration-in-mins exit-on-missing-checkpoint exit-signal exit-signal-handler
    exp-avg-sq-decay experimental expert-tensor-parallel-size external-cuda-graph extra-vocab-size fim-data
    fine-grained-activation-offloading first-last-layers-bf16 flash-decode flops-per-token force-last-layers-bf16
    fp16-lm-cross-entropy fp32-residual-connection fp4-format fp4-param fp4-recipe fp8-amax-compute-algo
    fp8-amax-history-len fp8-format fp8-interval fp8-margin fp8-param fp8-recipe fp8-wgrad full-validation
    global-attn-every-n-layers glu-linear-offset grad-norm-skip-threshold gradient-checkpointing
    group-limited-routing heterogeneous-layers-config-path hierarchical-context-parallel-sizes high-priority-p2p
    hybrid-attention-ratio hybrid-context-parallel hybrid-mlp-ratio hybrid-override-pattern hysteresis
    inference-batch-times-seqlen-threshold inference-max-batch-size inference-max-seq-length
    init-embedding-method-std init-method-xavier-uniform initial-loss-scale inprocess-restart is-hybrid-model
    iterations-to-skip keep-fp8-weight-transpose-cache kv-channels kv-lora-rank lazy-mpu-init legacy-tokenizer
    load-main-params-from-ckpt local-rank log-batch-size-to-tensorboard log-energy log-interval-memory
    log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard log-max-attention-logit log-memory-to-tensorboard
    log-num-zeros-in-grad log-params-norm log-progress log-straggler log-timers-to-tensorboard
    log-validation-ppl-to-tensorboard log-world-size-to-tensorboard logging-level loss-scale loss-scale-window
    lr-warmup-init lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style make-vocab-size-divisible-by-tp
    mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim mask-prob masked-softmax-fusion
    max-tokens-to-oom memory-snapshot-path merge-file microbatch-group-size-per-virtual-pipeline-stage
    min-loss-scale mla-down-proj-fusion mlp-chunks-for-prefill mmap-bin-files modelopt-enabled
    moe-apply-probs-on-input moe-deepep-num-sms moe-enable-deepep moe-expert-capacity-factor moe-extended-tp
    moe-ffn-hidden-size moe-flex-dispatcher-backend moe-grouped-gemm moe-input-jitter-eps moe-layer-freq
    moe-layer-recompute moe-pad-expert-input-to-capacity moe-per-layer-logging moe-permute-fusion
    moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias moe-router-force-load-balancing
    moe-router-fusion moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups
    moe-router-padding-for-fp8 moe-router-score-function moe-router-topk-scaling-factor
    moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-token-dispatcher-type moe-token-drop-policy
    moe-upcycling-granularity moe-use-legacy-grouped-gemm moe-use-upcycling moe-z-loss-coeff mrope-section mscale
    mscale-all-dim mtp-loss-scaling-factor mtp-num-layers multi-latent-attention multiple-validation-sets
    nccl-all-reduce-for-prefill nccl-communicator-config-path no-async-tensor-model-parallel-allreduce
    no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-ckpt-fully-parallel-save
    no-create-attention-mask-in-dataloader no-data-sharding no-initialization no-load-rng no-masked-softmax-fusion
    no-mmap-bin-files no-one-logger no-persist-layer-norm no-position-embedding no-query-key-layer-scaling
    no-rope-freq no-rope-fusion no-save-rng no-scatter-gather-tensors-in-pipeline
    no-use-tokenizer-model-from-checkpoint-args no-weight-decay-cond-type non-persistent-ckpt-type
    non-persistent-save-interval nope-freq normalize-attention-scores null-tokenizer num-attention-heads-per-group
    num-channels num-classes num-dataset-builder-threads num-distributed-optimizer-shards num-layers-at-end-in-bf16
    num-layers-at-start-in-bf16 num-layers-in-first-pipeline-stage num-layers-in-last-pipeline-stage
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank openai-gelu
    original-max-position-embeddings overlap-moe-expert-parallel-comm overlap-p2p-communication
    overlap-p2p-communication-warmup-flush override-opt-param-scheduler override-opt_param-scheduler
    padded-vocab-size per-dataset-sequences-path per-split-data-args-path per-token-loss perform-initialization
    perform-rl-step pipeline-model-parallel-comm-backend pipeline-model-parallel-layout pipeline-model-parallel-size
    pipeline-model-parallel-split-rank pretrained-checkpoint profile-ranks pytorch-profiler-collect-shapes
    q-lora-rank qk-clip qk-head-dim qk-layernorm qk-pos-emb-head-dim quick-gelu ramp-up-batch-size rampup-batch-size
    recompute-activations recompute-method recompute-modules recompute-num-layers record-memory-history rel-pos-bias
    relative-attention-max-distance relative-attention-num-buckets replication replication-factor replication-jump
    rerun-mode rescale-gradients reset-attention-mask reset-position-ids result-rejected-tracker-filename
    retro-project-dir rotary-interleaved rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor
    run-workload-inspector-server save-retain-interval sequence-parallel sft sft-tokenizer-prompt-format
    short-seq-prob skip-train skipped-iterations softmax-type spec special-tokens split-spec squared-relu
    start-weight-decay straggler-ctrlr-port straggler-minmax-count swiglu-fusion symmetric-ar-type te-rng-tracker
    tensorboard-log-interval tensorboard-queue-size test-data-path test-mode tiktoken-num-special-tokens
    tiktoken-pattern tiktoken-special-tokens timing-log-level timing-log-option tokenizer-hf-include-special-tokens
    tokenizer-hf-use-fast tokenizer-metadata tokenizer-type torch-compile torch-fsdp2-reshard
    tp-comm-bootstrap-backend tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad train-data-path
    train-sync-interval transformer-impl trust-remote-code use-checkpoint-args use-checkpoint-opt-param-scheduler
    use-checkpoint-opt_param-scheduler use-cpu-initialization use-dist-ckpt use-flash-attn
    use-fused-weighted-squared-relu use-legacy-models use-legacy-static-engine use-mcore-models
    use-mp-args-from-checkpoint-args use-persistent-ckpt-worker use-pytorch-profiler use-ring-exchange-p2p
    use-rope-scaling use-rotary-position-embeddings use-te-activation-func use-tokenizer-model-from-checkpoint-args
    use-tp-pp-dp-mapping use-transformer-engine-op-fuser v-head-dim valid-data-path
    virtual-pipeline-model-parallel-size vocab-file vocab-size warmup-steps weight-decay-incr-style
    wgrad-deferral-limit window-attn-skip-freq window-size yaml-cfg
    """.split()
)
