"""Texts after an instruction that label the samples of `recap`, as in the paper."""

POSITIVE = " Advantage: positive"
NEGATIVE = " Advantage: negative"
