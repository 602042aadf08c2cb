"""``python -m composer_fsdp2``, so that ``composer -n 2 -m composer_fsdp2 run ...`` and torchrun can start it."""

from composer_fsdp2.cli.main import main

if __name__ == "__main__":
    main()
