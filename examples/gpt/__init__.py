"""Parts of the GPT training example: arguments, data, model, schedule, parallelism, checkpoints, log and sampling."""
