"""The callback of transformers' Trainer: whatever the Trainer does, as without it, to the last bit."""

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import lowtide  # noqa: E402
from lowtide.errors import BadSize  # noqa: E402
from lowtide.integrations.transformers import Lowtide  # noqa: E402
from lowtide.runtime.runner import runner_of  # noqa: E402
from lowtide.torch_compat.inductor import has_compiler  # noqa: E402
from lowtide.verification.measure_step import peak_above_start, static_bytes  # noqa: E402

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH = 100, 32
LENGTHS = (32, 32, 20, 20)


def bert() -> nn.Module:
    set_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )


def gpt() -> nn.Module:
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["query", "value"], task_type="SEQ_CLS")
    return peft.get_peft_model(bert(), config)


def sentences() -> list[dict[str, Any]]:
    """Of one length, with a column that no model takes."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (12, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": int(row[0]) % 2, "unused": 1.0} for row in rows]


def texts() -> list[dict[str, Any]]:
    """Of several lengths."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, VOCABULARY, (n,), generator=generator)} for n in LENGTHS]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids}


class Log(TrainerCallback):
    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        other = ("runtime", "per_second", "peak_gib")
        self.lines.append({k: v for k, v in kwargs["logs"].items() if not k.endswith(other)})


class MeasuringTrainer(Trainer):
    """Measures the step after the first ones, the gradients of earlier micro-batches included."""

    measured = 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.state.global_step < 1:
            return super().training_step(model, inputs, num_items_in_batch)
        result: list[torch.Tensor] = []
        own = super().training_step
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        there = static_bytes(model, inputs, self.optimizer.optimizer) + gradients
        above = peak_above_start(lambda: result.append(own(model, inputs, num_items_in_batch)))
        self.measured = max(self.measured, there + above)
        return result[0]


@dataclass
class Trained:
    trainer: Trainer
    lines: list[dict[str, float]]
    callback: Lowtide | None
    random_states: list[Any]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return self.trainer.model.state_dict()


def train(
    folder: Path,
    budget: str | int | None,
    *,
    build: Any = gpt,
    resume: Path | None = None,
    kind: type[Trainer] = Trainer,
    executor: str = "eager",
    **settings: Any,
) -> Trained:
    model = build()
    classifies = not isinstance(model, GPT2LMHeadModel)
    data = sentences() if classifies else texts()
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    } | settings
    log, callback = Log(), None if budget is None else Lowtide(budget, executor=executor)
    trainer = kind(
        model,
        TrainingArguments(**chosen),
        train_dataset=data,
        eval_dataset=data[:3],
        data_collator=None if classifies else padded,
        callbacks=[log] if callback is None else [log, callback],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    return Trained(trainer, log.lines, callback, states)


def check_same(plain: Trained, planned: Trained) -> None:
    assert planned.lines == plain.lines
    assert list(planned.state) == list(plain.state)
    assert all(map(torch.equal, planned.state.values(), plain.state.values()))
    assert torch.equal(planned.random_states[0], plain.random_states[0])
    assert planned.random_states[1:] == plain.random_states[1:]
    assert planned.callback.plan.recompute_seconds > 0, "the budget asks for nothing"
    assert runner_of(planned.trainer.model) is None, "the model is the plain one again"


SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16 and several lengths": (gpt, {"bf16": True, "train_sampling_strategy": "sequential"}),
    "LoRA and clipping": (lora, {"max_grad_norm": 0.1, "max_steps": 2}),
    "label smoothing": (bert, {"label_smoothing_factor": 0.1}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [
        "bf16 and several lengths",
        "LoRA and clipping",
        pytest.param("label smoothing", marks=pytest.mark.long),
    ],
)
def test_as_without_it(name: str, tmp_path: Path) -> None:
    build, settings = SETTINGS[name]
    check_same(*(train(tmp_path, budget, build=build, **settings) for budget in (None, "80%")))


@pytest.mark.long
@pytest.mark.skipif(not has_compiler(), reason="Inductor needs a C++ compiler")
def test_another_executor(tmp_path: Path) -> None:
    settings = {"build": bert, "executor": "inductor"}
    plain, planned = (train(tmp_path, budget, **settings) for budget in ("200%", "80%"))
    check_same(plain, planned)
    assert planned.callback.plan.solution.executor == "inductor"
    with pytest.raises(lowtide.LowtideError, match="there is no executor 'fast'"):
        Lowtide("1GB", executor="fast")


@pytest.mark.long
def test_accumulated_gradients_are_within_the_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"gradient_accumulation_steps": 2, "bf16": True}
    with caplog.at_level(logging.INFO, "lowtide"):
        plain = train(tmp_path, None, build=bert, **settings)
        planned = train(tmp_path, "80%", build=bert, kind=MeasuringTrainer, **settings)
    check_same(plain, planned)
    plan = planned.callback.plan
    assert 0.9 * plan.peak_bytes <= planned.trainer.measured <= plan.budget_bytes
    assert plan.solution.reserve.earlier_gradient_bytes == sum(
        parameter.nbytes for parameter in planned.trainer.model.parameters()
    )
    told = [record.getMessage() for record in caplog.records if record.name == "lowtide"]
    (line,) = [line for line in told if "tensors besides the step" not in line]  # this process has a twin
    assert line.startswith("predicted peak ") and "without a plan" in line and "% more time" in line
    assert f"input_ids int64[2x{LENGTH}]" in line and "labels int64[2]" in line


class Reporter(TrainerCallback):
    """A reporter as that of TensorBoard, which a Trainer calls before the user's callbacks."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(dict(kwargs["logs"]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("log_peak", [True, False])
def test_reporters_get_the_measured_peak_beside_the_loss(tmp_path: Path, log_peak: bool) -> None:
    reporter, callback = Reporter(), Lowtide(log_peak=log_peak)
    trainer = Trainer(
        bert(),
        TrainingArguments(
            str(tmp_path), max_steps=3, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no"
        ),
        train_dataset=sentences(),
        callbacks=[reporter, callback],
    )
    before = trainer.callback_handler.callbacks[:]
    trainer.train()
    assert callback.plan is not None and "budget auto" in callback.plan.solution.notes[-1]
    with_loss = [logs for logs in reporter.seen if "loss" in logs]
    assert len(with_loss) == 3
    for logs in (*with_loss, *(logs for logs in trainer.state.log_history if "loss" in logs)):
        assert ("lowtide/resident_peak_gib" in logs) is log_peak
        assert not log_peak or 0.05 < logs["lowtide/resident_peak_gib"] < 100
    others = [one for one in trainer.callback_handler.callbacks if one is not callback]
    assert others == [one for one in before if one is not callback], "all others have their turns as before"


class HoldingTrainer(MeasuringTrainer):
    """Keeps the last outputs, as a compute_loss of a user's own may do."""

    outputs: Any = None

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.outputs = model(**inputs)
        return self.outputs.loss


@pytest.mark.long
def test_outputs_that_a_trainer_lets_go_need_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer holds only the loss through the backward pass; whoever holds more is warned, with bytes."""
    settings = {"train_sampling_strategy": "sequential", "max_steps": 2}
    free = train(tmp_path, "90%", kind=MeasuringTrainer, **settings)
    assert free.trainer.measured <= free.callback.plan.budget_bytes
    assert not [record for record in caplog.records if "holds_outputs" in record.getMessage()]
    train(tmp_path, "90%", kind=HoldingTrainer, **settings)
    logits_bytes = 2 * LENGTH * VOCABULARY * 4
    (line,) = [text for record in caplog.records if "holds_outputs" in (text := record.getMessage())]
    assert f"({logits_bytes} bytes) of the model's outputs" in line


@pytest.mark.long
def test_activations_may_wait_on_a_disk(tmp_path: Path) -> None:
    with pytest.raises(lowtide.LowtideError, match="cannot offload to 'ram'"):
        Lowtide("80%", offload="ram")
    model, callback = bert(), Lowtide("90%", offload=f"disk:{tmp_path}")
    state, arguments = TrainerState(), TrainingArguments(str(tmp_path / "out"), report_to="none")
    optimizer = torch.optim.SGD(model.parameters())
    callback.on_train_begin(arguments, state, TrainerControl(), model=model, optimizer=optimizer)
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    model(input_ids=tokens, labels=torch.tensor([0, 1])).loss.backward()
    assert callback.plan.solution.offload.transfer_speed.store == f"disk:{tmp_path}"


def test_evaluate_save_and_resume(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "build": bert}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    whole, planned = (train(tmp_path / str(budget), budget, **settings) for budget in (None, "80%"))
    check_same(whole, planned)
    resumed = train(tmp_path / "again", "80%", resume=tmp_path / "80%" / "checkpoint-1", **settings)
    assert resumed.lines[-3:-1] == whole.lines[-3:-1], "the second step and its evaluation"
    assert all(map(torch.equal, resumed.state.values(), whole.state.values()))
    resumed.trainer.model.save_pretrained(tmp_path / "saved")
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in whole.state.items())


def test_a_budget_that_cannot_be_met_comes_before_the_first_step(tmp_path: Path) -> None:
    before = bert().state_dict()
    with pytest.raises(BadSize, match="'8GX'"):
        Lowtide("8GX")
    model = bert()
    with pytest.raises(lowtide.BudgetTooSmall) as refused:
        train(tmp_path, "1KB", build=lambda: model)
    assert "\n" not in str(refused.value)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert runner_of(model) is None


def test_what_would_go_past_the_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lowtide.LowtideError, match="torch_compile=True"):
        train(tmp_path, "1GB", torch_compile=True, torch_compile_backend="eager")
    compiled = bert()
    compiled.compile(backend="eager")
    with pytest.raises(lowtide.LowtideError, match="is compiled"):
        train(tmp_path, "1GB", build=lambda: compiled)
