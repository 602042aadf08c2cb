"""LLM Foundry's training on real FSDP1: ``composer -n 2 demo/fsdp1.py run.yaml [key=value ...]``.

This is what Foundry's own script does, plus the one line that lets FSDP1 run where there is no GPU.
"""

import sys

import torch
from llmfoundry.command_utils import train_from_yaml


def main() -> None:
    if not torch.cuda.is_available():
        # Composer hands this to FSDP1 as device_id, which takes any torch.device.
        torch.cuda.current_device = lambda: torch.device("cpu")
    train_from_yaml(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
