"""LLM Foundry's training on real FSDP1: ``composer -n 2 demo/fsdp1.py run.yaml [key=value ...]``.

Foundry's own script plus one line, with which FSDP1 runs without a GPU.
"""

import sys

import torch
from llmfoundry.command_utils import train_from_yaml


def main() -> None:
    if not torch.cuda.is_available():
        # Composer passes this to FSDP1 as device_id, which accepts any torch.device.
        torch.cuda.current_device = lambda: torch.device("cpu")
    train_from_yaml(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
