"""Low-rank adapters on a frozen model, through peft (Hu et al. 2021)."""
