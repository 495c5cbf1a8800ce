"""The recipe: what `accelerate launch -m toolkit.finetune` runs on every rank. Copy it, and change what is yours."""

from __future__ import annotations

# First, before torch: a rank ends when its launcher is killed, even while it imports.
from toolkit.core.process_lifecycle import die_with_parent, leave_safe_path

if __name__ == "__main__":
    die_with_parent()
    leave_safe_path()

import sys
from collections.abc import Sequence
from typing import Any

import toolkit as tk
from toolkit.core.errors import NotFinite
from toolkit.engines.records import Prepared
from toolkit.training.optimizers import make_optimizer, make_schedule
from toolkit.training.rank_process import run_rank
from toolkit.training.rank_run import RankRun


def train_rank(run: RankRun) -> int:
    """Run one rank, from the description of the model to the exported model. Return the exit code."""
    run.check()
    accelerator = run.make_accelerator()
    run.find_start()

    train_config = tk.job(accelerator).train_config
    model, _ = tk.load(accelerator, allow_unquantized=run.config.allow_unquantized)
    tokenizer = run.preflight.tokenizer  # with the template of --chat-template
    optimizer = make_optimizer(model, train_config, fused=accelerator.scaler is None)
    schedule = make_schedule(optimizer, train_config)
    model, optimizer, loader = tk.prepare(accelerator, model, optimizer, run.batches())
    prepared = tk.prepared(accelerator, (model, optimizer))
    run.restore(prepared, schedule)

    with run.listening():
        stopped = train_steps(run, prepared, tokenizer, loader, schedule)
        if stopped is not None:
            return run.end_stopped(stopped)
    run.publish(prepared, tokenizer)
    return 0


def train_steps(run: RankRun, prepared: Prepared, tokenizer: Any, loader: Any, schedule: Any) -> int | None:
    """Train the remaining steps. Return the step after which a signal stopped the run, or None."""
    policy, done = run.checkpoint_policy(prepared, schedule), run.start
    if run.missed_evaluation() and not run.evaluate(prepared, done, tokenizer):
        return done
    if run.ends_early():
        return None
    steps = tk.train(
        prepared,
        loader,
        schedule,
        start=done,
        on_begin=run.on_step_begin,
        samples=lambda step: run.format_samples(step, tokenizer),
        request=policy.request,
        read_late=lambda step: run.may_read_late(step) and not (policy.due(step) or run.evaluation_due(step)),
    )
    try:
        for step in steps:
            done = step.step
            run.on_step_end(prepared, step)
            policy.step_done(step)  # before an evaluation, which may take long
            if step.stops:
                return done
            if run.evaluation_due(done):
                if not run.evaluate(prepared, done, tokenizer):
                    policy.save_last_good(done)  # this step is not evaluated yet: the resumed run does it
                    return done
                if run.ends_early():
                    policy.save_last_good(done)
                    return None
    except NotFinite as error:
        policy.save_before_failing(done, error)
        raise
    return done if policy.stop_requested() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as one rank. Return exit code 2 after a user's mistake."""
    return run_rank(train_rank, arguments)


if __name__ == "__main__":
    sys.exit(main())
