"""Training with Megatron-core."""

import logging
import warnings

# Megatron says once per module that Transformer Engine and Apex are missing, and calls collectives by older names.
# Users can do nothing about either, and every host process would repeat it.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", "`torch.distributed.(reduce_scatter|all_gather_into)_?tensor`", FutureWarning)
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)  # of MLPs it does not know
