"""Parts of `check_trainer`: small policies, made-up data, and what an update has to do with them."""
