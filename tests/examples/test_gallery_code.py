"""The code of the examples that `init --example` writes; that their jobs train is an end-to-end test's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from examples.contrastive import contrastive
from examples.dcgan import dcgan
from examples.detection import detection
from examples.diffusion import diffusion
from examples.gpt import gpt
from examples.graphs import graphs
from examples.images import images
from examples.lora import lora
from examples.segmentation import segmentation
from examples.streaming import streaming
from examples.tabular import tabular

if TYPE_CHECKING:
    from pathlib import Path


def test_a_gpt_sees_nothing_of_what_follows() -> None:
    """Another last character changes the last scores only."""
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(vocab_size=10, n_layer=2, dropout=0.0)).eval()
    one = torch.randint(9, (1, 12))
    other = one.clone()
    other[0, -1] = 9
    before, after = model(one), model(other)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
    assert model.generate(one, 3).shape == (1, 15)


def test_sonnets_to_train_on_and_to_evaluate_on_are_apart() -> None:
    """Together they are the text; each target is the character after its input."""
    train, val = gpt.Sonnets("train"), gpt.Sonnets("val")
    assert train.decode(train.tokens) + val.decode(val.tokens) == gpt.TEXT.read_text()
    inputs, targets = train[1234]
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(train[len(train) - 1][1], train.tokens[-64:])
    assert len(val) == (len(val.tokens) - 1) // 64


def test_streams_hold_every_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of data shards; the files are made once."""
    monkeypatch.chdir(tmp_path)
    streaming.write_shards(lines=50)
    made = {path: path.stat().st_mtime_ns for path in streaming.FOLDER.iterdir()}
    streaming.write_shards(lines=50)
    assert made == {path: path.stat().st_mtime_ns for path in streaming.FOLDER.iterdir()}
    assert len(made) == streaming.FILES
    blocks = [bytes(block.tolist()) for shard in range(4) for block in streaming.packed_text(shard, 4)]
    assert len(set(blocks)) == len(blocks)
    first, second = list(streaming.packed_text(0, 8))[:2]
    assert first[-1] == second[0]  # the last target is the next block's first input


def test_info_nce_is_least_where_partners_agree() -> None:
    """Partners that are equal, and unlike all others, cost almost nothing; shuffled ones much."""
    vectors = torch.eye(8)
    batch = vectors, vectors, torch.arange(8)
    assert contrastive.info_nce(torch.nn.Identity(), batch, temperature=0.05) < 1e-3
    shuffled = vectors, vectors.roll(1, 0), torch.arange(8)
    assert contrastive.info_nce(torch.nn.Identity(), shuffled, temperature=0.05) > 5


def test_neighbours_are_looked_for_among_others() -> None:
    """A digit is not its own neighbour."""
    points = functional.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.2], [0.1, 1.0], [0.2, 1.0]]), dim=1)
    for labels, expected in (([0, 0, 1, 1], 1.0), ([0, 1, 0, 1], 0.0)):
        batch = points, points, torch.tensor(labels)
        assert contrastive.neighbour_accuracy(torch.nn.Identity(), batch).item() == expected


def test_mixup_is_for_training_only() -> None:
    """In evaluation the loss is that of the images as they are."""
    torch.manual_seed(0)
    model = images.ConvNet(width=4, depth=1)
    batch = torch.rand(6, 1, 8, 8), torch.arange(6)
    assert images.mixup_step(model.train(), batch) != images.mixup_step(model, batch)
    expected = functional.cross_entropy(model.eval()(batch[0]), batch[1])
    assert torch.equal(images.mixup_step(model, batch), expected)


def test_a_digit_is_moved_anew_each_time_it_is_read() -> None:
    """Only where it is to be augmented."""
    augmented, plain = images.Digits(augment=True), images.Digits()
    assert not torch.equal(augmented[3][0], augmented[3][0])
    assert torch.equal(plain[3][0], plain[3][0])
    assert plain[3][0].max() == 1.0


def test_answers_are_trained_on_and_padding_is_not() -> None:
    """Each answer's tokens have labels, and its end; nothing else has."""
    data = lora.Instructions(samples=8)
    samples = [data[index] for index in range(8)]
    batch = lora.padded(samples)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    answers = [len(answer) + 1 for _, answer in data.pairs]  # and the end
    assert sum(answers) == (batch["labels"] != lora.IGNORED).sum()
    assert batch["attention_mask"].sum() == sum(len(sample["input_ids"]) for sample in samples)
    assert batch["labels"][batch["attention_mask"] == 0].eq(lora.IGNORED).all()


def test_rows_to_test_on_are_others() -> None:
    """The same ones each time."""
    train, test = tabular.Table("train", 50), tabular.Table("test", 50)
    assert not torch.equal(train.targets, test.targets)
    assert torch.equal(train.targets, tabular.Table("train", 50).targets)
    row, target = train[0]
    batch = {name: value[None] for name, value in row.items()}
    assert tabular.TabularNet(width=4).eval()(batch).shape == (1,) != target.shape


def test_each_weight_of_the_gan_has_one_optimizer() -> None:
    """The generator's and the discriminator's are all there are."""
    model = dcgan.DCGAN(latent=4, width=4)
    optimizers = model.configure_optimizers(lr=0.1, betas=(0.5, 0.9))
    owned = [p for each in optimizers.values() for group in each.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    assert model.sample(3).shape == (3, 1, 8, 8) == dcgan.digits()[:3].shape


def test_hooks_log_what_was_made() -> None:
    """A verse of the sonnets' characters; sixteen digits in one image, values 0 to 1."""
    logged: dict[str, Any] = {}

    def context(model: torch.nn.Module) -> SimpleNamespace:
        log = logged.__setitem__
        return SimpleNamespace(model=model.eval(), device="cpu", log_text=log, log_image=log)

    with torch.no_grad():
        gpt.write_verse(context(gpt.GPT(gpt.GPTConfig(vocab_size=61, n_layer=1))), length=5)
        dcgan.show(context(dcgan.DCGAN(latent=4, width=4)))
    assert len(logged["verse"]) == 6
    assert logged["digits"].shape == (32, 32)
    assert 0 <= logged["digits"].min() <= logged["digits"].max() <= 1


def test_r2_is_the_share_of_the_variance_that_is_told() -> None:
    """All of it, or none by the mean."""
    targets = torch.tensor([1.0, 2.0, 6.0])
    assert tabular.r2(targets, targets).item() == 1.0
    assert tabular.r2(targets.mean().expand(3), targets).item() == 0.0


def test_masks_are_where_the_ink_is() -> None:
    """A canvas to test on is the same each time, those to train on are not; the mask names digits on the canvas."""
    test, train = segmentation.Canvases("test"), segmentation.Canvases("train")
    canvas, mask = test[5]
    assert torch.equal(canvas, test[5][0])
    assert not torch.equal(train[5][0], train[5][0])
    assert canvas[0][mask > 0].mean() > 0.5
    assert canvas[0][mask == 0].mean() < 0.1
    assert int(test.labels[5]) + 1 in mask
    assert segmentation.UNet(width=4)(canvas[None]).shape == (1, 11, 24, 24)


def test_iou_counts_pixels_of_all_batches() -> None:
    """All right is 1; with one class taken for another, both are 0."""
    mask = torch.arange(11).repeat(2, 1)[:, None]
    scores = functional.one_hot(mask, 11).movedim(-1, 1).float()
    metric = segmentation.MeanIoU()
    metric.update(scores, mask)
    assert metric.compute().item() == 1.0
    metric = segmentation.MeanIoU()
    for each, right in ((0, mask), (1, mask.where(mask != 3, 4))):
        metric.update(scores[each][None], right[each][None])
    # Of two pixels of the class 3 one is said to be 4 and is not: 1/2 for 3, 2/3 for 4.
    assert metric.compute().item() == pytest.approx((9 + 1 / 2 + 2 / 3) / 11)


def test_graphs_joined_say_what_each_says_alone() -> None:
    """In one batch, in another order, and one by one: no message goes from a graph to another."""
    torch.manual_seed(0)
    data, model = graphs.DigitGraphs("test"), graphs.GraphNet(width=8)
    samples = [data[index] for index in range(4)]
    assert len({len(nodes) for nodes, _, _ in samples}) > 1
    batch, labels = graphs.joined(samples)
    assert batch.size == 4
    assert labels.tolist() == data.labels[:4].tolist()
    alone = torch.cat([model(graphs.joined([each])[0]) for each in samples])
    torch.testing.assert_close(model(batch), alone)


def test_boxes_that_are_there_are_found_once() -> None:
    """The targets themselves have a precision of 1; found twice, the second is wrong; and the losses see each box."""
    data = detection.Scenes("test")
    images, targets = detection.ragged([data[index] for index in range(8)])
    assert len({len(each["labels"]) for each in targets}) > 1
    found = [{**each, "scores": torch.ones(len(each["labels"]))} for each in targets]
    metric = detection.AveragePrecision()
    metric.update(found, targets)
    assert metric.compute() == 1.0
    metric.update(
        [{name: value.repeat_interleave(2, dim=0) for name, value in each.items()} for each in found], targets
    )
    assert 0.5 < metric.compute() < 1.0
    model = detection.Detector(width=4)
    assert detection.training_step(model, (images, targets))["loss"].isfinite()
    boxes, truth = detection.detect(model.eval(), (images, targets))
    assert truth is targets
    assert [set(each) for each in boxes] == [{"boxes", "labels", "scores"}] * 8


def test_a_model_that_knows_the_noise_draws_the_digit() -> None:
    """With the very noise told at each step, what is drawn is the digit that is meant."""
    torch.manual_seed(0)
    digit, _ = diffusion.Digits("test")[0]

    class Knowing(diffusion.Denoiser):
        def forward(self, x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            signal = self.signal[time[0] + 1]
            return (x - signal.sqrt() * digit) / (1 - signal).sqrt()

    torch.testing.assert_close(
        Knowing(width=4).sample(torch.zeros(2, dtype=torch.long)), digit.expand(2, 1, 8, 8)
    )
