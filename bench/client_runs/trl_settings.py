"""What all trainers of TRL are set to."""

from typing import Any

from .run import Run


def settings(run: Run, *, rows: int) -> dict[str, Any]:
    """Batches of so many rows on the CPU; nothing is saved or reported."""
    return {
        "output_dir": "out",
        "per_device_train_batch_size": rows,
        "max_steps": run.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": [],
        "use_cpu": True,
    }
