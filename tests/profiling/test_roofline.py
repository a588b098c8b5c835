"""A step on a GPU that is not there: sizes by rules that are known, times by the published rates."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.facts.gpus import GPUS

pytestmark = pytest.mark.slow

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 96, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        parts = self.parts(x).view(BATCH, LENGTH, 3, HEADS, -1)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1)
        return x + self.drop(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def profile(model: nn.Module, batch: Any, device: str | None = "a100-40g", **loop: Any) -> lowtide.Profile:
    return lowtide.profile(model, batch, loss=square, device=device, **loop)


def attention(dtype: torch.dtype, device: str, *, masked: bool = False) -> lowtide.Profile:
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool) if masked else None
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype), "mask": mask}
    return profile(Attention().to(dtype), batch, device)


@pytest.mark.parametrize(
    ("dtype", "device", "masked", "kernel"),
    [
        (torch.float32, "a100-40g", False, "efficient"),
        (torch.bfloat16, "a100-40g", False, "flash"),
        (torch.bfloat16, "a100-40g", True, "efficient"),
        (torch.float16, "t4-16g", False, "efficient"),
    ],
)
def test_attention_is_what_the_gpu_has_and_keeps_no_scores(
    dtype: torch.dtype, device: str, masked: bool, kernel: str
) -> None:
    found = attention(dtype, device, masked=masked)
    ops = {node.op for node in found.nodes if "attention" in node.op}
    assert ops == {
        f"aten._scaled_dot_product_{kernel}_attention.default",
        f"aten._scaled_dot_product_{kernel}_attention_backward.default",
    }
    scores_bytes = BATCH * HEADS * LENGTH * LENGTH * dtype.itemsize
    kept = [a for a in found.activations if "attention" in a.name]
    assert all(activation.nbytes < scores_bytes for activation in kept)


def test_blocks_are_cut_by_the_gpus_allocator_and_masks_are_bytes() -> None:
    here = profile(Attention(), torch.randn(BATCH, LENGTH, WIDTH), None)
    there = profile(Attention(), torch.randn(BATCH, LENGTH, WIDTH))
    assert all(storage.nbytes % 512 == 0 for storage in there.step.storages)
    assert any(storage.nbytes % 512 for storage in here.step.storages)
    assert sum(storage.extra_eager_bytes for storage in here.step.storages) > 0
    assert sum(storage.extra_eager_bytes for storage in there.step.storages) == 0


def test_cublas_has_a_workspace_for_each_pass() -> None:
    found = profile(nn.Linear(8, 8), torch.randn(4, 8))
    workspaces = [s.nbytes for s in found.step.storages if "cuBLAS" in s.name]
    assert workspaces == [GPUS["a100-40g"].matmul_workspace_bytes] * 2
    without = profile(nn.Sequential(nn.LayerNorm(8), nn.GELU()), torch.randn(4, 8))
    assert not [s for s in without.step.storages if "cuBLAS" in s.name]


@pytest.mark.parametrize("weights", [False, True])
def test_attention_inside_of_a_layer_of_torchs_is_the_gpus_as_well(weights: bool) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                mixed: torch.Tensor = self.heads(x, x, x, need_weights=weights)[0]
            return mixed

    found = profile(Heads(), torch.randn(BATCH, LENGTH, WIDTH))
    ops = {node.op for node in found.nodes}
    assert ("aten._scaled_dot_product_flash_attention.default" in ops) is not weights
    scores = [
        found.step.storages[made].nbytes
        for node in found.nodes
        for made in node.makes[:1]
        if node.op == "aten._softmax.default"
    ]
    assert scores == ([BATCH * HEADS * LENGTH * LENGTH * 4] if weights else [])


def test_a_gradient_of_one_number_is_copied_for_cublas() -> None:
    def inside(model: nn.Module, loss: Any) -> list[int]:
        found = lowtide.profile(model, torch.randn(256, 32), loss=loss, device="a100-40g")
        products = [node for node in found.nodes if node.op == "aten.mm.default"]
        return [node.workspace_bytes + node.extra_eager_bytes for node in products]

    class Summed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    assert inside(nn.Linear(32, 64, bias=False), torch.sum) == [0, 256 * 64 * 4]
    assert inside(Summed(32, 64, bias=False), None) == [0, 256 * 64 * 4]
    assert inside(nn.Linear(32, 64, bias=False), square) == [0, 0]


def test_a_loss_holds_one_tensor_of_gradients_between_its_ops_and_one_after_them() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.zeros(512, 1024))

        def forward(self, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.scores, labels)

    found = lowtide.profile(Scores(), torch.zeros(512, dtype=torch.int64), device="a100-40g")
    # the scores and their logarithms as well; the rest is labels and single numbers
    assert 0 < found.peak_bytes - 4 * (512 * 1024 * 4) < 1 << 14


def test_optimizers_step_as_on_a_gpu_where_nobody_chose_how() -> None:
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(4, 256)

    def peak(foreach: bool | None, device: str | None) -> int:
        optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
        return profile(model, x, device, optimizer=optimizer).peak_bytes

    assert peak(None, "a100-40g") == peak(True, "a100-40g") > peak(False, "a100-40g")
    assert peak(None, None) == peak(False, None)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_the_gpus(kind: str, dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 128)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast(kind, dtype):
                return functional.cross_entropy(self.head(self.norm(self.linear(x)).softmax(-1)), y)

    batch = (torch.randn(32, 64), torch.zeros(32, dtype=torch.int64))
    found = lowtide.profile(Mixed(), batch, device="a100-40g")
    made = {node.op: found.step.storages[node.makes[0]].nbytes for node in found.nodes if node.makes}
    assert made["aten.native_layer_norm.default"] == made["aten._softmax.default"] == 32 * 64 * 4
    assert made["aten._log_softmax.default"] == 32 * 128 * 4
    assert made["aten.addmm.default"] == 32 * 128 * 2


def test_a_convolution_copies_its_operands_only_for_tensor_cores_that_read_them_otherwise() -> None:
    def inside(device: str, memory_format: torch.memory_format) -> int:
        model = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=memory_format)
        images = torch.randn(2, 8, 16, 16).to(memory_format=memory_format)
        nodes = profile(model, images, device).nodes
        return next(node.workspace_bytes for node in nodes if node.op == "aten.convolution.default")

    image_bytes, weight_bytes = 2 * 8 * 16 * 16 * 4, 8 * 8 * 9 * 4 + 8 * 4
    assert inside("a100-40g", torch.contiguous_format) == 2 * image_bytes + weight_bytes
    assert inside("a100-40g", torch.channels_last) == 0
    assert inside("t4-16g", torch.contiguous_format) == 0


def test_convolutions_of_sound_and_of_video_copy_their_operands_as_those_of_images_do() -> None:
    def inside(model: nn.Module, x: torch.Tensor) -> int:
        nodes = profile(model, x).nodes
        return next(node.workspace_bytes for node in nodes if node.op == "aten.convolution.default")

    sound, video = torch.randn(2, 8, 64), torch.randn(2, 8, 4, 8, 8)
    sound_layer, video_layer = nn.Conv1d(8, 8, 1, bias=False), nn.Conv3d(8, 8, 1, bias=False)
    assert inside(sound_layer, sound) == 2 * sound.nbytes + sound_layer.weight.nbytes
    assert inside(video_layer, video) == 2 * video.nbytes + video_layer.weight.nbytes
    last = torch.channels_last_3d
    assert inside(video_layer.to(memory_format=last), video.to(memory_format=last)) == 0


def test_a_gpu_may_be_named_in_capitals() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    assert profile(model, x, "A100-40G").step.device == "a100-40g (estimated)"


def test_a_faster_gpu_is_faster_and_half_the_bits_as_well() -> None:
    def seconds(device: str, dtype: torch.dtype) -> float:
        x = torch.randn(256, 512, dtype=dtype)
        return profile(nn.Linear(512, 4096, dtype=dtype), x, device).step_seconds

    assert seconds("h100-80g", torch.float32) < seconds("a100-40g", torch.float32)
    assert seconds("a100-40g", torch.float32) < seconds("t4-16g", torch.float32)
    assert seconds("a100-40g", torch.bfloat16) < seconds("a100-40g", torch.float32)


def test_all_of_it_says_that_it_is_estimated_and_the_plan_runs_where_there_is_a_device() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(BATCH, LENGTH, WIDTH)
    found = profile(model, x)
    assert "estimated" in repr(found)
    assert all(node.estimated for node in found.nodes if node.seconds)
    plan = found.plan("98%")
    assert plan.recompute_seconds > 0
    assert "device=a100-40g (estimated)" in repr(plan)
    first, second = plan.solution.notes
    assert first.startswith("estimated for an NVIDIA A100 40 GB, which is not there")
    assert "should reserve" in second and "(estimated)" in second
    planned = copy.deepcopy(model)
    plan.apply(planned)  # this machine stands for the device: its graphs are planned anew for the budget
    losses = []
    for one in (model, planned):
        torch.manual_seed(1)
        losses.append(square(one(x)))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), planned.parameters(), strict=True)
    )


def test_what_is_not_known_of_recurrent_layers_is_said() -> None:
    found = lowtide.profile(
        nn.GRU(8, 8), torch.randn(4, 2, 8), loss=lambda results: square(results[0]), device="t4-16g"
    )
    assert any(note.startswith("recurrent layers are counted") for note in found.step.notes)


class OnCuda(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.ones(4, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_what_cannot_be_estimated_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(
        lowtide.LowtideError, match="no GPU called 'a100' is known here: choose one of a100-40g"
    ):
        profile(model, x, "a100")
    with pytest.raises(lowtide.LowtideError, match="leave mode 'run' out"):
        profile(model, x, mode="run")
    with pytest.raises(
        lowtide.LowtideError, match="and the t4-16g is not there: leave offload or device out"
    ):
        profile(model, x, "t4-16g", offload="host")
    with pytest.raises(lowtide.LowtideError, match="and the t4-16g is not there: leave `device` out"):
        profile(model, x, "t4-16g").plan("100%", executor="inductor")
    with pytest.raises(
        lowtide.LowtideError, match="no CUDA device here: let that line take the device of its"
    ):
        profile(OnCuda(4, 4), x)
    with pytest.raises(lowtide.LowtideError, match="move model and batch there"):
        profile(model.to("meta"), x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(hidden * torch.sigmoid(1.702 * hidden))


def test_methods_of_the_processor_are_not_those_of_a_gpu() -> None:
    batch = torch.randn(1024 * torch.get_num_threads(), 8)
    here, there = (profile(Gated(), batch, device) for device in (None, "a100-40g"))
    assert any(node.remat("slices") for node in here.nodes)
    assert not any(node.remat("slices") for node in there.nodes)
