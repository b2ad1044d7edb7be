"""Scenes of digits: masks, boxes and labels agree, and the same call makes the same scenes."""

import pytest
import torch

from normlab.lab import LabError
from normlab.lab.tasks.scenes import MOST, scenes


def test_masks_boxes_and_labels_agree() -> None:
    made = scenes("digits", "train", 40, size=48)
    assert (
        made.number.min() >= 1 and made.number.max() >= MOST - 1 and made.labels.unique().tolist() == [-1, *range(10)]
    )
    for x, mask, instance, boxes, labels, number in zip(*made, strict=True):
        assert torch.equal(mask > 0, instance > 0)
        for k in range(MOST):
            mine = instance == k + 1
            if k >= number:
                assert not mine.any() and labels[k] == -1 and not boxes[k].any()
                continue
            assert (mask[mine] == labels[k] + 1).all()
            left, top, right, bottom = boxes[k].long().tolist()
            rows, columns = mine.nonzero().unbind(1)
            assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (top, bottom, left, right)
            inside = x[:, mine].float().mean(1)  # digits stand out from what is around them
            around = x[:, top:bottom, left:right][:, instance[top:bottom, left:right] == 0].float().mean(1)
            assert (inside - around).abs().max() > 10
    again, other, test = (scenes.__wrapped__("digits", *args) for args in (
        ("train", 3), ("train", 3), ("test", 3)))  # fmt: skip
    assert torch.equal(again.x, other.x) and not torch.equal(again.x, test.x)
    assert not torch.equal(scenes("digits", "train", 3, seed=1).mask, again.mask)
    with pytest.raises(LabError, match="at least 24 pixels; got 16"):
        scenes("digits", "train", 1, size=16)
