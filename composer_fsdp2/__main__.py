"""Entry point of ``python -m composer_fsdp2``, which ``composer -n 2 -m composer_fsdp2 run ...`` and torchrun start
too.
"""

from composer_fsdp2.cli.main import main

if __name__ == "__main__":
    main()
