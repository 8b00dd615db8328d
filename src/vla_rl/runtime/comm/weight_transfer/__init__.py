"""Transfer of weights from the first learner to policies in other processes: one file for each strategy of
`placement.weight_transfer`, and in `ends.py` what they share."""
