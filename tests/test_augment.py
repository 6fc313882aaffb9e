"""Cut, mirrored, resized: masks with their pictures, all chance from torch's generator."""

import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torchvision")

from gradfilter.recipes import augment  # noqa: E402

TASKS = ("classification", "segmentation")


def photo(height=120, width=160):
    """A smooth picture: two rising ramps, which tell places apart, and noise."""
    rows = torch.linspace(0, 255, height)[:, None].expand(height, width)
    columns = torch.linspace(0, 255, width)[None].expand(height, width)
    noise = 255 * torch.rand(height, width, generator=torch.Generator().manual_seed(0))
    return torch.stack([rows, columns, noise]).to(torch.uint8)


def target_of(task, image):
    return 3 if task == "classification" else image[1].clone()  # the mask is the column's ramp


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", augment.LEVELS)
@pytest.mark.parametrize("shape", [(8, 8), (32, 32), (40, 30), (120, 160), (160, 40), (300, 1)])
def test_everything_comes_out_square_and_in_bytes(task, level, shape):
    image = photo(*shape)
    target = target_of(task, image)
    before = image.clone()
    for transform in (augment.training(task, 48, level), augment.evaluation(task, 48)):
        for _ in range(4):
            seen, answer = transform(image, target)
            assert type(seen) is torch.Tensor
            assert seen.shape == (3, 48, 48) and seen.dtype == torch.uint8
            if task == "classification":
                assert answer == 3
            else:
                assert type(answer) is torch.Tensor
                assert answer.shape == (48, 48) and answer.dtype == torch.uint8
                assert set(answer.unique().tolist()) <= set(target.unique().tolist())
    assert torch.equal(image, before)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shape", [(32, 32), (120, 160)])
def test_chance_comes_from_torch_alone(task, shape):
    image = photo(*shape)
    transform = augment.training(task, 48)

    def seen(seed, other):
        random.seed(other)
        np.random.seed(other)
        torch.manual_seed(seed)
        return transform(image, target_of(task, image))

    first = seen(0, other=1)
    states = random.getstate(), np.random.get_state()[1].tolist()
    again = seen(0, other=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    assert torch.equal(again[0], first[0]) and torch.equal(seen(0, other=2)[0], first[0])
    if task == "segmentation":
        assert torch.equal(again[1], first[1])
    assert len({seen(seed, 1)[0].numpy().tobytes() for seed in range(20)}) > 15


@pytest.mark.parametrize("task", TASKS)
def test_testing_takes_no_chances(task):
    image = photo()
    state = torch.get_rng_state()
    first = augment.evaluation(task, 48)(image, target_of(task, image))[0]
    none = augment.training(task, 48, "none")(image, target_of(task, image))[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, none)


@pytest.mark.parametrize("level", augment.LEVELS)
@pytest.mark.parametrize("shape", [(120, 160), (64, 100), (20, 30)])
def test_masks_move_with_their_pictures(level, shape, monkeypatch):
    monkeypatch.setattr(augment, "recoloured", lambda image: image)
    image = photo(*shape)
    image[1] = (image[0].float() + image[1].float()) / 8  # tells rows and columns apart
    transform = augment.training("segmentation", 48, level)
    for seed in range(20):
        torch.manual_seed(seed)
        seen, mask = transform(image, image[1].clone())
        assert (seen[1].float() - mask.float()).abs().max() <= 3


def test_masks_are_not_half_a_pixel_aside():
    mask = torch.arange(0, 192, 3, dtype=torch.uint8).expand(64, 64)
    seen, small = augment.evaluation("segmentation", 21)(mask.expand(3, 64, 64), mask)
    error = seen[0, :, 1:-1].float() - small[:, 1:-1].float()
    assert error.mean().abs() < 0.2  # where the nearest pixel is counted from the corner: 3


def mirrored(seen):
    """Whether the second channel, the rising ramp of `photo`, falls."""
    return (seen[1, :, 12].float().mean() > seen[1, :, 36].float().mean()).item()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shape", [(32, 32), (120, 160)])
def test_standard_mirrors_half_of_the_pictures_and_light_none(task, shape):
    image = photo(*shape)
    torch.manual_seed(0)
    for level, least, most in (("standard", 30, 70), ("light", 0, 0)):
        transform = augment.training(task, 48, level)
        drawn = sum(mirrored(transform(image, target_of(task, image))[0]) for _ in range(100))
        assert least <= drawn <= most


def test_small_pictures_are_shifted_at_their_own_resolution():
    image = photo(32, 32)
    padded = F.pad(image, (4, 4, 4, 4))
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[:, top : top + 32, left : left + 32]
            windows[window.numpy().tobytes()] = (top, left, False)
            windows[window.flip(2).numpy().tobytes()] = (top, left, True)
    transform = augment.training("classification", 32)
    torch.manual_seed(0)
    drawn = [windows[transform(image, 0)[0].contiguous().numpy().tobytes()] for _ in range(300)]
    assert {top for top, _, _ in drawn} == {left for _, left, _ in drawn} == set(range(9))
    enlarge = augment.training("classification", 64)
    torch.manual_seed(0)
    top, left, flip = drawn[0]
    window = padded[:, top : top + 32, left : left + 32]
    window = window.flip(2) if flip else window
    wanted = F.interpolate(window[None].float(), (64, 64), mode="bilinear", antialias=True)[0]
    assert (enlarge(image, 0)[0].float() - wanted).abs().max() <= 1


@pytest.mark.parametrize("level, smallest", [("light", 0.7), ("standard", 0.33)])
@pytest.mark.parametrize("task", TASKS)
def test_photographs_are_cut_within_their_area(task, level, smallest, monkeypatch):
    """The ramps say where a cut begins and ends."""
    monkeypatch.setattr(augment, "recoloured", lambda image: image)
    image = photo(240, 240)
    transform = augment.training(task, 64, level)
    torch.manual_seed(1)
    areas = []
    for _ in range(60):
        seen, _ = transform(image, target_of(task, image))
        rows, columns = seen[0].float().mean(1), seen[1].float().mean(0)
        areas.append((rows.max() - rows.min()) * (columns.max() - columns.min()) / 255**2)
    assert smallest - 0.1 < min(areas) < smallest + 0.15 and max(areas) > 0.85


def test_testing_looks_at_the_middle_of_photographs():
    image = photo(128, 200)
    seen, _ = augment.evaluation("classification", 112)(image, 0)
    assert torch.equal(seen, image[:, 8:120, 44:156])  # 7/8 of the short side: nothing to resize
    small = photo(32, 32)
    assert torch.equal(augment.evaluation("classification", 32)(small, 0)[0], small)


def test_testing_looks_at_all_of_a_scene():
    image = photo(90, 120)
    mask = torch.zeros(90, 120, dtype=torch.uint8)
    for value, (row, column) in enumerate([(0, 0), (0, -1), (-1, 0), (-1, -1)], start=1):
        mask[row, column] = value
    seen, whole = augment.evaluation("segmentation", 360)(image, mask)
    assert whole.unique().tolist() == [0, 1, 2, 3, 4]
    assert seen[0, 0].max() == 0 and seen[0, -1].min() == 255


def test_colours_change_only_where_scenes_are_trained_in_earnest():
    image = torch.full((3, 100, 100), 100, dtype=torch.uint8)
    mask = torch.zeros(100, 100, dtype=torch.uint8)
    for task, level, changes in [
        ("segmentation", "standard", True),
        ("segmentation", "light", False),
        ("classification", "standard", False),
    ]:
        transform = augment.training(task, 48, level)
        target = mask if task == "segmentation" else 0
        values = {transform(image, target)[0].unique().tolist()[0] for _ in range(10)}
        assert (values != {100}) == changes


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'heavy'; there are none, light, standard"):
        augment.training("classification", 32, "heavy")
    for make in (augment.training, augment.evaluation):
        with pytest.raises(ValueError, match="no task is called 'detection'"):
            make("detection", 32)


@pytest.mark.parametrize("make", [augment.training, augment.evaluation])
def test_transforms_travel_to_other_processes(make):
    transform = pickle.loads(pickle.dumps(make("classification", 32)))
    assert transform(photo(), 1)[0].shape == (3, 32, 32)
