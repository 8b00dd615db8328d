"""Texts after an instruction by which `recap` labels samples, as in the paper."""

POSITIVE = " Advantage: positive"
NEGATIVE = " Advantage: negative"
