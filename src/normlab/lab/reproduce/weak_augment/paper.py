"""The tables of "Does Data Augmentation Benefit from Split BatchNorms?", as printed. Accuracies are in per cent."""

from __future__ import annotations

from ..figures import published

PAPER = "Does Data Augmentation Benefit from Split BatchNorms?"

# The main stream's augmentation where RandAugment is the auxiliary one: affinity, and clean accuracy less the 95.8 of
# RandAugment alone.
TABLE_1 = published(
    "Table 1",
    "affinity delta",
    """
    none 0.0 -1.6
    flip -0.8 0.1
    flip+crop -2.7 0.1
    cutout -16.1 0.5
    augmix -12.7 0.3
    gaussian -25.7 -0.3
    randaugment -25.0 0.0
    """,
)

# The errors of Weak Augment are printed as +-; whether they are standard errors or deviations over 10 runs is not said.
TABLE_2 = published(
    "Table 2",
    "standard cutout autoaugment randaugment weak",
    """
    cifar10 wrn-28-2 93.8 94.9 95.9 95.8 96.3±0.1
    cifar10 wrn-28-10 95.5 96.6 97.4 97.3 97.6±0.1
    cifar100 wrn-28-2 70.9 75.4 78.5 78.3 79.2±0.2
    cifar100 wrn-28-10 78.8 81.2 82.9 83.3 83.8±0.3
    """,
    keys=2,
)

# Row 1 is called flips and crops but has Table 2's figure for Cutout; flips and crops are 93.8 there.
TABLE_3 = published(
    "Table 3",
    "accuracy",
    """
    1 94.9
    2 95.8
    3 95.8
    4 95.8
    5 96.1
    6 96.1
    7 96.3
    """,
)

TABLE_4 = published(
    "Table 4",
    "baseline weak",
    """
    gaussian 93.2 95.2
    adversarial 94.7 95.2
    augmix 94.8 95.7
    randaugment 95.8 96.3
    """,
)

TABLE_5 = published(
    "Table 5",
    "standard randaugment weak",
    """
    wrn-28-2 27.7 15.9 19.1
    wrn-28-10 24.4 13.2 17.1
    """,
)
