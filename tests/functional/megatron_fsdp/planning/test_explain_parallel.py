"""explain() of tensor- and expert-parallel models equals their training steps, and plan equals explain."""

import gc
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

import pretrain_gpt
from dbuffer import memory_meter, observe_collectives
from gpt.loss import token_loss
from megatron_fsdp import explain, microbatch
from tests.functional.examples.test_gpt_parallel import EXPERT, EXPERTS, HYBRID, MODEL, TENSOR
from tests.functional.megatron_fsdp.planning.test_report import Step, _key, predicted_calls
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.unit.examples.jobs import make_job

DIVISIONS = {
    "ep 2, tp 2": f"{EXPERTS} {EXPERT} {TENSOR}",
    "ep 2 of 4": f"{EXPERTS} {EXPERT}",
    "tp 2 of 4": f"{MODEL} {TENSOR}",
    "tp 2, hsdp": f"{MODEL} {TENSOR} {HYBRID}",
    "ep 2, hsdp": f"{EXPERTS} {EXPERT} {HYBRID}",
    "ep 4, zero 1": f"{EXPERTS} --expert-model-parallel-size 4 --data-parallel-sharding-strategy optim",
}


def second_step(flags: str) -> Step:
    """Train two steps of one microbatch; return the second step's measurements and the prediction made before."""
    gc.collect()
    meter = memory_meter()
    before = meter.current_bytes
    job = make_job(f"{flags} --optimizer adam --micro-batch-size 1 --global-batch-size 4")
    seen = Step(explain(job.model), meter.current_bytes - before)
    for step in range(2):
        seen.calls.clear()
        text = pretrain_gpt.microbatches(job, job.data.train, pretrain_gpt.sample_numbers(job, 4 * step))[0]
        meter.reset_peak()
        with microbatch(job.model, True):
            with observe_collectives(lambda call: seen.calls.update([_key("forward", call)])):
                loss = token_loss(job.model, text).mean
            seen.forward_peak = meter.peak_bytes - before - seen.persistent_bytes
            meter.reset_peak()
            with observe_collectives(lambda call: seen.calls.update([_key("backward", call)])):
                loss.backward()
            seen.backward_peak = meter.peak_bytes - before - seen.persistent_bytes
        with observe_collectives(lambda call: seen.calls.update([_key("step", call)])):
            job.optimizer.step()
            job.optimizer.zero_grad()
    tensors = [value for state in job.optimizer.state.values() for value in state.values()]
    seen.optimizer_bytes = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tensors)
    return seen


@pytest.mark.parametrize("name", nightly_but(["ep 2, tp 2", "ep 2, hsdp"], list(DIVISIONS)))
def test_bytes_and_collectives_are_predicted_to_the_byte(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
    for seen in run_ranks(4, second_step, f"{DIVISIONS[name]} --data-path {text}"):
        assert seen.report.persistent_bytes == seen.persistent_bytes > 0
        assert predicted_calls(seen.report) == seen.calls
        assert seen.report.optimizer_bytes == seen.optimizer_bytes
        assert seen.forward_peak <= seen.report.forward_peak.num_bytes <= 1.01 * seen.forward_peak
        assert seen.backward_peak <= seen.report.backward_peak.num_bytes <= 1.01 * seen.backward_peak
