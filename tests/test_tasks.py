"""What the two tasks count and show, against scikit-learn and plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from gradfilter.recipes.classification import Classification
from gradfilter.recipes.segmentation import Segmentation, enlarged, palette

sklearn = pytest.importorskip("sklearn.metrics")

NAMES = tuple("abcdefg")
VOID = 255


def scores(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape, high=7, seed=1):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def counted(task, output, target, parts=3):
    """Metrics after counting the batch in parts, as a loop does."""
    tally = task.tally()
    for y, t in zip(output.chunk(parts), target.chunk(parts), strict=True):
        task.add(tally, y, t)
    return task.metrics(tally), tally


def test_classification_metrics_are_sklearns():
    y, t = scores(50, 7), classes(50)
    found, tally = counted(Classification(NAMES), y, t)
    labels = range(7)
    assert found["top1"] == pytest.approx(sklearn.accuracy_score(t, y.argmax(1)))
    assert found["top5"] == pytest.approx(sklearn.top_k_accuracy_score(t, y, k=5, labels=labels))
    assert found["loss"] == pytest.approx(sklearn.log_loss(t, y.double().softmax(1), labels=labels))
    expected = sklearn.confusion_matrix(t, y.argmax(1), labels=labels)
    assert (tally["confusion"].numpy() == expected).all()


def test_what_is_ignored_counts_nowhere():
    y, t = scores(50, 7), classes(50)
    t[::3] = VOID
    kept = t != VOID
    found, tally = counted(Classification(NAMES, VOID), y, t)
    assert found == pytest.approx(counted(Classification(NAMES), y[kept], t[kept])[0])
    assert tally["count"] == tally["confusion"].sum() == kept.sum()


def test_classification_loss_is_a_sum_and_a_count():
    y, t = scores(6, 7).requires_grad_(), classes(6)
    total, count = Classification(NAMES).loss(y, t)
    by_hand = sum(-math.log(row.softmax(0)[c]) for row, c in zip(y.detach(), t, strict=True))
    assert total.item() == pytest.approx(by_hand, rel=1e-5) and count == 6
    (total / count).backward()
    expected = (y.detach().softmax(1) - F.one_hot(t, 7)) / 6
    torch.testing.assert_close(y.grad, expected)
    half, _ = Classification(NAMES).loss(y.detach().half(), t)
    assert half.dtype == torch.float32


def test_few_classes_have_a_top5():
    found, _ = counted(Classification("ab"), scores(9, 2), classes(9, high=2))
    assert found["top5"] == 1


def brute_force_iou(found, truth, count):
    """Intersection over union per class, pixel by pixel."""
    both, either = [0] * count, [0] * count
    for f, t in zip(found.flatten().tolist(), truth.flatten().tolist(), strict=True):
        if t == VOID:
            continue
        both[t] += f == t
        for c in {f, t}:
            either[c] += 1
    return [b / e if e else math.nan for b, e in zip(both, either, strict=True)]


def test_segmentation_metrics_are_those_of_a_loop():
    y, t = scores(3, 7, 12, 10), classes(3, 12, 10, high=6).to(torch.uint8)
    y[:, 6] = -9  # a class that is neither there nor found
    t[:, :3] = VOID
    found, tally = counted(Segmentation(NAMES, VOID), y, t)
    each = brute_force_iou(y.argmax(1), t, 7)
    assert [found[f"iou {n}"] for n in NAMES] == pytest.approx(each, nan_ok=True)
    assert math.isnan(each[6]) and found["miou"] == pytest.approx(sum(each[:6]) / 6)
    kept = t != VOID
    truth, best = t[kept], y.argmax(1)[kept]
    assert found["miou"] == pytest.approx(sklearn.jaccard_score(truth, best, average="macro"))
    assert found["pixel_accuracy"] == pytest.approx(sklearn.accuracy_score(truth, best))
    assert tally["count"] == kept.sum()
    pixels = y.permute(0, 2, 3, 1)[kept]
    expected = sklearn.log_loss(truth, pixels.double().softmax(1), labels=range(7))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_small_scores_are_enlarged_to_the_mask():
    task = Segmentation(NAMES, VOID)
    y, t = scores(2, 7, 4, 3).requires_grad_(), classes(2, 16, 12).to(torch.uint8)
    large = F.interpolate(y, (16, 12), mode="bilinear", align_corners=False)
    total, count = task.loss(y, t)
    expected = F.cross_entropy(large, t.long(), reduction="sum")
    assert total.item() == pytest.approx(expected.item(), rel=1e-5) and count == t.numel()
    torch.testing.assert_close(
        torch.autograd.grad(total, y)[0], torch.autograd.grad(expected, y)[0]
    )
    found, _ = counted(task, y.detach(), t, parts=2)
    right = (large.argmax(1) == t).double().mean().item()
    assert found["pixel_accuracy"] == pytest.approx(right)


def test_a_mask_that_is_all_ignored_has_no_loss():
    total, count = Segmentation(NAMES, VOID).loss(
        scores(1, 7, 4, 4), torch.full((1, 4, 4), VOID, dtype=torch.uint8)
    )
    assert total == 0 and count == 0


@pytest.mark.parametrize("task", [Classification, Segmentation])
def test_tallies_of_two_processes_add_up(task):
    shape = (8, 7) if task is Classification else (8, 7, 4, 4)
    y, t = scores(*shape), classes(8, *shape[2:])
    judge = task(NAMES)
    whole, tally = counted(judge, y, t)
    first, second = counted(judge, y[:5], t[:5])[1], counted(judge, y[5:], t[5:])[1]
    assert first.keys() == tally.keys()
    both = {key: first[key] + second[key] for key in first}
    assert judge.metrics(both) == pytest.approx(whole, nan_ok=True)


@pytest.mark.parametrize("task", [Classification, Segmentation])
@pytest.mark.parametrize(
    ("labels", "ignore", "told"),
    [
        ([0, 7], None, "label 7 is outside 0..6"),
        ([0, -1], None, "label -1 is outside"),
        ([9, 8], VOID, "label 8, 9 is outside 0..6, or 255 to be ignored"),
    ],
)
def test_labels_outside_the_range_are_refused(task, labels, ignore, told):
    with pytest.raises(ValueError, match=told):
        task(NAMES, ignore).check(torch.tensor(labels))


def test_labels_inside_the_range_pass():
    Classification(NAMES).check(torch.arange(7))
    Segmentation(NAMES, VOID).check(torch.tensor([[0, 6], [VOID, 3]], dtype=torch.uint8))


def pixels(path):
    """A picture's colours [H, W, 3] in 0..1."""
    from matplotlib.image import imread

    return torch.from_numpy(imread(path))[..., :3]


@pytest.mark.parametrize("count", [2, 10, 102])
def test_the_confusion_picture_shows_the_counts(count, tmp_path):
    pytest.importorskip("matplotlib")
    task = Classification([f"class {i}" for i in range(count)])
    right, wrong = task.tally(), task.tally()
    right["confusion"] += 5 * torch.eye(count, dtype=torch.int64)
    wrong["confusion"] += 5 * torch.eye(count, dtype=torch.int64).flip(0)
    drawn = []
    for tally, folder in ((right, "right"), (wrong, "wrong")):
        (tmp_path / folder).mkdir()
        (path,) = task.pictures(tally, [], tmp_path / folder)
        assert path.name == "confusion.png"
        drawn.append(pixels(path))
    dark = (drawn[0] - torch.tensor([8, 48, 107]) / 255).abs().amax(2) < 0.02  # 100% in Blues
    assert dark.sum() > 400
    assert drawn[0].shape != drawn[1].shape or (drawn[0] - drawn[1]).abs().max() > 0.5


@pytest.mark.parametrize("name", ["$5_{$", "caf\udce9"])  # a formula; bytes that are no text
@pytest.mark.parametrize("task", [Classification, Segmentation])
def test_any_name_of_a_class_is_drawn(task, name, tmp_path):
    pytest.importorskip("matplotlib")
    task = task([name, "more"])
    image, mask = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(8, 8, dtype=torch.uint8)
    samples = [(image, mask, torch.zeros(2, 8, 8))]
    assert all(path.is_file() for path in task.pictures(task.tally(), samples, tmp_path))


def test_predictions_are_drawn_beside_the_truth(tmp_path):
    pytest.importorskip("matplotlib")
    task = Segmentation(NAMES[:3], VOID)
    image = torch.full((3, 16, 16), 128, dtype=torch.uint8)
    truth = torch.zeros(16, 16, dtype=torch.uint8)
    output = F.one_hot(torch.full((4, 4), 2), 3).permute(2, 0, 1).float()
    (path,) = task.pictures(task.tally(), [(image, truth, output)], tmp_path)
    assert path == tmp_path / "predictions.png"
    seen = pixels(path)
    third = seen.shape[1] // 3
    for column, colour in enumerate([(128, 128, 128), palette(3)[0], palette(3)[2]]):
        part = seen[: seen.shape[0] // 2, column * third : (column + 1) * third]
        same = (part - torch.tensor(colour) / 255).abs().amax(2) < 0.02
        assert same.float().mean() > 0.4, column
    assert task.pictures(task.tally(), [], tmp_path) == []


def test_show_names_the_best_classes():
    y = torch.tensor([[0.0, 3, 1, 2, -5, -6, -7]])
    shown = Classification(NAMES).show(y, torch.zeros(3, 4, 4, dtype=torch.uint8))
    assert [name for name, _ in shown] == list("bdcae")
    assert [share for _, share in shown] == pytest.approx(y.softmax(1)[0, [1, 3, 2, 0, 4]].tolist())


def test_show_lays_colours_over_the_image():
    task = Segmentation(NAMES[:3])
    y = torch.zeros(3, 2, 2)
    y[0, :, 0] = y[1, :, 1] = 9  # left and right halves
    image = torch.full((3, 20, 30), 100, dtype=torch.uint8)
    shown = task.show(y, image)
    assert shown.size == (30, 20)
    for x, colour in ((0, palette(3)[0]), (29, palette(3)[1])):
        expected = [0.45 * 100 + 0.55 * c for c in colour]
        assert shown.getpixel((x, 10)) == pytest.approx(expected, abs=1)


def test_ignored_pixels_are_black_and_colours_differ():
    task = Segmentation(NAMES, VOID)
    drawn = task.coloured(torch.tensor([[0, VOID, 6]], dtype=torch.uint8))
    assert drawn.dtype == torch.uint8 and drawn.shape == (3, 1, 3)
    assert drawn[:, 0].T.tolist() == [list(palette(7)[0]), [0, 0, 0], list(palette(7)[6])]
    assert len(set(palette(40))) == 40


def test_scores_of_the_right_size_are_left_alone():
    y = scores(1, 2, 5, 5)
    assert enlarged(y, (5, 5)) is y
